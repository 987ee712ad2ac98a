"""A run that was stopped or has crashed goes on as if nothing had been, whatever is wrong on the disk."""

import csv
import json
import os
import shutil

import keras
import pytest

from app import command_line
from cluster import checkpoint, wishes

SMALL = [
    "--dataset=synthetic:8x8x1:3:256",
    "--model=trivial",
    "--global_batch_size=32",
    "--logical_replicas=2",
    "--shards=4",
    "--optimizer=adam",
    "--learning_rate=0.003",
    "--steps=20",  # two and a half epochs of eight
    "--fingerprint_every=3",
]
EVALUATIONS = ["--eval_every_steps=5", "--eval_at_start"]
TIMES = {"step_time_s", "images_per_sec", "input_wait_s", "seconds", "epoch_images_per_sec", "memory_mb"}


class Crash(Exception):
    pass


class End(keras.callbacks.Callback):
    """Crashes, or wishes to stop, at a step, or in the evaluation of the epoch that it ends."""

    def __init__(self, how=None, step=None):
        super().__init__()
        self._how, self._step = how, step

    def on_train_batch_begin(self, batch, logs=None):
        if self._how == "stop" and self.model.step + 1 == self._step:
            wishes.mine[wishes.STOP] = 1

    def on_train_batch_end(self, batch, logs=None):
        if self._how == "crash" and self.model.step == self._step:
            raise Crash

    def on_test_batch_begin(self, batch, logs=None):
        if self._how == "stop in evaluation" and self.model.step == self._step:
            wishes.mine[wishes.STOP] = 1


@pytest.fixture(scope="module")
def run(devices, tmp_path_factory):
    """Trains in a directory: run(directory, *flags, end=("stop", 5)); what `train` returns, or "stopped", "crashed"."""
    from app.train import train

    prepared = tmp_path_factory.mktemp("prepared")

    def run(directory, *flags, end=(), replicas=1):
        config, _ = command_line.parse([*SMALL, f"--prepared_dir={prepared}", f"--run_dir={directory}", *flags])
        keras.utils.clear_session()  # the same names of layers, as in a new process
        keras.utils.set_random_seed(config.seed)
        try:
            return train(config, devices(replicas), [End(*end)])
        except (wishes.Stopped, Crash) as error:
            return {"Stopped": "stopped", "Crash": "crashed"}[type(error).__name__]

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """Uninterrupted runs: whole(*flags) is (sha256, what its files tell)."""
    directory, made = tmp_path_factory.mktemp("whole"), {}

    def whole(*flags):
        if flags not in made:
            found = run(directory / str(len(made)), *flags)
            made[flags] = found["sha256"], told(directory / str(len(made)))
        return made[flags]

    return whole


