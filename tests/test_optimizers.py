"""Optimizers: updates by hand, decay of kernels alone, and the same weights on two devices as on one, for every one of them."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest

import cluster
from app import optimizers, schedules
from app.config import Config
from cluster.fingerprint import run_sha256

STEADY = {"momentum": 0.8, "rho": 0.7, "beta_1": 0.6, "beta_2": 0.9, "epsilon": 0.01}


def configuration(**flags):
    config = Config(**flags)
    assert optimizers.problems(config) == []
    return config


def make(config, model, total_steps=100):
    schedule = schedules.make(config, 1000, total_steps)
    return optimizers.make(config, schedule, model), schedule


def after_updates(gradients, **flags):
    """Kernel [2, 1] of (1, -2) and bias of 3 after one update for each of the gradients, by `make`'s optimizer."""
    import keras

    kernel, bias = keras.Variable([[1.0], [-2.0]]), keras.Variable([3.0])
    optimizer, _ = make(configuration(learning_rate=0.1, **flags), types.SimpleNamespace(trainable_variables=[kernel, bias]))
    for gradient in gradients:
        optimizer.apply([gradient[:2, None], gradient[2:]], [kernel, bias])
    return np.array([*kernel.numpy()[:, 0], *bias.numpy()])


def sgd(w, g, t, m, v):
    return w - 0.1 * g, m, v


def momentum(w, g, t, m, v):
    m = 0.8 * m - 0.1 * g
    return w + m, m, v


def nesterov(w, g, t, m, v):
    m = 0.8 * m - 0.1 * g
    return w + 0.8 * m - 0.1 * g, m, v


def rmsprop(w, g, t, m, v):
    v = 0.7 * v + 0.3 * g**2
    m = 0.8 * m + 0.1 * g / np.sqrt(v + 0.01)
    return w - m, m, v


def adam(w, g, t, m, v):
    m, v = 0.6 * m + 0.4 * g, 0.9 * v + 0.1 * g**2
    return w - 0.1 * np.sqrt(1 - 0.9**t) / (1 - 0.6**t) * m / (np.sqrt(v) + 0.01), m, v


def lion(w, g, t, m, v):
    return w - 0.1 * np.sign(0.6 * m + 0.4 * g), 0.9 * m + 0.1 * g, v


@pytest.mark.parametrize(
    ("name", "rule", "flags"),
    [
        ("sgd", sgd, ()),
        ("momentum", momentum, ("momentum",)),
        ("nesterov", nesterov, ("momentum",)),
        ("rmsprop", rmsprop, ("momentum", "rho", "epsilon")),
        ("adam", adam, ("beta_1", "beta_2", "epsilon")),
        ("adamw", adam, ("beta_1", "beta_2", "epsilon")),
        ("lion", lion, ("beta_1", "beta_2")),
    ],
)
def test_three_updates_with_decoupled_decay_are_those_by_hand(tensorflow, name, rule, flags):
    gradients = np.float32([[1, -2, 0.5], [0.25, 1, -1], [-3, 0.5, 2]])
    decay = 0.05
    w, m, v = np.array([1.0, -2.0, 3.0]), np.zeros(3), np.zeros(3)
    for t, g in enumerate(gradients, 1):
        w = w * [1 - 0.1 * decay, 1 - 0.1 * decay, 1]  # the bias is not decayed
        w, m, v = rule(w, g, t, m, v)
    seen = after_updates(gradients, optimizer=name, weight_decay=decay, **{flag: STEADY[flag] for flag in flags})
    np.testing.assert_allclose(seen, w, rtol=1e-5)


def test_clipping_is_by_the_norm_of_all_variables_or_by_element(tensorflow):
    gradient = np.float32([[6, -3, 6]])
    start = np.array([1, -2, 3])
    by_norm = after_updates(gradient, optimizer="sgd", clip_norm=3.0)
    by_value = after_updates(gradient, optimizer="sgd", clip_value=4.0)
    np.testing.assert_allclose(by_norm, start - 0.1 * np.array([2, -1, 2]), rtol=1e-6)
    np.testing.assert_allclose(by_value, start - 0.1 * np.array([4, -3, 4]), rtol=1e-6)
    np.testing.assert_allclose(after_updates(gradient, optimizer="sgd", clip_norm=10.0), start - 0.1 * gradient[0], rtol=1e-6)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_flag_that_a_rule_has_reaches_it_and_every_other_is_refused(tensorflow, name):
    variables = [types.SimpleNamespace(shape=(2, 2))]
    decay = {"weight_decay": 0.01} if name == "adamw" else {}
    for flag, value in STEADY.items():
        config = Config(optimizer=name, **decay, **{flag: value})
        if optimizers.problems(config):
            assert f"--{flag}={value}" in optimizers.problems(config)[0]
        else:
            optimizer, _ = make(config, types.SimpleNamespace(trainable_variables=variables))
            assert optimizer.get_config()[flag] == value


