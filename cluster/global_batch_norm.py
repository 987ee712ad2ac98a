"""Batch normalisation over the global batch: the statistics of all workers' examples, as of one machine with the whole batch.

A worker's logical replicas are then one pass, since what an example gives depends on all others, and each layer's batch
statistics are sums over the replicas of the strategy: one collective a layer, and one for their gradient. The rest of the step
is what it always is, with N passes in the place of K (`Reduction.leaves`).

Each replica sends how many entries it has, their sum, and the sum of their squares. These are made of its own mean and
variance, and in float64: the variance is a difference of squares, which float32 would take for 0 where the mean is large.
"""

import contextlib
import functools

import keras
import tensorflow as tf

_OF_WEIGHTS = keras.layers.SpectralNormalization  # what it keeps follows from weights, not from examples


class Refused(ValueError):
    """A layer whose results would follow the number of workers; a line for each."""


def check_layers(model):
    """Refuses random layers: their numbers are keyed by logical replica, and a worker's are one pass.

    Raises:
      Refused: with the names of the layers.
    """
    drawing = [layer for layer in _layers(model) if layer._seed_generators]
    if drawing:
        raise Refused(
            "random numbers belong to a logical replica, and under batch normalisation over the global batch all of a worker's "
            f"are one pass: {_named(drawing)} of {model.name}; use a network without them, or normalise by logical replica"
        )


def check_state(model, moving, normalised):
    """Refuses layers that keep statistics in their own way: of a worker's own examples they would follow N.

    Args:
      model: the plain model.
      moving: the variables that a pass changes.
      normalised: the layers that took global statistics in it, see `moments_over`.
    Raises:
      Refused: with the names of the layers.
    """
    wanted = {id(v) for v in moving}
    moved = [layer for layer in _layers(model) if any(id(v) in wanted for v in layer._non_trainable_variables)]
    others = [layer for layer in moved if layer not in normalised and not isinstance(layer, _OF_WEIGHTS)]
    if others:
        raise Refused(
            f"statistics that are no BatchNormalization's would be those of each worker's own examples: {_named(others)} of "
            f"{model.name}; use keras.layers.BatchNormalization, or normalise by logical replica"
        )


@contextlib.contextmanager
def moments_over(model, total):
    """Within the block, in which a pass is traced, the model's BatchNormalization layers normalise by the global batch.

    Args:
      model: a keras.Model.
      total: maps a tensor to its sum over the replicas of the strategy, in one collective.
    Yields:
      The list of the layers that have done so, to be read when the pass is traced.
    """
    layers, normalised = [layer for layer in _layers(model) if isinstance(layer, keras.layers.BatchNormalization)], []

    def of_layer(layer, inputs, mask):
        normalised.append(layer)
        return moments(inputs, layer._reduction_axes, mask, total)

    for layer in layers:  # in __dict__: Keras looks into what is assigned to a layer
        layer.__dict__["_moments"] = functools.partial(of_layer, layer)
    try:
        yield normalised
    finally:
        for layer in layers:
            del layer.__dict__["_moments"]


def moments(inputs, axes, mask, total):
    """The mean and the variance of a batch normalisation's inputs over all replicas, as Keras's own `_moments` of one.

    Args:
      inputs: float tensor of any shape.
      axes: the axes to reduce, all but one.
      mask: None, or a boolean tensor with one dimension less than `inputs`: which entries count.
      total: see `moments_over`.
    Returns:
      Two tensors [channels] of the inputs' type.
    """
    kept = None if mask is None else tf.cast(mask, inputs.dtype)[..., None] * tf.ones_like(inputs)
    own_mean, own_variance = tf.nn.moments(inputs, axes) if mask is None else _of_kept(inputs, axes, kept)
    entries = tf.size(inputs) // tf.size(own_mean) if mask is None else tf.reduce_sum(kept) / own_mean.shape[0]
    count, mean, variance = (tf.cast(t, tf.float64) for t in (entries, own_mean, own_variance))
    sums = _added(tf.stack([count * tf.ones_like(mean), count * mean, count * (variance + tf.square(mean))]), total)
    # Where there is a mask, Keras adds its epsilon to the count: it may leave nothing.
    divisor = sums[0] + (0 if mask is None else keras.config.epsilon())
    mean = sums[1] / divisor
    variance = (sums[2] - 2 * mean * sums[1] + tf.square(mean) * sums[0]) / divisor
    return tf.cast(mean, inputs.dtype), tf.cast(tf.maximum(variance, 0), inputs.dtype)


def _of_kept(inputs, axes, kept):
    """Mean and variance of the entries where `kept`, of the shape of `inputs`, is 1; 0 where there are none."""
    count = tf.reduce_sum(kept, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * kept, axes), count)
    return mean, tf.math.divide_no_nan(tf.reduce_sum(tf.square(inputs - mean) * kept, axes), count)


def _added(tensor, total):
    """The sum over all replicas. Each has a loss of its own, and they are added: so are the gradients of what all share."""
    return tf.custom_gradient(lambda own: (total(own), total))(tensor)


def _layers(model):
    return list(model._flatten_layers(include_self=True))


def _named(layers):
    names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
    return f"layer{'s' * (len(layers) > 1)} {names}"
