"""What a run tells while it trains: each step, evaluation and epoch once, the same numbers in every file, and NumPy's."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import processes_left

from app import command_line
from cluster.launcher import free_addresses

STEPS_PER_EPOCH, EPOCHS = 11, 40  # round(1437 / 128), recipes/digits.flags
TIMES = {"step_time_s", "images_per_sec", "input_wait_s", "seconds"}
METRICS = ("loss", "top_1", "top_5")
STEP = ["step", "epoch", *METRICS, "learning_rate", "gradient_norm", "input_wait_s", "step_time_s", "images_per_sec"]


def events_of(directory):
    """{event: [record]} of metrics.jsonl, and the events' order."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    order = [(line.pop("event"), line["step"]) for line in lines]
    return {kind: [r for (k, _), r in zip(order, lines, strict=True) if k == kind] for kind, _ in order}, order


def scalars_of(directory):
    """{tag: [(step, value)]} of a directory of TensorBoard's events, and its texts {tag: [text]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    texts = {tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)] for tag in tags["tensors"]}
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}, texts


def without_times(records):
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def test_metrics_jsonl_has_a_line_for_every_step_evaluation_and_epoch_once_and_in_order(main_job):
    events, order = events_of(main_job[0])
    steps = range(1, EPOCHS * STEPS_PER_EPOCH + 1)
    ends = [step for step in steps if step % STEPS_PER_EPOCH == 0]
    expected = [
        event for step in steps for event in [("step", step), *[(e, step) for e in ("evaluation", "epoch") if step in ends]]
    ]
    assert order == expected
    assert [r["epoch"] for r in events["step"]] == [1 + (step - 1) // STEPS_PER_EPOCH for step in steps]
    assert [(r["epoch"], r["step"], r["steps"]) for r in events["epoch"]] == [(e, 11 * e, 11) for e in range(1, EPOCHS + 1)]
    assert {r["examples"] for r in events["evaluation"]} == {360}
    assert all(list(r) == STEP for r in events["step"])


def test_an_epochs_numbers_are_those_of_its_steps_and_of_its_evaluation(main_job):
    events, _ = events_of(main_job[0])
    for number, (epoch, evaluation) in enumerate(zip(events["epoch"], events["evaluation"], strict=True)):
        steps = events["step"][number * STEPS_PER_EPOCH : (number + 1) * STEPS_PER_EPOCH]
        for name in METRICS:  # batches of one size: the mean over the examples is the mean over the steps
            assert epoch[name] == pytest.approx(np.mean([r[name] for r in steps]), rel=1e-5)
            assert epoch[f"val_{name}"] == evaluation[name]
        seconds = sum(r["step_time_s"] for r in steps)
        assert seconds < epoch["seconds"]
        assert epoch["images_per_sec"] == pytest.approx(STEPS_PER_EPOCH * 128 / seconds, rel=1e-6)
    for r in events["step"]:
        assert r["images_per_sec"] * r["step_time_s"] == pytest.approx(128)
        assert 0 <= r["input_wait_s"] < r["step_time_s"]
        assert r["gradient_norm"] > 0
        assert r["top_1"] * 128 == round(r["top_1"] * 128)  # so many of 128


def test_the_learning_rate_of_every_step_is_the_recipes_cosine(main_job):
    events, _ = events_of(main_job[0])
    t, total = np.arange(440), 440
    expected = 0.002 * (1 + np.cos(math.pi * t / total)) / 2  # after t updates
    np.testing.assert_allclose([r["learning_rate"] for r in events["step"]], expected, rtol=1e-6, atol=1e-12)


def test_metrics_csv_is_the_epochs_lines(main_job):
    directory, _ = main_job
    events, _ = events_of(directory)
    with open(directory / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == events["epoch"]


def test_the_summary_and_the_terminals_table_are_the_epochs_numbers(main_job):
    directory, output = main_job
    epochs = events_of(directory)[0]["epoch"]
    summary = json.loads((directory / "summary.json").read_text())
    last = {name: value for name, value in epochs[-1].items() if name.removeprefix("val_") in METRICS}
    assert last.items() <= summary.items()
    best = max(r["val_top_1"] for r in epochs)
    assert (summary["best_val_top_1"], epochs[summary["best_epoch"] - 1]["val_top_1"]) == (best, best)
    rows = re.findall(r"^\[0\] +(\d+)/40((?: +[\d.]+){6}) +[\d,]+ +\S+ s$", output, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, EPOCHS + 1))
    for (_, cells), r in zip(rows, epochs, strict=True):
        assert cells.split() == [f"{r[name]:.4f}" for name in (*METRICS, *(f"val_{m}" for m in METRICS))]


# ---- TensorBoard ---------------------------------------------------------------------------------------------------------


def test_tensorboard_has_the_same_numbers_one_point_a_step(main_job, tensorflow):
    directory, _ = main_job
    events, _ = events_of(directory)
    train, _ = scalars_of(directory / "train")
    of_epochs = {f"epoch_{name}": name for name in (*METRICS, "images_per_sec")}
    assert set(train) == {*STEP[2:], *of_epochs}
    for name in STEP[2:]:
        assert train[name] == [(r["step"], np.float32(r[name])) for r in events["step"]]
    for tag, name in of_epochs.items():
        assert train[tag] == [(r["epoch"], np.float32(r[name])) for r in events["epoch"]]
    validation, _ = scalars_of(directory / "validation")
    for name in METRICS:  # tags that training has too, and so the same charts
        assert validation.pop(name) == [(r["step"], np.float32(r[name])) for r in events["evaluation"]]
        assert validation.pop(f"epoch_{name}") == [(r["epoch"], np.float32(r[f"val_{name}"])) for r in events["epoch"]]
    assert validation == {}


def test_tensorboard_has_every_workers_times_and_memory_and_the_configuration(main_job, tensorflow):
    directory, _ = main_job
    for worker in (0, 1):
        points, texts = scalars_of(directory / f"worker-{worker}")
        assert set(points) == {"worker/step_time_s", "worker/input_wait_s", "worker/memory_mb"}
        assert all([step for step, _ in series] == list(range(1, 441)) for series in points.values())
        assert all(100 < megabytes < 10_000 for _, megabytes in points["worker/memory_mb"])
        assert texts == {}
    _, texts = scalars_of(directory / "train")
    [[text]] = texts.values()
    assert list(texts) == ["configuration/text_summary"]
    told, written = json.loads(text.replace("\n    ", "\n")), json.loads((directory / "config.json").read_text())
    [start] = written.pop("starts")
    assert start.items() <= {**written, "after_step": 0}.items()
    assert told == written


def sockets_of(port):
    """Addresses, as /proc/net/tcp and tcp6 write them, at which this machine listens on the port."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as file:
            fields = [line.split() for line in file.readlines()[1:]]
        found |= {f[1].split(":")[0] for f in fields if f[3] == "0A" and f[1].endswith(f":{port:04X}")}
    return found


