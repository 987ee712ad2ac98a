"""What is recorded of one step, computed in its graph: it reads the step's tensors and changes none.

What belongs to a logical replica is written into a table of all K, zero but for its own row, and joins the sums of the passes:
so it is collected by the very reduction that adds the gradients, and integers travel as integers.
"""

import tensorflow as tf

from cluster import digest


class PassTables:
    """Two tables over the leaves, the logical replicas as a rule, that a pass adds to its results.

    Integers, int64 [L, b, ids + 2]: the example's ids where the data tells, and the hashes of x and y.
    Floats, float64 [L, 1 + 8 + M]: of the gradient, sum of squares and projections; then the elements of the metric sums.

    Args:
      one_pass: the `ReplicaPass`.
      leaves: L, K as a rule: see `Reduction`.
      ids: integers a example by which the data names it, or 0.
    """

    def __init__(self, one_pass, leaves, ids):
        self._pass, self._replicas, self._batch = one_pass, leaves, one_pass.batch_size
        sums = sum(spec.shape.num_elements() for spec in one_pass.split(one_pass.output_specs)[2])
        self.specs = [
            tf.TensorSpec([leaves, self._batch, ids + 2], tf.int64),
            tf.TensorSpec([leaves, 1 + digest.PROJECTIONS + sums], tf.float64),
        ]

    def of(self, k, element, ids, results, loss_scale) -> list[tf.Tensor]:
        """The tables with row k; `results` is what the pass returned for `element`, whose ids are int64 [b, ids] or None."""
        x, *labels = element if isinstance(element, tuple) else (element,)
        hashes = [digest.of_examples(part, self._batch) for part in (x, labels)]
        integers = tf.concat([*([] if ids is None else [ids]), tf.stack(hashes, 1)], 1)
        gradients, _, sums = self._pass.split(results)
        numbers = digest.of_all(unscaled(gradients, loss_scale))
        floats = tf.concat([numbers, *(tf.reshape(tf.cast(s, tf.float64), [-1]) for s in sums)], 0)
        return [self._in_row(k, integers), self._in_row(k, floats)]

    def _in_row(self, k, values):
        return tf.scatter_nd([[k]], values[None], [self._replicas, *values.shape])


def unscaled(gradients, loss_scale):
    """Gradients without the loss scale."""
    return [g / tf.cast(loss_scale, g.dtype) for g in gradients]


def values(variables) -> list[tf.Tensor]:
    """The values of Keras variables, as this replica holds them."""
    return [tf.convert_to_tensor(v.value) for v in variables]