def told(directory):
    """All that a run's files tell, in order, without times; of those that they are there."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorflow.compat.v1.io import tf_record_iterator

    def timeless(record):
        return [(name, value) for name, value in record.items() if name.rpartition("/")[2] not in TIMES]

    found = {"jsonl": [timeless(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]}
    with open(directory / "metrics.csv", newline="") as file:
        found["csv"] = [timeless(row) for row in csv.DictReader(file)]
    found["fingerprints"] = [json.loads(line) for line in (directory / "fingerprints.jsonl").read_text().splitlines()]
    for folder in ("train", "validation", "worker-0"):
        points = found[folder] = []
        for path in sorted((directory / folder).glob("*tfevents*"), key=lambda path: int(path.name.split(".")[3])):
            for event in map(Event.FromString, tf_record_iterator(str(path))):
                values = {v.tag: v.simple_value for v in event.summary.value if v.HasField("simple_value")}
                points += [(event.step, sorted(values), timeless(values))] if values else []
    return found


def checkpoints(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_an_uninterrupted_runs_files_have_every_step_evaluation_and_epoch_once(whole):
    """The reference of the tests below, by counting."""
    _, files = whole(*EVALUATIONS)
    order = [(dict(line)["event"], dict(line)["step"]) for line in files["jsonl"]]
    expected = [("evaluation", 0)]
    for step in range(1, 21):
        expected += [("step", step), *[("evaluation", step)] * (step in (5, 8, 10, 15, 16, 20))]
        expected += [("epoch", step)] * (step in (8, 16, 20))
    assert order == expected
    assert [row["step"] for row in map(dict, files["csv"])] == ["8", "16", "20"]
    steps = [line["step"] for line in files["fingerprints"][2:] if "step" in line]
    assert steps == [1, 3, 6, 9, 12, 15, 18]
    for folder in ("train", "worker-0"):
        assert [step for step, tags, _ in files[folder] if "epoch_loss" not in tags] == list(range(1, 21))
    by_step = [step for step, tags, _ in files["validation"] if "loss" in tags]
    assert by_step == [0, 5, 8, 10, 15, 16, 20]


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        pytest.param((), [("crash", 14), ("crash", 19)], marks=pytest.mark.soak),
        (EVALUATIONS, [("crash", 3), ("crash", 14)]),  # there is no checkpoint at first: it begins anew
        (EVALUATIONS, [("stop", 6), ("stop", 10), ("stop", 16)]),  # the two latter at evaluations
        (EVALUATIONS, [("stop in evaluation", 8), ("stop in evaluation", 20)]),
    ],
)
def test_a_resumed_runs_files_are_those_of_the_uninterrupted_one(run, whole, tmp_path, flags, ends):
    """Nothing twice and nothing missing, with what a crash leaves after the checkpoint, half lines and half records too."""
    sha256, files = whole(*flags)
    every = ["--checkpoint_every_steps=5"] if ends[0][0] == "crash" else []
    for end in ends:
        assert run(tmp_path, *flags, *every, end=end) in ("stopped", "crashed")
        if end[0] == "crash":
            for name in ("metrics.jsonl", "metrics.csv", "fingerprints.jsonl"):
                with open(tmp_path / name, "ab") as file:
                    file.write(b'{"event": "st\xe2\x80')
            for path in tmp_path.glob("*/*tfevents*"):
                content = path.read_bytes()
                path.write_bytes(content + content[:20])
    found = run(tmp_path, *flags, *every)
    assert found["sha256"] == sha256
    again = told(tmp_path)
    for name in files:
        assert again[name] == files[name], name
    assert not list(tmp_path.rglob("*.tmp"))


# ---- what is wrong on the disk -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(run, tmp_path_factory):
    """A copy of a run with checkpoints after 5, 8 and 10 steps, which crashed after 12."""
    directory = tmp_path_factory.mktemp("interrupted") / "run"
    assert run(directory, "--checkpoint_every_steps=5", "--keep_checkpoints=3", end=("crash", 12)) == "crashed"
    assert checkpoints(directory) == [f"step-{n:08}.npz" for n in (5, 8, 10)]

    def copy(to):
        shutil.copytree(directory, to, dirs_exist_ok=True)
        return to / "checkpoints"

    return copy


def test_a_checkpoint_that_cannot_be_used_is_passed_over_in_a_line_that_names_it(run, whole, interrupted, tmp_path, capsys):
    folder = interrupted(tmp_path)
    cut, foreign = folder / "step-00000010.npz", folder / "step-00000008.npz"
    cut.write_bytes(cut.read_bytes()[:-100])
    state = checkpoint.from_bytes(foreign.read_bytes())
    state.facts["run"]["seed"] = 2
    foreign.write_bytes(state.to_bytes())
    found = run(tmp_path)
    output = capsys.readouterr().out
    assert (found["sha256"], found["first_step"]) == (whole()[0], 6)
    assert told(tmp_path) == whole()[1]
    lines = [line for line in output.splitlines() if "warning" in line]
    assert len(lines) == 2
    assert f"{cut} is passed over, and renamed to step-00000010.npz.unusable: it is cut off" in lines[0]
    assert f"{foreign} is passed over" in lines[1] and "it is of another run (seed)" in lines[1]
    assert {f"{cut.name}.unusable", f"{foreign.name}.unusable"} < set(checkpoints(tmp_path))


def test_without_any_usable_checkpoint_a_run_begins_anew(run, whole, interrupted, tmp_path, capsys):
    for path in interrupted(tmp_path).iterdir():
        path.write_bytes(b"")
    found = run(tmp_path)
    assert capsys.readouterr().out.count("is passed over") == 3
    assert (found["sha256"], found["first_step"]) == (whole()[0], 1)
    assert told(tmp_path) == whole()[1]


@pytest.mark.parametrize("operation", ["write", pytest.param("rename", marks=pytest.mark.soak)])
def test_a_full_disk_is_a_warning_and_the_checkpoint_before_is_kept(run, whole, tmp_path, monkeypatch, capsys, operation):
    import tensorflow as tf

    full = tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    class GFile(tf.io.gfile.GFile):
        def write(self, content):
            if "step-00000016" in str(self.name):
                super().write(content[:100])
                raise full
            super().write(content)

    sound = tf.io.gfile.rename

    def rename(source, target, overwrite=False):
        if "step-00000016" in target:
            raise full
        sound(source, target, overwrite)

    patch = {"write": ("GFile", GFile), "rename": ("rename", rename)}[operation]
    monkeypatch.setattr(tf.io.gfile, *patch)
    assert run(tmp_path, end=("crash", 18)) == "crashed"
    output = capsys.readouterr().out
    assert "warning: the checkpoint of step 16 could not be written: No space left on device; those before are kept" in output
    assert checkpoints(tmp_path) == ["step-00000008.npz"]  # and no half of one
    monkeypatch.undo()
    found = run(tmp_path)
    assert (found["sha256"], found["first_step"]) == (whole()[0], 9)


def test_a_file_in_the_place_of_the_checkpoints_is_a_warning_each_time_and_training_ends_well(run, whole, tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    assert run(tmp_path)["sha256"] == whole()[0]
    assert capsys.readouterr().out.count("could not be written") == 3
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_stop_whose_checkpoint_cannot_be_written_says_where_the_run_goes_on(run, tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    assert run(tmp_path, end=("stop", 3)) == "stopped"
    assert "stopped at step 3: the same command begins anew: there is no checkpoint yet" in capsys.readouterr().out


def test_a_run_directory_on_another_file_system_is_stopped_and_goes_on(run, whole):
    import tensorflow as tf

    assert run("ram://runs/one", *EVALUATIONS, end=("stop", 13)) == "stopped"
    assert tf.io.gfile.listdir("ram://runs/one/checkpoints") == ["step-00000008.npz", "step-00000013.npz"]
    found = run("ram://runs/one", *EVALUATIONS)
    assert (found["sha256"], found["first_step"]) == (whole()[0], 14)
    lines = [json.loads(line) for line in tf.io.gfile.GFile("ram://runs/one/metrics.jsonl").read().splitlines()]
    order = [(line["event"], line["step"]) for line in lines]
    assert order == [(dict(line)["event"], dict(line)["step"]) for line in whole(*EVALUATIONS)[1]["jsonl"]]


# ---- which are kept ------------------------------------------------------------------------------------------------------


def test_the_last_ones_and_the_best_are_kept_and_an_epochs_end_has_one(run, tmp_path):
    """Five epochs of eight steps, every fourth a checkpoint: at 4, 12, ... in the epoch, at 8, 16, ... when it has ended."""
    found = run(tmp_path, "--steps=40", "--checkpoint_every_steps=4", "--keep_checkpoints=2", "--learning_rate=0.1")
    accuracies = found["history"]["val_top_1"]
    best = 8 * (1 + accuracies.index(max(accuracies)))
    assert checkpoints(tmp_path) == [f"step-{n:08}.npz" for n in sorted({best, 36, 40})]
    for path in (tmp_path / "checkpoints").iterdir():
        state = checkpoint.from_bytes(path.read_bytes())
        assert (state.epoch, state.in_epoch) == divmod(state.step, 8)
        assert state.facts["best"] == [max(accuracies[: state.epoch]), best] or state.step < best


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.soak), ("--checkpoint_every_steps=1",)])
def test_no_checkpoints_at_all_if_none_is_kept(run, whole, tmp_path, flags, capsys):
    assert run(tmp_path, *flags, "--keep_checkpoints=0", end=("stop", 3)) == "stopped"
    assert not os.path.exists(tmp_path / "checkpoints")
    assert "the same command begins anew" in capsys.readouterr().out
    if flags:
        assert run(tmp_path, *flags, "--keep_checkpoints=0")["sha256"] == whole()[0]
        assert not os.path.exists(tmp_path / "checkpoints")
        assert told(tmp_path) == whole()[1]