def network():
    """Dense - batch normalisation - Dense; biases, gammas and betas start at 1."""
    import keras

    x = inputs = keras.Input((5,))
    x = keras.layers.Dense(4, bias_initializer="ones")(x)
    x = keras.layers.BatchNormalization(beta_initializer="ones")(x)
    return keras.Model(inputs, keras.layers.Dense(3, bias_initializer="ones")(keras.layers.ReLU()(x)))


def data():
    import tensorflow as tf

    rng = np.random.default_rng(0)
    return tf.data.Dataset.from_tensor_slices(
        (rng.normal(size=(24, 5)).astype("float32"), rng.integers(0, 3, 24).astype("int32"))
    ).batch(8, drop_remainder=True)


def train(strategy, config, loss, network=network):
    """Three steps; returns (trainer, the weights before, the history)."""
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        plain = network()
        optimizers.regularize(plain, config)
        optimizer, schedule = make(config, plain)
        model = cluster.Trainer(plain, 8, 2)
        schedule = None if schedule.constant else schedule
        model.compile(optimizer, loss, schedule=schedule, auto_scale_loss=not config.loss_scale)
    before = [v.numpy() for v in plain.trainable_variables]
    return model, before, model.fit(data(), verbose=0).history


@pytest.mark.parametrize("kind", ["decoupled", "l2"])
def test_kernels_alone_are_decayed_on_two_devices(devices, kind):
    """Without another gradient both kinds are w (1 - rate x lambda) a step of SGD (Loshchilov & Hutter 2019, proposition 1)."""
    import keras

    config = configuration(optimizer="sgd", learning_rate=0.5, weight_decay=0.25, weight_decay_kind=kind)
    model, before, _ = train(devices(2), config, lambda y, output: 0.0 * keras.ops.mean(output))
    assert [w.ndim for w in before] == [2, 1, 1, 1, 2, 1]
    for variable, start in zip(model.model.trainable_variables, before, strict=True):
        expected = start * 0.875**3 if start.ndim == 2 else np.ones_like(start)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("everything", [False, True])
def test_l2_adds_lambda_times_the_weights_to_the_gradient_also_after_saving(tensorflow, policy, everything):
    import keras

    keras.config.set_dtype_policy(policy)
    try:
        x = inputs = keras.Input((6, 6, 2))
        for layer in (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.SeparableConv2D):
            size = {"kernel_size": 3} if layer is keras.layers.DepthwiseConv2D else {"filters": 4, "kernel_size": 3}
            x = keras.layers.BatchNormalization()(layer(padding="same", **size)(x))
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    finally:
        keras.config.set_dtype_policy("float32")
    optimizers.regularize(model, configuration(weight_decay=0.5, weight_decay_kind="l2", decay_norm_and_bias=everything))
    weights = [tensorflow.convert_to_tensor(v.value + 0.125) for v in model.trainable_variables]
    with tensorflow.GradientTape() as tape:
        tape.watch(weights)
        images = tensorflow.zeros((1, 6, 6, 2))
        losses = model.stateless_call(weights, model.non_trainable_variables, images, return_losses=True, training=True)[2]
        total = tensorflow.add_n(losses)
    for weight, gradient in zip(weights, tape.gradient(total, weights), strict=True):
        if everything or len(weight.shape) > 1:
            np.testing.assert_allclose(gradient, 0.5 * weight.numpy(), rtol=1e-6)
        else:
            assert gradient is None
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_allclose(sum(again.losses), sum(model.losses), rtol=1e-6)
    assert len(again.losses) == len(losses)


def test_decay_of_a_model_without_weights_is_refused():
    model = types.SimpleNamespace(name="late", trainable_variables=[])
    with pytest.raises(ValueError, match="late has no weights to decay yet"):
        optimizers._decayed(model, Config(weight_decay=0.1))


