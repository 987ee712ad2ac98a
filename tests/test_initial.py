"""--init_from: a run that begins with the weights of a file takes what fits, says so, and is otherwise a run like any other."""

import io
import json
import types
import zipfile

import keras
import numpy as np
import pytest
from conftest import run_program

from app import command_line, early, run_dir
from app.config import UsageError
from cluster import wishes

SMALL = ["--model=trivial", "--global_batch_size=32", "--logical_replicas=2", "--shards=4", "--optimizer=adam"]
SMALL += ["--learning_rate=0.003", "--steps=4", "--notensorboard", "--fingerprint_every=4"]
THREE, FOUR = "--dataset=synthetic:8x8x1:3:256", "--dataset=synthetic:8x8x1:4:256"


@pytest.fixture(scope="module")
def run(devices, tmp_path_factory):
    """Trains: run(directory, *flags, replicas=1)."""
    from app.train import train

    prepared = tmp_path_factory.mktemp("prepared")

    def run(directory, *flags, replicas=1, stop=None):
        config, _ = command_line.parse([*SMALL, f"--prepared_dir={prepared}", f"--run_dir={directory}", *flags])
        keras.utils.clear_session()  # the same names of layers, as in a new process
        keras.utils.set_random_seed(config.seed)
        return train(config, devices(replicas), [keras.callbacks.LambdaCallback(on_train_batch_begin=stop)])

    return run


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """A run's model.keras, and the same weights as a .weights.h5 and as an .h5 file."""
    directory = tmp_path_factory.mktemp("trained")
    run(directory, THREE)
    model = keras.saving.load_model(directory / "model.keras", compile=False)
    model.save_weights(directory / "model.weights.h5")
    model.save(directory / "model.h5")
    return directory


def fingerprints(directory):
    return [json.loads(line) for line in (directory / "fingerprints.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.h5"])
def test_a_run_begins_with_the_files_weights_and_with_step_and_optimizer_anew(run, trained, tmp_path, capsys, name):
    run(tmp_path, THREE, f"--init_from={trained / name}")
    assert f"init    6 of 6 variables from {trained / name}\n" in capsys.readouterr().out
    before, first, (_, begun, step, *_) = fingerprints(trained)[1], fingerprints(trained), fingerprints(tmp_path)
    ended = [line for line in first if line.get("step") == 4][-1]
    assert begun["weights"]["hash"] == ended["weights"]["hash"] != before["weights"]["hash"]
    assert begun["optimizer"] == before["optimizer"]
    assert (begun["step"], step["step"]) == (0, 1)


def test_it_is_the_same_run_on_any_number_of_devices(run, trained, tmp_path):
    flags = [THREE, f"--init_from={trained / 'model.keras'}"]
    assert run(tmp_path / "1", *flags)["sha256"] == run(tmp_path / "2", *flags, replicas=2)["sha256"]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_head_for_other_classes_stays_as_it_is_initialised_and_is_named(run, trained, tmp_path, capsys, name):
    run(tmp_path / "plain", FOUR)
    run(tmp_path / "init", FOUR, f"--init_from={trained / name}")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("init "))
    assert line.startswith(f"init    4 of 6 variables from {trained / name}; not taken: dense_2/kernel (")
    assert "dense_2/bias (" in line
    plain, init = (fingerprints(tmp_path / name)[1]["weights"]["hash"] for name in ("plain", "init"))
    ended = [line for line in fingerprints(trained) if line.get("step") == 4][-1]["weights"]["hash"]
    assert init == [*ended[:4], *plain[4:]]


