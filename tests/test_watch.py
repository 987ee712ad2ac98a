"""Two lines in a plain Keras script: its fingerprints are true, and its training is untouched."""

import json

import numpy as np
import pytest

import cluster


def script(path=None, **watching):
    """A plain Keras training without a strategy: two epochs of 3 steps, the last batch smaller. Returns its weights."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)).astype("float32"), rng.integers(0, 3, 20)
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
