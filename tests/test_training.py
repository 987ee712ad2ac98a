"""The trainer in one process, on two and three CPU devices: against NumPy, against plain Keras, and against misuse."""

import os
import subprocess
import sys

import cases
import numpy as np
import pytest

import cluster

STEPS, LOGICAL, EACH, INPUTS, HIDDEN, CLASSES = 12, 4, 6, 5, 4, 3


def numpy_reference(x, y, weights, rate=1 / 8, momentum=7 / 8, decay=1 / 64, bn_momentum=7 / 8, epsilon=1 / 1024):
    """Losses and final weights of dense - batch normalisation - relu - dense, normalised by logical replica, by hand.

    x [steps, K, b, inputs], y [steps, K, b]. SGD with momentum and decoupled weight decay, as Keras documents them.
    The numbers have no rounding in float32, through which Keras takes some of them.
    """
    w1, gamma, beta, w2, b2 = (w.copy() for w in weights)
    velocity = [np.zeros_like(w) for w in weights]
    mean, variance, losses = np.zeros(HIDDEN), np.ones(HIDDEN), []
    for images, labels in zip(x, y, strict=True):
        gradients = [np.zeros_like(w) for w in weights]
        loss, means, variances = 0.0, [], []
        for xk, yk in zip(images, labels, strict=True):
            h = xk @ w1
            mu, var = h.mean(0), h.var(0)
            norm = (h - mu) / np.sqrt(var + epsilon)
            a = np.maximum(norm * gamma + beta, 0)
            logits = a @ w2 + b2
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            loss += -np.log(p[np.arange(EACH), yk]).sum()
            d_logits = p.copy()
            d_logits[np.arange(EACH), yk] -= 1
            d_a = d_logits @ w2.T
            d_out = d_a * (norm * gamma + beta > 0)
            d_norm = d_out * gamma
            d_h = (d_norm - d_norm.mean(0) - norm * (d_norm * norm).mean(0)) / np.sqrt(var + epsilon)
            for total, part in zip(
                gradients, (xk.T @ d_h, (d_out * norm).sum(0), d_out.sum(0), a.T @ d_logits, d_logits.sum(0)), strict=True
            ):
                total += part
            means.append(mu)
            variances.append(var)
        losses.append(loss / (LOGICAL * EACH))
        mean = bn_momentum * mean + (1 - bn_momentum) * np.mean(means, 0)
        variance = bn_momentum * variance + (1 - bn_momentum) * np.mean(variances, 0)
        for v, w, g in zip(velocity, (w1, gamma, beta, w2, b2), gradients, strict=True):
            w -= rate * decay * w
            v[...] = momentum * v - rate * g / (LOGICAL * EACH)
            w += v
    return losses, [w1, gamma, beta, w2, b2], mean, variance


