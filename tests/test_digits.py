"""The main job, README's first command on real data (`main_job` in conftest.py): what it learns, and what it is worth."""

import json
import re

import pytest
from conftest import run_program, sha256


def test_two_workers_learn_the_digits(main_job):
    directory, output = main_job
    right, of = map(int, re.search(r"held out: (\d+) of (\d+) right", output).groups())
    assert of == 360
    assert right / of >= 0.985
    assert "global batch 128 = 4 logical replicas x 32; 2 on each of 2 workers" in output


def evaluated(output):
    return next(line for line in output.splitlines() if "Accuracy @ 1" in line).removeprefix("[0] ")


def test_evaluation_of_the_run_is_the_same_on_one_and_four_workers(main_job, tmp_path):
    directory, output = main_job
    csv, png = tmp_path / "predictions.csv", tmp_path / "confusion.png"
    one = run_program("evaluate", f"--run_dir={directory}", f"--predictions={csv}", f"--confusion={png}")
    assert evaluated(run_program("evaluate", f"--run_dir={directory}", "--workers=4")) == evaluated(one)
    right, of, top_1 = re.search(r"held out: (\d+) of (\d+) right, top-1 ([\d.]+)", output).groups()
    assert re.fullmatch(rf"Accuracy @ 1 = {top_1} Accuracy @ 5 = [\d.]+ \[360 examples\] loss = [\d.]+", evaluated(one))
    assert png.read_bytes()[:4] == b"\x89PNG"
    rows = csv.read_text().splitlines()[1:]
    labels, predicted = zip(*((row.split(",")[2], row.split(",")[4]) for row in rows), strict=True)
    assert len(rows) == int(of)
    assert sum(a == b for a, b in zip(labels, predicted, strict=True)) == int(right)
    from sklearn.datasets import load_digits

    assert [int(label) for label in labels] == load_digits().target[::5].tolist()  # in input order


def test_evaluation_agrees_with_a_plain_loop_over_the_saved_model(main_job, tensorflow):
    import keras
    import numpy as np
    from sklearn.datasets import load_digits

    directory, output = main_job
    digits = load_digits()
    logits = keras.models.load_model(directory / "model.keras").predict(digits.images[::5, ..., None] / 16, verbose=0)
    p = np.exp(logits.astype("float64"))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(360), digits.target[::5]]).mean()
    seen = json.loads((directory / "summary.json").read_text())["val_loss"]
    assert seen == pytest.approx(loss, rel=1e-4)
    assert f"held out: {(logits.argmax(1) == digits.target[::5]).sum()} of 360" in output


def test_one_process_trains_the_same_model_to_the_last_bit(main_job, tmp_path):
    assert sha256(run_program("train", "--dataset=digits", f"--run_dir={tmp_path}")) == sha256(main_job[1])


@pytest.mark.soak
def test_four_workers_train_the_whole_job_to_the_same_model(main_job, tmp_path):
    output = run_program("train", "--dataset=digits", "--workers=4", f"--run_dir={tmp_path}", timeout=600)
    assert sha256(output) == sha256(main_job[1])
