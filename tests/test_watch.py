"""Two lines in a plain Keras script: its fingerprints are true, and its training is untouched."""

import contextlib
import json

import numpy as np
import pytest

import cluster


def script(path=None, strategy=None, **watching):
    """A plain Keras training: two epochs of 3 steps, the last batch smaller."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)).astype("float32"), rng.integers(0, 3, 20)
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = keras.Input((6,))
        h = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(keras.layers.Dense(5, activation="relu")(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(3)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"], jit_compile=False)
    dataset, callbacks = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).prefetch(2), []
    if path:
        dataset, recorder = cluster.watch(model, dataset, path, **watching)
        callbacks = [recorder]
    history = model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0).history
    return model, history, x, y


def test_watch_tells_what_a_plain_fit_did_and_changes_nothing(tensorflow, tmp_path):
    from cluster import digest, fingerprint

    plain, history, x, y = script()
    model, watched, _, _ = script(str(tmp_path / "f.jsonl"), keep=str(tmp_path / "kept"))
    assert history == watched
    for a, b in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    header, start, *steps = fingerprint.read(str(tmp_path / "f.jsonl"))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert len(header["optimizer"]) == 2 + len(header["weights"])  # momentum too
    assert (header["made_by"], header["global_batch_size"]) == ("cluster.watch", 8)
    hashes = digest.hex_digits(digest.of_examples(tensorflow.constant(x), 20))
    assert [line["x"] for line in steps] == 2 * [hashes[:8], hashes[8:16], hashes[16:]]
    assert steps[-1]["weights"] == digest.of([v.value for v in model.trainable_variables]).json()
    for before, line in zip([start, *steps], steps, strict=False):
        moved = np.subtract(line["weights"]["projections"], before["weights"]["projections"])
        np.testing.assert_allclose(line["update"]["projections"], moved, atol=1e-6)
    for epoch in (0, 1):  # losses of single steps, though Keras logs the mean since the epoch's beginning
        total = sum(
            float.fromhex(line["loss"]) * n for line, n in zip(steps[3 * epoch : 3 * epoch + 3], (8, 8, 4), strict=True)
        )
        assert total / 20 == pytest.approx(watched["loss"][epoch], rel=1e-6)
    kept = np.load(tmp_path / "kept" / "step-2.npz")
    np.testing.assert_array_equal(kept["x_0"], x[8:16])
    np.testing.assert_array_equal(kept["y_0"], y[8:16])
    weights = [tensorflow.constant(kept[f"weights_{i}"]) for i in range(len(header["weights"]))]
    assert digest.of(weights).json() == steps[0]["weights"]


def test_under_a_strategy_of_two_replicas_watch_changes_nothing_and_tells_what_each_holds(tensorflow, devices, tmp_path):
    from cluster import digest, fingerprint

    strategy = devices(2)
    plain, history, x, _ = script(strategy=strategy)
    model, watched, _, _ = script(str(tmp_path / "f.jsonl"), strategy, keep=str(tmp_path / "kept"))
    assert history == watched
    for pair in zip(plain.variables, model.variables, strict=True):
        for a, b in zip(*(strategy.experimental_local_results(v.value) for v in pair), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    header, _, *steps = fingerprint.read(str(tmp_path / "f.jsonl"))
    assert (header["replicas"], header["global_batch_size"], len(steps)) == (2, 8, 6)
    hashes = digest.hex_digits(digest.of_examples(tensorflow.constant(x), 20))
    assert [line["x"] for line in steps] == 2 * [hashes[:8], hashes[8:16], hashes[16:]]
    for epoch in (0, 1):
        sums = [line["metric_sums"] for line in steps[3 * epoch : 3 * epoch + 3]]
        assert [count for _, [count], *_ in sums] == [8, 8, 4]
        assert sum(total for [total], *_ in sums) / 20 == pytest.approx(watched["loss"][epoch], rel=1e-6)
    held = [v for v in model.non_trainable_variables if "moving" in v.path]
    of_devices = zip(*(strategy.experimental_local_results(v.value) for v in held), strict=True)
    expected = [digest.hex_digits(digest.one_hash(digest.of([v.read_value() for v in of]).hash)[None])[0] for of in of_devices]
    assert steps[-1]["workers"]["statistics"] == expected
    assert len(set(expected)) == 2  # Keras leaves each replica its own
    assert len(set(steps[-1]["workers"]["weights"])) == 1


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "of unknown length", "validated", "endless"])
def test_whatever_the_data_a_watched_fit_is_the_same_and_other_callbacks_see_the_same(
    tensorflow, devices, tmp_path, kind, replicas
):
    import keras

    from cluster import digest, fingerprint

    tf, rng = tensorflow, np.random.default_rng(0)
    x, y = rng.normal(size=(24, 6)).astype("float32"), rng.integers(0, 3, 24)

    def fitted(path=None):
        keras.utils.set_random_seed(3)
        with devices(replicas).scope() if replicas > 1 else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, 0.9), loss, metrics=["accuracy"], jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        if kind == "shuffled":  # it draws its order whenever an iterator is made, read or not
            data = data.shuffle(24, seed=5)
        if kind == "of unknown length":  # Keras begins a step before it meets the end
            data = data.filter(lambda x, y: True)
        data = data.batch(8)
        if kind == "endless":  # Keras keeps its iterators over epochs and evaluations
            data = data.repeat()
        callbacks, seen = [], []
        if path:
            data, recorder = cluster.watch(model, data, path)
            callbacks = [recorder]
        if replicas == 1:  # Keras gives others the mean since the epoch's beginning
            callbacks.append(
                keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: seen.append(dict(logs)))
            )
        more = {"validation_data": data} if kind in ("validated", "endless") else {}
        if kind == "endless":  # a batch of 24 examples' third more than an epoch's, so that they come round
            more |= {"steps_per_epoch": 3, "validation_steps": 4}
            evaluate = lambda epoch, logs=None: model.evaluate(data, steps=2, verbose=0)  # noqa: E731
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=evaluate))
        history = model.fit(data, epochs=3, callbacks=callbacks, verbose=0, **more).history
        return history, seen, [v.numpy() for v in model.variables]

    path = str(tmp_path / "new" / "f.jsonl")
    for one, other in zip(tf.nest.flatten(fitted()), tf.nest.flatten(fitted(path)), strict=True):
        np.testing.assert_array_equal(one, other)
    _, _, *steps = fingerprint.read(path)
    assert [line["step"] for line in steps] == list(range(1, 10))
    hashes = digest.hex_digits(digest.of_examples(tf.constant(x), 24))
    for first in (0, 3, 6):  # every example once an epoch
        read = [h for line in steps[first : first + 3] for h in line["x"]]
        assert sorted(read) == sorted(hashes)
        assert kind == "shuffled" or read == hashes


def test_what_a_fit_brings_that_watch_cannot_follow_is_told_in_one_line(tensorflow, tmp_path):
    import keras
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors((tf.zeros([4, 2]), tf.zeros([4, 1])))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watched, recorder = cluster.watch(model, data, str(tmp_path / "f.jsonl"))
    with pytest.raises(ValueError, match="has its weights: call sequential.* on a batch"):
        model.fit(watched, callbacks=[recorder], verbose=0)
    model(tf.zeros([4, 2]))
    with pytest.raises(ValueError, match="other data than watch has returned"):
        model.fit(data, callbacks=[recorder], verbose=0)
    model.fit(watched, callbacks=[recorder], verbose=0)
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match="compiled or frozen anew"):
        model.fit(watched, callbacks=[recorder], verbose=0)
    with pytest.raises(ValueError, match="every=0"):
        cluster.watch(model, data, every=0)
    with pytest.raises(ValueError, match="dense numbers"):
        cluster.watch(model, tf.data.Dataset.from_tensors((tf.constant(["a"]), tf.zeros([1]))))


def test_what_watch_cannot_follow_is_refused_in_one_line(tensorflow, devices, monkeypatch):
    import broken
    import keras
    import tensorflow as tf

    from cluster import watching

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((tf.zeros([4, 2]), tf.zeros([4, 1])))
    with pytest.raises(ValueError, match="compiled with an optimizer; sequential.* is not"):
        cluster.watch(model, data)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a tf.data.Dataset, .*; got ndarray"):
        cluster.watch(model, np.zeros([4, 2]))
    with pytest.raises(ValueError, match="a cluster.Trainer records itself"):
        cluster.watch(broken.trainer(devices(1)), data)
    monkeypatch.setattr(watching, "_place", lambda strategy: (0, 2))
    records = tf.data.TFRecordDataset([]).map(lambda _: (tf.zeros([2]), tf.zeros([1])))
    with pytest.raises(ValueError, match="workers that read every batch.*auto_shard_policy to DATA"):
        cluster.watch(model, records.batch(4))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    cluster.watch(model, records.batch(4).with_options(options))
    cluster.watch(model, data)


def test_watch_records_every_so_many_steps(tensorflow, tmp_path):
    script(str(tmp_path / "all.jsonl"))
    script(str(tmp_path / "some.jsonl"), every=4)
    every, some = ([json.loads(line) for line in (tmp_path / f"{n}.jsonl").open()] for n in ("all", "some"))
    assert some[2:] == [every[2], every[5]]  # steps 1 and 4


def test_watch_refuses_executions_of_several_steps(tensorflow, tmp_path):
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    data = tf.data.Dataset.from_tensors((tf.zeros([4, 2]), tf.zeros([4, 1]))).repeat(2)
    dataset, recorder = cluster.watch(model, data, str(tmp_path / "f.jsonl"))
    with pytest.raises(ValueError, match="steps_per_execution=1"):
        model.fit(dataset, callbacks=[recorder], verbose=0)
