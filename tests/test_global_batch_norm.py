"""Batch normalisation over the global batch: plain Keras fed the whole batches, at any N and K; and what is refused with it."""

import cases
import conftest
import numpy as np
import pytest

import cluster


@pytest.fixture(scope="module")
def plain(tensorflow):
    """Losses and variables of plain Keras in one process, without a strategy."""
    return {policy: cases.normalised_globally(policy=policy) for policy in ("float32", "float64")}


def _distance(seen, expected):
    """The largest relative distance of two runs' losses and variables."""
    pairs = [(seen[0], expected[0]), *zip(seen[1], expected[1], strict=True)]
    return max(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for a, b in pairs)


@pytest.mark.parametrize(("replicas", "logical_replicas"), [(1, 1), (1, 4), (2, 2), (2, 4), (3, 6)])
def test_training_is_plain_keras_fed_the_same_batches_up_to_rounding(devices, plain, replicas, logical_replicas):
    seen = cases.normalised_globally(devices(replicas), logical_replicas)
    assert _distance(seen, plain["float64"]) < 1e-12


@pytest.mark.parametrize("replicas", [1, 2])
def test_in_float32_too_and_with_several_steps_in_one_call(devices, plain, replicas):
    seen = cases.normalised_globally(devices(replicas), policy="float32", compile={"steps_per_execution": 4})
    assert _distance(seen, plain["float32"]) < 1e-5


def test_statistics_by_logical_replica_are_another_model(devices, plain):
    assert _distance(cases.normalised_globally(devices(2), 2, "replica"), plain["float64"]) > 0.01
    assert _distance(cases.normalised_globally(devices(1), 1, "replica"), plain["float64"]) < 1e-12


@pytest.mark.parametrize(("axis", "masked"), [(1, False), (-1, False), (-1, True)])
def test_moments_of_three_replicas_are_keras_s_own_of_all(tensorflow, axis, masked):
    """Three replicas' parts in one function; `total` adds what each of them gives to each call."""
    import keras

    from cluster import global_batch_norm

    tf, rng = tensorflow, np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(6, 4, 5)) + 100, tf.float32)
    mask = tf.constant(rng.random((6, 4)) < 0.6) if masked else None
    parts = lambda t: [None] * 3 if t is None else tf.split(t, 3)  # noqa: E731
    layer = keras.layers.BatchNormalization(axis)
    layer.build(x.shape)

    def by_replica(x):
        packs = []
        for part, kept in zip(parts(x), parts(mask), strict=True):
            global_batch_norm.moments(part, layer._reduction_axes, kept, lambda t: packs.append(t) or t)
        found = []
        for i, (part, kept) in enumerate(zip(parts(x), parts(mask), strict=True)):
            others = tf.add_n([p for j, p in enumerate(packs) if j != i])
            found.append(global_batch_norm.moments(part, layer._reduction_axes, kept, lambda t, others=others: t + others))
        return found

    expected = layer._moments(x, mask)
    for mean, variance in by_replica(x):
        np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
        np.testing.assert_allclose(variance, expected[1], rtol=1e-4)


def test_each_layer_makes_one_collective_and_one_for_its_gradient(devices):
    import broken

    model = broken.trainer(devices(2), batch_norm="global", identical=False, dropped=False)
    model._prepare(True, broken.data()(0).element_spec)
    operations = [op.type for op in model._step._passes[True][1]._concrete.graph.get_operations()]
    assert [op for op in operations if "Collective" in op] == ["CollectiveGatherV2"] * 2


def test_random_layers_are_refused_by_name(devices):
    import keras

    with devices(1).scope(), pytest.raises(ValueError, match=r"dropout\w* \(Dropout\), dropout\w* \(Dropout\)"):
        cluster.Trainer(cases.network(), 24, 4, identical=False, batch_norm="global")
    with pytest.raises(ValueError, match="identical=False"):
        cluster.Trainer(keras.Sequential([keras.layers.Dense(1)]), 24, 4, batch_norm="global")


def test_statistics_of_other_layers_are_refused_by_name(devices):
    import keras

    class Centred(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=shape[-1:], trainable=False, name="mean")

        def call(self, x):
            self.mean.assign(keras.ops.mean(x, 0))
            return x - self.mean

    with devices(2).scope():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, keras.layers.Dense(3)(Centred(name="own")(inputs)))
        model = cluster.Trainer(model, 24, 4, identical=False, batch_norm="global")
        model.compile("sgd", "mse")
    x = np.ones((24, 5), "float32")
    with pytest.raises(ValueError, match=r"own \(Centred\)"):
        model.fit(cases.batches(x, x[:, :3]), steps_per_epoch=1, verbose=0)


def test_the_program_refuses_dropout_in_one_line_before_training(tmp_path):
    flags = ["--dataset=synthetic:8x8x1:10:256", "--global_batch_size=32", "--logical_replicas=2", "--shards=4"]
    flags += ["--noidentical", "--batch_norm=global", f"--prepared_dir={tmp_path}", f"--run_dir={tmp_path}/run", "--steps=1"]
    output = conftest.run_program("train", *flags, "--model=small_cnn", status=2)
    errors = [line for line in output.splitlines() if "error:" in line]
    assert len(errors) == 1, output
    assert "--batch_norm=global" in errors[0]
    assert "dropout (Dropout), dropout_1 (Dropout), dropout_2 (Dropout) of small_cnn" in errors[0]
    assert "first step" not in output.replace("tracing the first step", "")
