"""What the doctor examines, its table, and the real program with TensorFlow."""

import os
import re
import subprocess
import sys

import meetings
import numpy as np
import pytest
from conftest import ROOT, run_program
from meetings import members, together

from app import command_line, doctor, manifest
from cluster import spec
from cluster.launcher import free_addresses

impatient = meetings.impatient


def test_sources_are_those_of_the_program_and_of_the_users_modules(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def network(shape, classes): ...")
    monkeypatch.syspath_prepend(tmp_path)
    settings, _ = command_line.parse([])
    object.__setattr__(settings, "model", "mine:network")
    found = doctor.card(settings).facts["source"]
    assert {"app/train.py", "models/__init__.py", "mine.py"} < set(found)
    (tmp_path / "mine.py").write_text("def network(shape, classes): return None")
    assert doctor.card(settings).facts["source"]["mine.py"] != found["mine.py"]


def test_the_doctors_table_has_a_row_for_each_worker_and_says_who_is_ill(capsys):
    settings, _ = command_line.parse([])
    cluster = members(free_addresses(4))
    cards = [doctor.card(settings, member, thorough=True) for member in cluster]
    cards[1].problems.append("it is ill")
    cards[2].warnings.append("it is raining")
    parts = [(member, {"card": card}) for member, card in zip(cluster[:3], cards, strict=False)]
    parts[0][1]["show"] = doctor.shown(settings, cards[0], cluster[0])
    parts[1][1]["delay"] = 0.5
    lines = together(*parts, timeout_s=2)[0]
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if re.match(r"\d  ", line)]
    assert [row.rpartition("  ")[2] for row in rows] == ["fine", "see below", "fine", "not heard yet"]
    assert all(address in row for address, row in zip(cluster[0].addresses, rows, strict=True))
    assert "warning: worker number 2: it is raining" in said
    assert lines == [f"worker number 1 ({cluster[0].addresses[1]}): it is ill"]
    parts = [(member, {"card": card}) for member, card in zip(cluster[2:], cards[2:], strict=True)]
    together((cluster[0], {"card": cards[0], "show": doctor.shown(settings, cards[0], cluster[0])}), *parts, timeout_s=1)
    assert re.search(r"^1  .* missing: nobody listens there yet$", capsys.readouterr().out, re.M)


def test_the_doctor_examines_packages_memory_disk_and_data(tmp_path, monkeypatch):
    settings, _ = command_line.parse([f"--prepared_dir={tmp_path}", f"--run_dir={tmp_path}/a/b"])
    made = doctor.card(settings, thorough=True)
    assert (made.problems, made.about["data"]) == ([], "not prepared")
    folder = tmp_path / "digits-64shards-seed0"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    (tmp_path / "file").write_text("")
    object.__setattr__(settings, "run_dir", f"{tmp_path}/file/run")
    monkeypatch.setattr(doctor, "_fits", lambda installed, wanted: not wanted.startswith("==2.21"))
    monkeypatch.setattr(doctor, "available_memory", lambda: 1 << 20)
    made = doctor.card(settings, thorough=True)
    problems = "\n".join(made.problems)
    assert "manifest.json: is damaged" in problems
    assert "requirements.txt wants tensorflow==2.21.*: ./run.sh installs it" in problems
    assert f"--run_dir={tmp_path}/file/run" in problems
    assert "0.0 GB of memory are free" in made.warnings[0]


def test_shards_that_are_missing_are_found_before_the_start(tmp_path):
    settings, _ = command_line.parse([f"--prepared_dir={tmp_path}"])
    shard = manifest.Shard("train-0.tfrecord", 1, 10, "", np.zeros(1, np.int64))
    split, none = manifest.Split((shard,)), manifest.Split(())
    manifest.save(
        manifest.Manifest("digits", ("a",), None, "encoded", "x", (), (), 0, 0, split, none), settings.prepared_path()
    )
    assert "train-0.tfrecord: No such file" in doctor.card(settings, thorough=True).problems[0]
    assert doctor.card(settings).problems == []  # training looks when it opens them


