"""The main job: README's first command, on real data."""

import json
import re
import subprocess
import sys

import pytest


def run_program(*flags, timeout=300):
    done = subprocess.run([sys.executable, "-m", "app", *flags], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sha256(output):
    return re.search(r"sha256 +([0-9a-f]{64}) ", output)[1]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    directory = tmp_path_factory.mktemp("digits")
    return directory, run_program("train", "--dataset=digits", "--workers=2", f"--run_dir={directory}")


def test_two_workers_learn_the_digits(main_job):
    directory, output = main_job
    right, of = map(int, re.search(r"held out: (\d+) of (\d+) right", output).groups())
    assert of == 360
    assert right / of >= 0.985
    assert "global batch 128 = 4 logical replicas x 32; 2 on each of 2 workers" in output


def test_one_process_trains_the_same_model_to_the_last_bit(main_job, tmp_path):
    assert sha256(run_program("train", "--dataset=digits", f"--run_dir={tmp_path}")) == sha256(main_job[1])


def test_four_workers_train_the_same_model_to_the_last_bit(tmp_path):
    """Without the recipe's length, since four processes share two cores here."""
    short = ["--steps=30", f"--run_dir={tmp_path}"]
    one, four = (sha256(run_program("train", *short, f"--workers={workers}")) for workers in (1, 4))
    assert one == four


@pytest.mark.soak
def test_four_workers_train_the_whole_job_to_the_same_model(main_job, tmp_path):
    output = run_program("train", "--dataset=digits", "--workers=4", f"--run_dir={tmp_path}", timeout=600)
    assert sha256(output) == sha256(main_job[1])


def test_a_run_leaves_its_model_and_its_configuration(main_job):
    import keras

    directory, _ = main_job
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.keras"]
    config = json.loads((directory / "config.json").read_text())
    assert (config["logical_replicas"], config["intra_op_threads"], config["replicas"]) == (4, 1, 2)
    assert keras.models.load_model(directory / "model.keras").count_params() == 99_754
