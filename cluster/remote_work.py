"""What a coordinator asks of workers, and how little travels: results in one vector a type, weights in one message a ps."""

import collections

import tensorflow as tf


class Workers:
    """Asks the workers of a ParameterServerStrategy for what functions give.

    Args:
      strategy: the strategy.
    """

    def __init__(self, strategy):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.count = strategy._num_workers

    def ask(self, function, *numbers):
        """Begins; the function of no arguments that is returned waits for the result, a list of tensors."""
        return self._coordinator.schedule(function, args=tuple(tf.constant(n, tf.int64) for n in numbers)).get


def size(tensors) -> int:
    """In bytes."""
    return sum(t.shape.num_elements() * t.dtype.size for t in tensors)


class Packed:
    """Lists of tensors of some specs as one vector a type, and back."""

    def __init__(self, specs):
        self._specs = specs
        self._groups = collections.defaultdict(list)
        for i, spec in enumerate(specs):
            self._groups[spec.dtype].append(i)

    def pack(self, tensors):
        return [tf.concat([tf.reshape(tensors[i], [-1]) for i in group], 0) for group in self._groups.values()]

    def unpack(self, vectors):
        found = [None] * len(self._specs)
        for vector, group in zip(vectors, self._groups.values(), strict=True):
            for i, piece in zip(group, tf.split(vector, [self._specs[i].shape.num_elements() for i in group]), strict=True):
                found[i] = tf.reshape(piece, self._specs[i].shape)
        return found


def read(variables) -> list[tf.Tensor]:
    """The values of Keras variables on ps, read by a worker in one message of each ps and type, not one a variable."""
    groups = collections.defaultdict(list)
    for i, variable in enumerate(variables):
        groups[variable.value.device, variable.dtype].append(i)
    found = [None] * len(variables)
    for (device, _), group in groups.items():
        shapes = [variables[i].shape for i in group]
        with tf.device(device):
            vector = tf.concat([tf.reshape(tf.convert_to_tensor(variables[i].value), [-1]) for i in group], 0)
        pieces = tf.split(vector, [tf.TensorShape(shape).num_elements() for shape in shapes])
        for i, piece, shape in zip(group, pieces, shapes, strict=True):
            found[i] = tf.reshape(piece, shape)
    return found
