"""Batch normalisation in one operation gives what the layer gives; what the operation cannot do is left to Keras."""

import contextlib

import numpy as np
import pytest

RNG = np.random.default_rng(0)
IMAGES, WEIGHTS = RNG.normal(3, 2, (6, 4, 5, 3)), RNG.normal(0, 1, (6, 4, 5, 3))
EPSILON, MOMENTUM = 1 / 64, 7 / 8


def trained(tensorflow, layer, images, context, batch=None, **arguments):
    """Output, moving mean and variance, and the gradients of sum(WEIGHTS * output) by images, gamma, beta."""
    tf = tensorflow
    layer.build(images.shape)
    weights = tf.cast(WEIGHTS.reshape(images.shape), layer.variable_dtype)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([batch, *images.shape[1:]], layer.compute_dtype)])
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output, state = layer.stateless_call(
                layer.trainable_variables, layer.non_trainable_variables, x, training=True, **arguments
            )
            loss = tf.reduce_sum(weights * tf.cast(output, weights.dtype))
        return [output, *state, *tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])]

    with context:
        return [tf.cast(t, tf.float64).numpy() for t in run(tf.cast(images, layer.compute_dtype))]


def fused(tensorflow, layer, images, **arguments):
    import keras

    from cluster import fused_batch_norm

    model = keras.Sequential([layer])
    return trained(tensorflow, layer, images, fused_batch_norm.fused(model), **arguments)


def by_hand(images):
    """Ioffe and Szegedy 2015, algorithm 1 and the gradients below it, with gamma 1 and beta 0, in float64."""
    axes = (0, 1, 2)
    mean, variance = images.mean(axes), images.var(axes)
    normal = (images - mean) / np.sqrt(variance + EPSILON)
    of_images = (WEIGHTS - WEIGHTS.mean(axes) - normal * (WEIGHTS * normal).mean(axes)) / np.sqrt(variance + EPSILON)
    moving = [(1 - MOMENTUM) * mean, MOMENTUM + (1 - MOMENTUM) * variance]
    return [normal, *moving, of_images, (WEIGHTS * normal).sum(axes), WEIGHTS.sum(axes)]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 3e-6), ("mixed_bfloat16", 1e-2), ("bfloat16", 1e-2)])
def test_training_is_the_papers_algorithm(tensorflow, dtype, tolerance):
    import keras

    layer = keras.layers.BatchNormalization(epsilon=EPSILON, momentum=MOMENTUM, dtype=keras.DTypePolicy(dtype))
    images = IMAGES if dtype == "float32" else tensorflow.cast(IMAGES, "bfloat16").numpy().astype(float)
    found = fused(tensorflow, layer, images)
    for one, other in zip(found, by_hand(images), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * abs(other).max())
    kept = 1e-2 if dtype == "bfloat16" else 3e-6  # else the statistics stay float32
    for one, other in zip(found[1:3], by_hand(images)[1:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=kept)


@pytest.mark.parametrize("without", ["scale", "center"])
def test_without_scale_or_offset_it_has_one_gradient_less(tensorflow, without):
    import keras

    layer = keras.layers.BatchNormalization(epsilon=EPSILON, momentum=MOMENTUM, **{without: False})
    wanted = by_hand(IMAGES)
    del wanted[4 if without == "scale" else 5]
    for one, other in zip(fused(tensorflow, layer, IMAGES), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6 * abs(other).max())


@pytest.mark.parametrize("case", ["vectors", "float64", "channels first", "mask", "frozen", "renorm"])
def test_what_the_operation_cannot_do_is_kerass_own_to_the_last_bit(tensorflow, case):
    import keras

    def layer():
        settings = {"float64": {"dtype": "float64"}, "channels first": {"axis": 1}, "renorm": {"renorm": True}}
        made = keras.layers.BatchNormalization(**settings.get(case, {}))
        made.trainable = case != "frozen"
        return made

    images = IMAGES.reshape(-1, 3) if case == "vectors" else IMAGES
    arguments = {"mask": tensorflow.constant(RNG.random((6, 4, 5)) < 0.7)} if case == "mask" else {}
    own = trained(tensorflow, layer(), images, contextlib.nullcontext(), **arguments)
    for one, other in zip(fused(tensorflow, layer(), images, **arguments), own, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_of_one_entry_has_no_variance(tensorflow):
    import keras

    images = IMAGES.reshape(1, 1, 1, -1)
    output, mean, variance, *_ = fused(tensorflow, keras.layers.BatchNormalization(momentum=MOMENTUM), images)
    np.testing.assert_array_equal(output, np.zeros(images.shape))
    np.testing.assert_allclose(mean, (1 - MOMENTUM) * images.ravel(), rtol=3e-7)
    np.testing.assert_array_equal(variance, np.full(images.size, MOMENTUM))


def test_a_pass_of_any_batch_gives_the_bits_of_a_pass_of_one_size(tensorflow):
    import keras

    whole, any_size = (fused(tensorflow, keras.layers.BatchNormalization(), IMAGES, batch=batch) for batch in (6, None))
    for one, other in zip(whole, any_size, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_is_as_it_was_when_its_pass_is_traced(tensorflow):
    import keras

    from cluster import fused_batch_norm

    layer = keras.layers.BatchNormalization()
    with fused_batch_norm.fused(keras.Sequential([keras.Sequential([layer])])):
        assert "call" in vars(layer)  # of a network inside a network, too
    assert "call" not in vars(layer)
