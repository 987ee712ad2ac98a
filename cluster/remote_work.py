"""What a coordinator asks of workers, and how little travels: results in one vector a type, weights in one message a ps."""

import collections
import queue
import statistics
import threading
import time

import tensorflow as tf

from cluster.packing import packed, unpacked

_PATIENCE_S = 10.0  # and 4 times what units take: then one is asked for again


class Workers:
    """Asks the workers of a ParameterServerStrategy for what functions give.

    TensorFlow gives a unit to another worker when its own has died, but waits forever for one that hangs. So what does not come
    is asked for again, and the first answer is taken: all are the same. Before a function's first answer, which traces, and
    without other workers that helps nobody, and the lifeline's --step_timeout_s ends the run.

    Args:
      strategy: the strategy.
    """

    def __init__(self, strategy):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.count = strategy._num_workers
        self._took = collections.defaultdict(lambda: collections.deque(maxlen=20))  # seconds, by function

    def ask(self, function, *numbers):
        """Begins; the function of no arguments that is returned waits for the result, a list of tensors."""
        arguments = tuple(tf.constant(n, tf.int64) for n in numbers)
        answers, took = queue.SimpleQueue(), self._took[function]

        def once():
            value, began = self._coordinator.schedule(function, args=arguments), time.monotonic()
            waits = lambda: answers.put((outcome(value.get), time.monotonic() - began))  # noqa: E731
            threading.Thread(target=waits, daemon=True).start()

        def result():
            while True:
                try:
                    found, seconds = answers.get(timeout=max(_PATIENCE_S, 4 * statistics.median(took)) if took else None)
                except queue.Empty:
                    once()
                    continue
                if not isinstance(found, Exception):
                    took.append(seconds)
                    return found
                if not _died(found):
                    raise found
                once()

        once()
        return result


def outcome(function):
    """What a function of no arguments returns, or the exception that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def _died(error):
    """Whether a worker died between its result and the copying of it: TensorFlow tells that to whoever waits for the result."""
    return isinstance(error, tf.errors.UnavailableError) and "/job:worker" in str(error) and "/job:ps" not in str(error)


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
        return [packed([tensors[i] for i in group]) for group in self._groups.values()]

    def unpack(self, vectors):
        found = [None] * len(self._specs)
        for vector, group in zip(vectors, self._groups.values(), strict=True):
            for i, tensor in zip(group, unpacked(vector, [self._specs[i].shape for i in group]), strict=True):
                found[i] = tensor
        return found


def read(variables) -> list[tf.Tensor]:
    """The values of Keras variables on ps, read by a worker in one message of each ps and type, not one a variable."""
    groups = collections.defaultdict(list)
    for i, variable in enumerate(variables):
        groups[variable.value.device, variable.dtype].append(i)
    found = [None] * len(variables)
    for (device, _), group in groups.items():
        with tf.device(device):
            vector = packed([tf.convert_to_tensor(variables[i].value) for i in group])
        for i, tensor in zip(group, unpacked(vector, [variables[i].shape for i in group]), strict=True):
            found[i] = tensor
    return found