@pytest.fixture
def float64():
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_and_weights_are_those_of_a_numpy_network_normalised_by_logical_replica(devices, float64, replicas):
    import keras

    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, LOGICAL, EACH, INPUTS))
    y = rng.integers(0, CLASSES, (STEPS, LOGICAL, EACH))
    strategy = devices(replicas)
    with strategy.scope():
        inputs = keras.Input((INPUTS,))
        h = keras.layers.Dense(HIDDEN, use_bias=False)(inputs)
        h = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=7 / 8, epsilon=1 / 1024, name="bn")(h))
        plain = keras.Model(inputs, keras.layers.Dense(CLASSES)(h))
        model = cluster.Trainer(plain, LOGICAL * EACH, LOGICAL)
        model.compile(
            keras.optimizers.SGD(1 / 8, momentum=7 / 8, weight_decay=1 / 64),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    start = [v.numpy() for v in plain.trainable_variables]
    data = cases.batches(x.reshape(-1, INPUTS), y.reshape(-1), LOGICAL * EACH)
    seen = model.fit(data, steps_per_epoch=1, epochs=STEPS, verbose=0).history["loss"]

    losses, weights, mean, variance = numpy_reference(x, y, start)
    np.testing.assert_allclose(seen, losses, rtol=1e-12)
    for variable, expected in zip(plain.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(plain.get_layer("bn").moving_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(plain.get_layer("bn").moving_variance.numpy(), variance, rtol=1e-12)


def test_two_devices_in_one_process_train_the_same_weights_as_one(devices):
    one, two = cases.training(devices(1)), cases.training(devices(2))
    assert one == two
    assert one["steps"] == 44


def test_three_devices_train_six_logical_replicas_like_one_and_two(devices):
    """Six is no power of two, and on two replicas a block of three is no node of the tree."""
    assert cases.training(devices(1), 6) == cases.training(devices(2), 6) == cases.training(devices(3), 6)


def test_other_logical_replicas_are_another_run(devices):
    assert cases.training(devices(1), 6)["sha256"] != cases.training(devices(1), 4)["sha256"]


def test_unordered_float64_training_on_two_devices_is_plain_keras_up_to_rounding(devices):
    reference = cases.equal_in_float64()
    for seen, expected in zip(cases.equal_in_float64(devices(2)), reference, strict=True):
        np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-14)


def test_evaluation_counts_every_example_once_and_agrees_with_a_plain_loop(devices):
    import keras

    results = cases.evaluation(devices(2))
    assert results == cases.evaluation(devices(1))
    keras.utils.set_random_seed(1)
    model, (x, y) = cases.network(), cases.examples()
    for size, seen in results.items():
        logits = model.predict(x[:size], verbose=0).astype("float64")
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(seen["loss"], -np.log(p[np.arange(size), y[:size]]).mean(), rtol=1e-5)
        assert seen["accuracy"] == pytest.approx((logits.argmax(1) == y[:size]).mean(), abs=1e-6)


def test_an_evaluation_in_mid_epoch_does_not_end_the_metrics_of_the_epoch(devices):
    import keras

    def history(callbacks):
        return cases.training(devices(1), callbacks=callbacks)["history"]

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                x, y = cases.examples()
                self.model.evaluate(x[:35], y[:35], verbose=0)

    assert history([Evaluate()]) == history([])


def test_the_saved_model_opens_where_lockstep_is_not_installed(devices, tmp_path):
    import keras

    strategy = devices(2)
    with strategy.scope():
        model = cluster.Trainer(cases.network(), cases.BATCH, 4)
        optimizer = keras.optimizers.SGD(0.1, 0.9)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = cases.examples()
    model.fit(cases.batches(x, y), steps_per_epoch=5, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    np.save(tmp_path / "x.npy", x[:7])
    program = (
        "import keras, numpy, sys; model = keras.models.load_model('model.keras');"
        "numpy.save('y.npy', model(numpy.load('x.npy'), training=False));"
        "numpy.save('momentum.npy', model.optimizer.variables[-1]); assert 'cluster' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model.model(x[:7], training=False), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "momentum.npy"), optimizer.variables[-1].numpy())
    assert [f.name for f in tmp_path.iterdir() if "model" in f.name] == ["model.keras"]  # nothing half-written


def test_regularisers_count_once_and_activity_losses_as_the_mean_over_logical_replicas(devices):
    """sum(w^2) / 2 of w = 2 is 2; the activity loss of a logical replica is 0.1 times the mean square of its outputs."""
    import keras

    strategy = devices(2)
    with strategy.scope():
        inputs = keras.Input((1,))
        two = keras.initializers.Constant(2.0)
        outputs = keras.layers.Dense(
            1,
            use_bias=False,
            kernel_initializer=two,
            kernel_regularizer=keras.regularizers.L2(0.5),
            activity_regularizer=keras.regularizers.L2(0.1),
        )(inputs)
        model = cluster.Trainer(keras.Model(inputs, outputs), 8, 4)
        model.compile(keras.optimizers.SGD(0.0), lambda y_true, y_pred: y_pred[:, 0])
    x = np.arange(8, dtype="float32")[:, None]
    loss = model.fit(cases.batches(x, x, 8), steps_per_epoch=1, verbose=0).history["loss"][0]
    assert loss == pytest.approx((2 * x).mean() + 0.5 * 4 + 0.1 * ((2 * x) ** 2).mean(), rel=1e-6)


def test_losses_that_sum_or_return_one_value_mean_the_same_for_every_number_of_replicas(devices):
    """'sum' is over the global batch, as in plain Keras; one value counts as the mean over its logical replica."""
    import keras

    class Summed(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return y_pred[:, 0]

    x = np.arange(8, dtype="float32")[:, None]
    expected = {"sum": x.sum(), "one value": np.mean([x[i : i + 2].max() for i in range(0, 8, 2)])}
    kinds = {"sum": Summed(reduction="sum"), "one value": lambda y_true, y_pred: keras.ops.max(y_pred)}
    for name, loss in kinds.items():
        for replicas in (1, 2):
            with devices(replicas).scope():
                inputs = keras.Input((1,))
                one = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
                model = cluster.Trainer(keras.Model(inputs, one), 8, 4)
                model.compile(keras.optimizers.SGD(0.0), loss)
            seen = model.fit(cases.batches(x, x, 8), steps_per_epoch=1, verbose=0).history["loss"][0]
            assert seen == expected[name], (name, replicas)


def test_what_cannot_mean_the_same_for_every_number_of_workers_is_refused(devices):
    import keras

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_weight((), "zeros", name="largest")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

        def result(self):
            return self.largest

    strategy, (x, y) = devices(2), cases.examples()
    entropy = keras.losses.SparseCategoricalCrossentropy

    def fit(data=None, batch=24, logical=4, optimizer="sgd", loss=None, **kwargs):
        with strategy.scope():
            model = cluster.Trainer(cases.network(), batch, logical)
            model.compile(optimizer, loss or entropy(from_logits=True), **kwargs)
        model.fit(cases.batches(x, y) if data is None else data, steps_per_epoch=1, verbose=0)

    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    overwriting = keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=3)
    examples = __import__("tensorflow").data.Dataset.from_tensor_slices((x, y))
    for says, arguments in {
        "20 or 24": {"batch": 21},
        "[1, 3]": {"logical": 3},
        "logical_replicas": {"optimizer": accumulating},
        "ema_overwrite_frequency": {"optimizer": overwriting},
        "sum of the weights": {"loss": entropy(from_logits=True, reduction="mean_with_sample_weight")},
        "reduction=": {"loss": entropy(from_logits=True, reduction=None)},
        "run_eagerly": {"run_eagerly": True},
        "largest": {"metrics": [Largest()]},
        "batches of 12": {"data": cases.batches(x, y, 12)},
        "drop_remainder=True": {"data": examples.batch(24)},
        "ndarray": {"data": x},
    }.items():
        with pytest.raises(ValueError) as error:
            fit(**arguments)
        assert says in str(error.value), arguments


def test_tf_data_deals_the_parts_of_a_batch_as_the_arrangement_assumes(tensorflow):
    """Two workers of two devices, as tf.distribute builds their pipelines: replica i gets part i of every batch."""
    from tensorflow.python.data.experimental.ops import distribute
    from tensorflow.python.distribute import input_ops

    from cluster import datasets

    tf, workers, local = tensorflow, 2, 2
    order = datasets.dealing_order(workers, local)
    batches = tf.data.Dataset.range(16).batch(8, drop_remainder=True).map(lambda t: datasets._reordered(t, order))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    for worker in range(workers):
        sizes = distribute.batch_sizes_for_worker(8, workers, local, worker)
        dealt = input_ops.auto_shard_dataset(batches.with_options(options).rebatch(sizes), workers, worker, 4)
        first_step = [part.tolist() for part in dealt.take(local).as_numpy_iterator()]
        assert first_step == [[4 * worker + 2 * d, 4 * worker + 2 * d + 1] for d in range(local)]