def one_layer():
    import keras

    inputs = keras.Input((5,))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_two_devices_train_the_same_weights_as_one_with_every_optimizer(devices, name):
    import keras

    config = configuration(optimizer=name, weight_decay=0.01, clip_norm=0.5, ema=0.9 if name in ("momentum", "adamw") else 0.0)
    loss, hashes = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    for replicas in (1, 2):
        model, before, history = train(devices(replicas), config, loss, one_layer)
        hashes.append(run_sha256(model, history))
        assert not np.array_equal(model.model.trainable_variables[0].numpy(), before[0])
    assert hashes[0] == hashes[1]


def test_a_fixed_loss_scale_stays_fixed_and_a_dynamic_one_wraps(devices):
    import keras

    flags = {"optimizer": "sgd", "dtype": "mixed_float16"}
    keras.config.set_dtype_policy("mixed_float16")
    try:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model, before, _ = train(devices(1), configuration(loss_scale="128", **flags), loss, one_layer)
        dynamic, _ = make(configuration(loss_scale="dynamic", clip_norm=1.0, **flags), model.model)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.optimizer.loss_scale_factor == model.optimizer.scale_loss(1.0) == 128
    assert (
        0 < np.abs(model.model.trainable_variables[0].numpy() - before[0]).max() < 0.3
    )  # 128 times less than without division
    assert isinstance(dynamic, keras.optimizers.LossScaleOptimizer)
    assert dynamic.inner_optimizer.global_clipnorm == 1.0
    gradient = np.float32([[1, -2, 0.5]])
    np.testing.assert_array_equal(after_updates(128 * gradient, loss_scale="128", **flags), after_updates(gradient, **flags))


OPEN_ELSEWHERE = """
import json, sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
rate, iterations = float(model.optimizer.learning_rate.numpy()), int(model.optimizer.iterations.numpy())
momentum = float(np.abs(model.optimizer.momentums[0].numpy()).sum())
model.fit(np.zeros((4, 5)), np.zeros(4), verbose=0)
print(json.dumps([rate, iterations, momentum, len(model.losses), float(model.optimizer.learning_rate.numpy())]))
"""


def test_a_saved_file_opens_and_trains_on_where_only_keras_is_installed(devices, tmp_path):
    """With schedule, L2, momentum: the rate of the last update, the state, the penalties."""
    import keras

    config = configuration(
        schedule="step", boundaries="2", schedule_unit="steps", warmup=1.0, weight_decay=0.01, weight_decay_kind="l2"
    )
    model, *_ = train(devices(1), config, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "model.keras")
    command = [sys.executable, "-I", "-c", OPEN_ELSEWHERE, tmp_path / "model.keras"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    rate, iterations, momentum, penalties, rate_after = json.loads(done.stdout.splitlines()[-1])
    assert rate == rate_after == pytest.approx(0.01)
    assert (iterations, penalties) == (3, 2)
    assert momentum == pytest.approx(np.abs(model.optimizer.momentums[0].numpy()).sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"optimizer": "adam", "momentum": 0.8}, "--momentum=0.8: --optimizer=adam has none"),
        ({"optimizer": "sgd", "beta_1": 0.8}, "use one of adam, adamw"),
        ({"optimizer": "lion", "epsilon": 1.0}, "--epsilon=1.0"),
        ({"clip_norm": 1.0, "clip_value": 2.0}, "--clip_norm=1.0 and --clip_value=2.0"),
        ({"optimizer": "adamw"}, "--weight_decay=0.0"),
        ({"optimizer": "adamw", "weight_decay": 0.1, "weight_decay_kind": "l2"}, "use --optimizer=adam"),
        ({"decay_norm_and_bias": True}, "--decay_norm_and_bias=True needs a --weight_decay"),
        ({"weight_decay_kind": "l2"}, "--weight_decay_kind=l2 needs a --weight_decay"),
        ({"optimizer": "lion", "beta_1": 0.0}, "lion"),
        ({"loss_scale": "big"}, "--loss_scale=big: dynamic, or a number"),
        ({"loss_scale": "0"}, "--loss_scale=0:"),
        ({"loss_scale": "nan"}, "--loss_scale=nan:"),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_flag(flags, says):
    (problem,) = optimizers.problems(Config(**flags))
    assert says in problem
    assert "\n" not in problem