def test_the_tensorboard_command_shows_the_run_to_this_machine_alone_until_sigterm(main_job):
    directory, _ = main_job
    port = int(free_addresses(1)[0].rpartition(":")[2])
    command = [sys.executable, "-m", "app", "tensorboard", f"--run_dir={directory}", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            tags, deadline = {}, time.monotonic() + 100
            while "loss" not in tags.get("validation", {}) and time.monotonic() < deadline:
                assert process.poll() is None, process.stderr.read()
                try:
                    with urllib.request.urlopen(f"http://localhost:{port}/data/plugin/scalars/tags", timeout=5) as answer:
                        tags = json.load(answer)
                except (urllib.error.URLError, TimeoutError):
                    pass
                time.sleep(0.2)
            assert set(tags) == {"train", "validation", "worker-0", "worker-1"}
            assert {"loss", "top_1", "top_5"} <= set(tags["train"]) & set(tags["validation"])
            local = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
            assert sockets_of(port) and sockets_of(port) <= local
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
    assert [line for line in processes_left() if "tensorboard" in line] == []


# ---- small runs in this process ------------------------------------------------------------------------------------------

SMALL = [
    "--dataset=synthetic:8x8x1:10:256",
    "--model=trivial",
    "--global_batch_size=32",
    "--logical_replicas=2",
    "--shards=4",
    "--optimizer=sgd",
    "--learning_rate=0.01",
    "--steps=12",  # one and a half epochs of eight
    "--eval_every_steps=8",
    "--eval_at_steps=4",
    "--eval_at_start",
]


@pytest.fixture(scope="module")
def small_run(devices, tmp_path_factory):
    """Trains on two devices with further flags: small_run("--quiet") is (run directory, what `train` returns)."""
    import keras

    from app.train import train

    directory, made = tmp_path_factory.mktemp("small"), {}

    def run(*flags):
        if flags not in made:
            places = [f"--prepared_dir={directory}/prepared", f"--run_dir={directory}/{len(made)}"]
            config, _ = command_line.parse([*SMALL, *places, *flags])
            keras.utils.set_random_seed(config.seed)
            made[flags] = directory / str(len(made)), train(config, devices(2))
        return made[flags]

    return run


def test_an_evaluation_is_told_once_also_at_an_epochs_end_and_before_the_first_step(small_run, tensorflow):
    directory, found = small_run()
    events, order = events_of(directory)
    expected = [("evaluation", 0)]
    for step in range(1, 13):
        expected += [("step", step), *[("evaluation", step)] * (step % 4 == 0), *[("epoch", step)] * (step in (8, 12))]
    assert order == expected
    assert [(r["epoch"], r["steps"]) for r in events["epoch"]] == [(1, 8), (2, 4)]
    assert {r["examples"] for r in events["evaluation"]} == {64}
    validation, _ = scalars_of(directory / "validation")
    assert validation["loss"] == [(r["step"], np.float32(r["loss"])) for r in events["evaluation"]]
    assert [r["loss"] for r in events["epoch"]] == found["history"]["loss"]
    assert [r["val_top_1"] for r in events["epoch"]] == found["history"]["val_top_1"]
    for epoch in events["epoch"]:
        losses = [r["loss"] for r in events["step"] if r["epoch"] == epoch["epoch"]]
        assert epoch["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_several_steps_in_an_execution_tell_the_same(small_run):
    (one, found), (several, other) = small_run(), small_run("--steps_per_execution=4", "--notensorboard")
    (events, order), (others, in_order) = events_of(one), events_of(several)
    assert in_order[1:5] == [("step", step) for step in (1, 2, 3, 4)]
    assert sorted(in_order) == sorted(order)
    for kind in events:
        assert without_times(others[kind]) == without_times(events[kind])
    assert other["sha256"] == found["sha256"]


def test_without_tensorboard_there_are_no_events(small_run):
    directory, _ = small_run("--steps_per_execution=4", "--notensorboard")
    assert list(directory.rglob("*events*")) == []
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["checkpoints", "worker-0"]


def test_every_so_many_steps_has_a_line_and_a_point_and_the_first_shows_at_once_that_the_run_has_begun(tensorflow, tmp_path):
    from app.monitoring import MetricsFiles, TrainEvents, WorkerEvents

    folder = tmp_path / "worker-0"
    sinks = MetricsFiles(str(tmp_path), 6), TrainEvents(str(tmp_path), 6), WorkerEvents(str(folder), 6)
    for step in range(1, 20):
        for sink in sinks:
            sink.step({"step": step, "epoch": 1, "loss": 0.5, "step_time_s": 0.25, "input_wait_s": 0.0})
        if step == 1:
            assert [r["step"] for r in events_of(tmp_path)[0]["step"]] == [1]
    for sink in sinks:
        sink.close()
    expected = [1, 6, 12, 18]
    assert [r["step"] for r in events_of(tmp_path)[0]["step"]] == expected
    assert scalars_of(tmp_path / "train")[0]["loss"] == [(step, 0.5) for step in expected]
    assert scalars_of(folder)[0]["worker/step_time_s"] == [(step, 0.25) for step in expected]


def softmax_regression(x, y, batch, rates, clip):
    """(loss, accuracy, norm of the gradient before clipping) of each step from weights of 0, by NumPy in float64."""
    weights, found = np.zeros((x.shape[1], 3)), []
    for step, rate in enumerate(rates):
        images, labels = (a[step * batch : (step + 1) * batch] for a in (x.astype(float), y))
        logits = images @ weights
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        right = (logits.argmax(1) == labels).mean()
        loss = -np.log(p[np.arange(batch), labels]).mean()
        p[np.arange(batch), labels] -= 1
        gradient = images.T @ p / batch
        norm = np.linalg.norm(gradient)
        found.append((loss, right, norm))
        weights -= rate * gradient * min(1, clip / norm)
    return np.array(found)


@pytest.mark.parametrize(("steps_per_execution", "loss_scale"), [(1, None), (4, 128.0)])
def test_the_records_of_every_step_are_numpys(devices, steps_per_execution, loss_scale):
    """Loss, top-1 and the norm of the global gradient, of each step alone, over both devices, before clipping."""
    import keras
    import tensorflow as tf

    import cluster
    from app.monitoring import Monitor

    steps, batch, clip, strategy = 9, 12, 0.05, devices(2)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(steps * batch, 4)).astype("float32")
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    rates = np.float32([0.5 / (1 + t) for t in range(steps)])
    with strategy.scope():
        inputs = keras.Input((4,))
        plain = keras.Model(inputs, keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")(inputs))
        model = cluster.Trainer(plain, batch, logical_replicas=4)
        model.compile(
            keras.optimizers.SGD(0.5, global_clipnorm=clip, loss_scale_factor=loss_scale),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="top_1")],
            steps_per_execution=steps_per_execution,
            schedule=lambda t: 0.5 / (1 + tf.cast(t, tf.float32)),
        )

    records: list[dict] = []
    sink = types.SimpleNamespace(step=records.append)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)
    model.fit(data, callbacks=[Monitor([sink], batch)], verbose=0)
    assert [r["step"] for r in records] == list(range(1, steps + 1))
    seen = [[r["loss"], r["top_1"], r["gradient_norm"]] for r in records]
    np.testing.assert_allclose(seen, softmax_regression(x, y, batch, rates, clip), rtol=2e-5)
    np.testing.assert_array_equal(np.float32([r["learning_rate"] for r in records]), rates)
    assert min(r["gradient_norm"] for r in records) > clip