def test_imagenet_is_looked_for_where_it_lies(tmp_path):
    raw = tmp_path / "raw"
    settings, _ = command_line.parse(["--dataset=imagenet", f"--data_dir={raw}", f"--prepared_dir={tmp_path}"])
    made = doctor.card(settings, thorough=True)
    assert (made.problems, made.about["data"]) == (
        [f"imagenet: {raw} cannot be read: No such file or directory; --data_dir names the folder"],
        "not found",
    )
    raw.mkdir()
    names = [f"{part}-{i:05d}-of-{of:05d}" for part, of in (("train", 3), ("validation", 2)) for i in range(of)]
    for name in names:
        (raw / name).write_bytes(b"x" * 10)
    made = doctor.card(settings, thorough=True)
    assert (made.problems, made.about["data"]) == ([], "3 + 2 files, not read yet")
    shards = [manifest.Shard(str(raw / name), 4, 10, "", np.zeros(4, np.int64)) for name in names]
    splits = manifest.Split(tuple(shards[:3])), manifest.Split(tuple(shards[3:]))
    manifest.save(
        manifest.Manifest("imagenet", ("a",), None, "encoded", "x", (), (), 0, 0, *splits), tmp_path / "imagenet" / "manifest"
    )
    assert doctor.card(settings, thorough=True).about["data"] == "12 + 8"
    (raw / names[0]).write_bytes(b"x" * 11)  # another file
    assert doctor.card(settings, thorough=True).about["data"] == "3 + 2 files, not read yet"
    (raw / names[0]).unlink()
    made = doctor.card(settings, thorough=True)
    assert made.about["data"] == "not found" and "lacks train-00000-of-00003; expected 3 train files" in made.problems[0]


def test_a_worker_without_data_is_told_to_all_before_tensorflow_starts(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('TensorFlow is imported')")
    flags = ["train", "--dataset=mnist", f"--data_dir={tmp_path}/none", f"--prepared_dir={tmp_path}/p"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "app", *flags],
            env={**os.environ, "TF_CONFIG": tf_config, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tf_config in spec.local_cluster(free_addresses(2))
    ]
    for process in processes:
        for line in process.communicate(timeout=60)[0].splitlines():  # its own, or that of both
            assert re.match(
                r"error: worker number [01] \(127\.0\.0\.1:\d+\): mnist: looked for train-images-idx3-ubyte, ", line
            )
        assert process.returncode == 2


@pytest.mark.parametrize(
    ("installed", "wanted", "fits"),
    [("2.21.0", "==2.21.*", True), ("2.2.1", "==2.21.*", False), ("2.10", ">=2.9", True), ("2.1", ">=2.1.1", False)],
)
def test_versions_fit_as_requirements_say(installed, wanted, fits):
    assert doctor._fits(installed, wanted) == fits


def test_memory_is_what_machine_and_control_group_leave(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4000 kB\n")
    assert doctor.available_memory(tmp_path) == 4_096_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert doctor.available_memory(tmp_path) == 4_096_000
    (group / "memory.max").write_text("105\n")
    assert doctor.available_memory(tmp_path) == 100


def test_the_program_examines_a_cluster_through_tensorflow_and_past_a_proxy_that_is_not_there(monkeypatch):
    """The real one; without `bypass_proxies` TensorFlow's start hangs here."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    said = run_program("doctor", "--workers=2")
    assert re.search(r"\[0\] 1 +127\.0\.0\.1:\d+ .* fine\n", said)
    assert "[0] warning: http_proxy is set, to 127.0.0.1:9: not used between the workers" in said
    assert re.search(r"through TensorFlow: a sum of 32 MB over 2 replicas is right \([\d,]+ ms, \d+\.\d\d GB/s", said)
    assert said.endswith("[0] fine: ready to train\n")
    assert "[1]" not in said


def test_the_program_tells_a_mistake_of_one_worker_on_all_with_status_2():
    addresses = free_addresses(2)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "app", "doctor", f"--seed={index + 1}"],
            env={**os.environ, "TF_CONFIG": tf_config},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, tf_config in enumerate(spec.local_cluster(addresses))
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    line = "error: worker number 1 has another seed: 2; the chief has 1; start all workers with the same flags\n"
    assert [process.returncode for process in processes] == [2, 2]
    assert outputs[0].endswith(line) and outputs[1] == line