def test_a_stopped_run_goes_on_without_the_file(run, trained, tmp_path):
    file = tmp_path / "first.keras"
    file.write_bytes((trained / "model.keras").read_bytes())
    flags = [THREE, f"--init_from={file}"]
    whole = run(tmp_path / "whole", *flags)

    def stop(batch, logs=None):
        wishes.mine[wishes.STOP] = int(batch == 1)

    with pytest.raises(wishes.Stopped):
        run(tmp_path / "run", *flags, stop=stop)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["init_from_sha256"]
    file.unlink()
    assert run(tmp_path / "run", *flags)["sha256"] == whole["sha256"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_from_sha256"] == recorded


def test_a_file_that_was_changed_makes_it_another_run(run, trained, tmp_path):
    file = tmp_path / "first.keras"
    file.write_bytes((trained / "model.keras").read_bytes())
    run(tmp_path / "run", THREE, f"--init_from={file}")
    flags = [*SMALL, THREE, f"--run_dir={tmp_path / 'run'}", f"--prepared_dir={tmp_path}"]
    config, _ = command_line.parse([*flags, f"--init_from={file}"])
    assert "finished" in run_dir.finished(config)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(UsageError, match=r"first\.keras has been changed since"):
        run_dir.finished(config)
    config, _ = command_line.parse(flags)
    with pytest.raises(UsageError, match="init_from is .* there and '' here"):
        run_dir.finished(config)


def inner(content, change):
    """A .keras file with other weights in it."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, data in entries.items():
            new.writestr(name, change(data) if name == "model.weights.h5" else data)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["damaged inside", "a lambda", "another network", "another network's weights"])
def test_a_file_that_does_not_fit_is_a_mistake_in_one_line(run, trained, tmp_path, kind):
    file = tmp_path / ("file.weights.h5" if "weights" in kind else "file.keras")
    inputs = keras.Input((8, 8, 1))
    outputs = keras.layers.Dense(3, name="mine")(keras.layers.Flatten()(inputs))
    if kind == "damaged inside":
        file.write_bytes(inner((trained / "model.keras").read_bytes(), lambda data: data[:200]))
    elif kind == "a lambda":  # code in the file is not run
        keras.Model(inputs, keras.layers.Lambda(lambda x: x * 2)(outputs)).save(file)
    elif "weights" in kind:
        keras.Model(inputs, outputs).save_weights(file)
    else:
        keras.Model(inputs, outputs).save(file)
    with pytest.raises(UsageError) as raised:
        run(tmp_path / "run", THREE, f"--init_from={file}")
    assert str(raised.value).startswith(f"--init_from={file} ")
    assert "\n" not in str(raised.value)


def test_what_is_no_such_file_is_told_before_tensorflow_is_imported_with_status_2(tmp_path):
    (tmp_path / "text.keras").write_text("no archive")
    for name, expected in [("none.keras", "does not exist"), ("text.keras", "is no model that Keras has saved")]:
        output = run_program("train", *SMALL, THREE, f"--run_dir={tmp_path}/run", f"--init_from={tmp_path / name}", status=2)
        assert (
            output == f"error: --init_from={tmp_path / name} {expected}\n" or expected in output and output.count("error") == 1
        )
    config, _ = command_line.parse([*SMALL, THREE, f"--init_from={tmp_path / 'none.keras'}"])
    assert early.problems(config, data=False) == []  # a worker other than the chief needs no file
    for flags, expected in [
        (["--init_from=imagenet"], "--init_from=imagenet is for --model=keras:NAME; for trivial name a file"),
        (["--init_from=a.pb"], "--init_from=a.pb: a file named .keras, .weights.h5 or .h5, or imagenet"),
    ]:
        with pytest.raises(UsageError, match=expected):
            command_line.parse([*SMALL, THREE, *flags])


def test_imagenets_weights_are_taken_in_order_but_for_the_head(devices, monkeypatch):
    """Layers without names of their own have other numbers the second time that a process builds a network."""
    import models
    from app import initial

    def application(weights, classes=1000, input_shape=(8, 8, 1), classifier_activation="softmax"):
        inputs = keras.Input(input_shape)
        x = keras.layers.Dense(6)(keras.layers.BatchNormalization()(keras.layers.Flatten()(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(classes, activation=classifier_activation, name="predictions")(x))
        if weights == "imagenet":
            for number, weight in enumerate(model.weights):
                weight.assign(np.full(weight.shape, number))
        return model

    monkeypatch.setattr(keras.applications, "MobileNetV2", application)
    with devices(2).scope():
        plain = models.build("keras:MobileNetV2", (8, 8, 1), 3)
    head = [v.numpy() for v in plain.weights[-2:]]
    config = types.SimpleNamespace(init_from="imagenet", model="keras:MobileNetV2")
    line, digest = initial.put(config, plain, None, None)
    assert line == (
        "init    6 of 8 variables from imagenet; not taken: predictions/kernel ([6, 1000] there, [6, 3] here), "
        "predictions/bias ([1000] there, [3] here)"
    )
    for number, weight in enumerate(plain.weights[:6]):
        np.testing.assert_array_equal(weight.numpy(), np.full(weight.shape, number))
    for before, weight in zip(head, plain.weights[-2:], strict=True):
        np.testing.assert_array_equal(weight.numpy(), before)
    assert len(digest) == 64
