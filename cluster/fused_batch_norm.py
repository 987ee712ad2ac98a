"""Batch normalisation of a logical replica in one operation, where Keras makes it of a dozen.

TensorFlow's fused kernel (`FusedBatchNormV3`: cuDNN on GPUs) reads the images once, where mean, variance, normalisation and
their gradients read them once each. It is the same normalisation (Ioffe and Szegedy 2015), with other last bits.
"""

import contextlib
import functools

import keras
import tensorflow as tf


@contextlib.contextmanager
def fused(model):
    """Within the block, in which a pass is traced, the model's BatchNormalization layers of images train in one operation.

    All others do what they always do: layers that are frozen, have a mask or renormalise, channels that are not last, float64.
    """
    layers = [layer for layer in model._flatten_layers() if type(layer) is keras.layers.BatchNormalization and not layer.renorm]
    for layer in layers:  # in __dict__: Keras looks into what is assigned to a layer
        layer.__dict__["call"] = functools.partial(_call, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["call"]


def _call(layer, inputs, training=None, mask=None):
    """As the layer's own `call`: the normalised inputs; updates the moving statistics."""
    of_images = inputs.shape.rank == 4 and layer.axis in (-1, 3)
    if not (training and layer.trainable and of_images and mask is None and inputs.dtype != tf.float64):
        return type(layer).call(layer, inputs, training=training, mask=mask)
    inputs, shape = _float32(inputs), inputs.shape[3:]  # as Keras does, for any type
    outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=_float32(layer.gamma) if layer.scale else tf.ones(shape),
        offset=_float32(layer.beta) if layer.center else tf.zeros(shape),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        exponential_avg_factor=1.0,
        is_training=True,
    )
    entries = _float32(tf.size(inputs) // shape[0])
    variance = unbiased * ((entries - 1) / entries)  # Keras keeps the biased one
    for moving, of_batch in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(_float32(moving) * layer.momentum + of_batch * (1 - layer.momentum))
    return tf.cast(outputs, layer.compute_dtype)


def _float32(value):
    return tf.cast(tf.convert_to_tensor(value), tf.float32)
