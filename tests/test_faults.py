"""Damaged data and disagreeing workers: one line that names file, record and reason, from the worker that met it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from cluster import spec
from cluster.launcher import free_addresses

FLAGS = ["--dataset=synthetic:8x8x1:3:256", "--global_batch_size=32", "--logical_replicas=2", "--shards=4", "--epochs=50"]


@pytest.fixture
def prepared(tmp_path):
    command = [sys.executable, "-m", "app", "prepare", f"--prepared_dir={tmp_path}/prepared", *FLAGS]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    [folder] = (tmp_path / "prepared").iterdir()
    return folder


def flip_a_byte(path):
    """In the pixels of record 2."""
    content = bytearray(path.read_bytes())
    size = len(content) // 64  # 64 records of one size in each of the 4 shards
    content[2 * size + size // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "cut in the last record's footer": (lambda path: path.write_bytes(path.read_bytes()[:-2]), "by the manifest"),
    "a flipped byte": (flip_a_byte, "checksum of record 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_by_the_worker_that_reads_it(prepared, tmp_path, damage):
    """Shard 3 of 4 belongs to worker 1 of 2."""
    change, says = DAMAGE[damage]
    shard = prepared / "train-00003-of-00004.tfrecord"
    change(shard)
    command = [sys.executable, "-m", "app", "train", "--workers=2", f"--prepared_dir={tmp_path}/prepared"]
    done = subprocess.run([*command, f"--run_dir={tmp_path}/run", *FLAGS], capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2)
    output = done.stdout + done.stderr
    lines = [line for line in output.splitlines() if shard.name in line]
    assert lines
    assert all(says in line for line in lines)
    assert any(line.startswith("[1] ") for line in lines) or damage != "a flipped byte"
    assert "Traceback" not in output


def worker(index, addresses, *flags):
    environment = {**os.environ, "TF_CONFIG": spec.local_cluster(addresses)[index]}
    return subprocess.Popen(
        [sys.executable, "-m", "app", "train", *FLAGS, *flags],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def change_the_manifest(folder):
    content = json.loads((folder / "manifest.json").read_text())
    content["mean"] = [0.5]
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("what", ["data manifest", "seed"])
def test_workers_that_would_train_something_else_are_told_so_before_the_first_step(prepared, tmp_path, what):
    other = tmp_path / "other" / prepared.name
    shutil.copytree(prepared, other)
    theirs = [f"--prepared_dir={other.parent}"]
    if what == "seed":
        theirs.append("--seed=3")
    else:
        change_the_manifest(other)
    addresses = free_addresses(2)
    run = f"--run_dir={tmp_path}/run"
    processes = [worker(0, addresses, f"--prepared_dir={prepared.parent}", run), worker(1, addresses, run, *theirs)]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 2, outputs
        assert f"worker number 1 has another {what}" in output
        assert "Traceback" not in output
