"""An evaluator task beside a training: each checkpoint once, the training's own numbers, and an end with it."""

import json
import os
import subprocess
import sys

from conftest import processes_left

from cluster import spec
from cluster.launcher import free_addresses

FLAGS = ["--dataset=digits", "--steps=33", "--keep_checkpoints=20", "--checkpoint_every_steps=4"]


def task(cluster, job, index, *flags):
    tf_config = {"cluster": cluster, "task": {"type": job, "index": index}}
    return subprocess.Popen(
        [sys.executable, "-m", "app", "train", *FLAGS, *flags],
        env={**os.environ, "TF_CONFIG": json.dumps(tf_config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def evaluations(path):
    lines = (json.loads(line) for line in path.read_text().splitlines())
    keys = ("step", "loss", "top_1", "top_5", "examples")
    return [{key: line[key] for key in keys} for line in lines if line["event"] == "evaluation"]


def test_an_evaluator_evaluates_each_checkpoint_once_and_ends_with_the_training(tmp_path, tensorflow):
    run = tmp_path / "run"
    cluster = {"worker": free_addresses(2), "evaluator": free_addresses(1)}
    places = [f"--run_dir={run}"]
    processes = [task(cluster, "evaluator", 0, *places), *(task(cluster, "worker", i, *places) for i in (0, 1))]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert processes_left() == []
    found = evaluations(run / "evaluator" / "metrics.jsonl")
    assert [record["step"] for record in found] == [4, 8, 11, 12, 16, 20, 22, 24, 28, 32, 33]  # epochs of 11 steps end with one
    at_epochs = [record for record in found if record["step"] % 11 == 0]
    assert at_epochs == evaluations(run / "metrics.jsonl")  # to the last bit
    points = [
        (event.step, value.tag, value.simple_value)
        for path in (run / "evaluator").glob("events*")
        for event in map(_event, tensorflow.data.TFRecordDataset(str(path)))
        for value in event.summary.value
    ]
    assert [step for step, tag, _ in points if tag == "top_1"] == [record["step"] for record in found]
    assert len(points) == 3 * len(found)
    assert not any(name.endswith(".tmp") for name in os.listdir(run / "checkpoints"))
    again = task(cluster, "evaluator", 0, *places)  # all is done
    assert "evaluated 11 checkpoints" in again.communicate(timeout=100)[0]
    assert evaluations(run / "evaluator" / "metrics.jsonl") == found


def _event(record):
    from tensorboard.compat.proto.event_pb2 import Event

    return Event.FromString(record.numpy())


def test_an_evaluator_whose_training_does_not_come_ends_in_time(tmp_path):
    cluster = {"worker": ["127.0.0.1:1"]}
    process = task(cluster, "evaluator", 0, f"--run_dir={tmp_path}/none", "--evaluator_timeout_min=0.02")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2
    assert "no checkpoint has come" in output
    assert spec.is_evaluator({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})})
