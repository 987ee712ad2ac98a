"""Whole runs compared: of the program, made again from config.json; and of plain Keras scripts, from what `watch` kept."""

import dataclasses
import json
import subprocess
import sys

import conftest
import pytest


def tiny(input_shape, classes):
    """A network for `--model=test_compare_runs:tiny`."""
    import broken
    import keras

    inputs = keras.Input(input_shape)
    body = broken.network()
    h = keras.layers.Dense(5)(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes)(body(h)))


@pytest.fixture(scope="module")
def trained(tensorflow, devices, tmp_path_factory):
    """Trains two steps of the digits with `--model=test_compare_runs:tiny`; `load` may put other data in place."""
    import keras

    from app import command_line, data, train

    directory = tmp_path_factory.mktemp("runs")

    def run(name, load=None):
        flags = ["--model=test_compare_runs:tiny", "--steps=2", "--fingerprint_every=1", "--notensorboard", "--quiet"]
        flags += ["--global_batch_size=32", "--logical_replicas=4", f"--prepared_dir={directory / 'prepared'}"]
        settings, _ = command_line.parse([*flags, f"--run_dir={directory / name}"])
        with pytest.MonkeyPatch.context() as patch:
            if load:
                sound = data.load
                patch.setattr(data, "load", lambda *arguments: load(sound(*arguments), settings))
            keras.utils.set_random_seed(settings.seed)
            train.train(settings, devices(1))
        return str(directory / name)

    return run


def test_runs_of_the_program_are_rebuilt_from_their_configuration(trained, devices):
    from app import compare, rebuild
    from app.streams import TrainingStreams

    def other_order(data, settings):
        streams = TrainingStreams(data.manifest, data.treatment, 4, 32, seed=settings.seed + 1)
        return dataclasses.replace(data, training=streams)

    def unaugmented(data, settings):
        plain = dataclasses.replace(data.treatment, train=lambda image, key: data.treatment.evaluate(image))
        return dataclasses.replace(data, training=TrainingStreams(data.manifest, plain, 4, 32, seed=settings.seed))

    a, again, order, pixels = (
        compare.read(trained(*how)) for how in (("a",), ("again",), ("order", other_order), ("pixels", unaugmented))
    )
    assert all(len(line["ids"]) == 32 for line in a.steps.values())
    replay = rebuild.replay(a, devices(1))
    finding = compare.compare(a, again, replay)
    assert (finding.stage, finding.same) == (None, 2)
    finding = compare.compare(a, order, replay)
    assert (finding.step, finding.stage, finding.causes[0].number) == (1, "data", 3), str(finding)
    assert "run B's batch is the one of seed 2, example by example" in finding.causes[0].evidence
    finding = compare.compare(a, pixels, replay)
    assert (finding.step, finding.stage) == (1, "pixels"), str(finding)
    assert (finding.causes[0].number, finding.causes[0].evidence) == (4, "no augmentation")


SCRIPT = """
import sys, keras, numpy as np, tensorflow as tf, cluster
fault, path = sys.argv[1:]
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, 5)).astype("float32"), rng.integers(0, 3, 48)

class Uneven(keras.Model):  # two workers with 16 and 8 of 24 examples, whose means count equally
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = (self.compute_loss(x[:16], y[:16], y_pred[:16]) + self.compute_loss(x[16:], y[16:], y_pred[16:])) / 2
        self._loss_tracker.update_state(self.compute_loss(x, y, y_pred), sample_weight=24)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": self._loss_tracker.result()}

inputs = keras.Input((5,))
outputs = keras.layers.Dense(3)(keras.layers.Dense(6, activation="relu")(inputs))
model = (Uneven if fault == "uneven" else keras.Model)(inputs, outputs)
optimizer = keras.optimizers.SGD(0.2 if fault == "rate" else 0.1, momentum=0.9)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
data, recorder = cluster.watch(model, data, path + "/fingerprints.jsonl", keep=path + "/kept")
model.fit(data, callbacks=[recorder], verbose=0)
"""


def test_foreign_scripts_are_compared_from_what_watch_kept(tensorflow, tmp_path):
    """Two plain Keras scripts, and the command that compares their records."""
    (tmp_path / "script.py").write_text(SCRIPT)
    kinds = ("sound", "uneven")
    for kind in kinds:
        (tmp_path / kind).mkdir()
        command = [sys.executable, str(tmp_path / "script.py"), kind, str(tmp_path / kind)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    output = conftest.run_program("compare", *(str(tmp_path / kind) for kind in kinds), status=1)
    assert "part at step 1, in the stage: update" in output, output
    assert "cause: unequal local batches weighted equally: 2 workers with 16 + 8 examples" in output, output
    assert "would fit" not in output
    assert "the same: 2 recorded steps" in conftest.run_program("compare", *[str(tmp_path / "sound")] * 2)


def test_records_that_share_no_step_are_not_called_the_same(tensorflow, tmp_path):
    from app import compare_command
    from app.config import UsageError

    kinds = ("weights", "statistics", "optimizer")
    header = {
        "format": 1,
        "made_by": "cluster.watch",
        "global_batch_size": 4,
        "logical_replicas": 1,
        **dict.fromkeys(kinds, []),
    }
    start = {"step": 0, **dict.fromkeys(kinds, {"hash": [], "norm": [], "projections": []})}
    (tmp_path / "started.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, start)))
    with pytest.raises(UsageError, match="nothing to compare: no step is recorded in both runs"):
        compare_command.run([str(tmp_path / "started.jsonl")] * 2)
    (tmp_path / "cut.jsonl").write_text(json.dumps(header) + "\n")
    with pytest.raises(UsageError, match="cut.jsonl ends before the first step"):
        compare_command.run([str(tmp_path / "cut.jsonl"), str(tmp_path / "started.jsonl")])


def test_what_is_no_run_is_named_in_one_line(tmp_path):
    output = conftest.run_program("compare", str(tmp_path), str(tmp_path), status=2)
    assert output.count("error:") == 1
    assert str(tmp_path) in output
    assert "compare takes two runs" in conftest.run_program("compare", str(tmp_path), status=2)
