"""Losses and metrics that mean the same for every number of workers, or are refused.

The loss of a step is the mean over the K logical replicas of Keras's own loss on their b examples. For a loss that averages
over its examples this is the mean over the global batch; weight regularisers count once, activity regularisers and
`add_loss` as the mean over the K; a custom loss that returns one value counts as the mean over its logical replica.
"""

import keras
import numpy as np
from keras.src.backend import compute_output_spec


def check(loss):
    """Refuses losses that no sum over logical replicas can express.

    Raises:
      ValueError: for reduction 'mean_with_sample_weight', which divides by a sum of weights that only all replicas
        together know, and for no reduction.
    """
    for part in keras.tree.flatten(loss):
        reduction = getattr(part, "reduction", "sum_over_batch_size")
        if reduction == "mean_with_sample_weight":
            raise ValueError(
                f"loss {part.name} divides by the sum of the weights of one logical replica, which is not the sum over "
                "the global batch. Use reduction='sum_over_batch_size' (divides by the number of examples) or 'sum'."
            )
        if reduction in (None, "none"):
            raise ValueError(
                f"loss {part.name} has reduction={reduction!r}. Use 'sum_over_batch_size' or 'sum', so that it is stated "
                "what becomes of the examples' losses."
            )


class GlobalSum(keras.losses.Loss):
    """A loss with reduction 'sum' over the global batch: K times, since the K replicas' losses are averaged."""

    def __init__(self, loss, logical_replicas):
        super().__init__(name=loss.name, reduction=None)
        self._loss, self._logical_replicas = loss, logical_replicas

    def __call__(self, y_true, y_pred, sample_weight=None):
        return self._loss(y_true, y_pred, sample_weight) * self._logical_replicas


def over_replicas(loss, logical_replicas):
    """The user's loss structure as one that may be averaged over the logical replicas."""

    def convert(part):
        return GlobalSum(part, logical_replicas) if getattr(part, "reduction", None) == "sum" else part

    return loss if loss is None else keras.tree.map_structure(convert, loss)


def total(trainer, y, y_pred, sample_weight, extra_losses):
    """The loss of one logical replica: the compiled loss, regularisers and `add_loss`, as Keras's `compute_loss`.

    Raises:
      ValueError: without any loss, and for outputs with a Keras mask (the mean would be over the unmasked of a replica).
    """
    if any(getattr(output, "_keras_mask", None) is not None for output in keras.tree.flatten(y_pred)):
        raise ValueError(
            f"{trainer.model.name} masks its output, so each logical replica's loss would be divided by its own number of "
            "unmasked entries. Pass the mask as sample_weight instead."
        )
    parts = [] if trainer.loss is None else [trainer._compile_loss(y, y_pred, sample_weight)]
    parts += [keras.ops.sum(keras.ops.cast(loss, keras.config.floatx())) for loss in extra_losses]
    if not parts:
        raise ValueError("No loss to train with. Give compile(loss=...) or a model that calls add_loss.")
    return parts[0] if len(parts) == 1 else keras.ops.sum(keras.ops.stack(parts))


def check_metrics(trainer, element_spec):
    """Refuses metrics whose state is not a sum over examples: only sums can be added up over logical replicas.

    Raises:
      ValueError: if what an update adds to a metric's state depends on what was there before.
    """
    if trainer._compile_metrics is None:
        return
    x, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    rng = np.random.default_rng(0)
    y_pred = compute_output_spec(trainer, keras.tree.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), x))
    y_pred = keras.tree.map_structure(lambda s: rng.uniform(size=s.shape).astype("float32"), y_pred)
    y = keras.tree.map_structure(lambda s: np.zeros(s.shape, s.dtype.as_numpy_dtype), y)
    variables = trainer.metrics_variables

    def increments(start):
        before = [np.full(v.shape, start, v.dtype) for v in variables]
        with keras.StatelessScope(list(zip(variables, before, strict=True))) as scope:
            trainer.compute_metrics(None, y, y_pred)
        return [np.asarray(scope.get_current_value(v)) - b for v, b in zip(variables, before, strict=True)]

    for variable, from_0, from_3 in zip(variables, increments(0), increments(3), strict=True):
        if not np.allclose(from_0, from_3, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"metric variable {variable.path} is not a sum over examples: what an update adds depends on what was there "
                "before, so logical replicas cannot be added up. Compute that metric in a callback instead."
            )
