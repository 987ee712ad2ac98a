"""How long a reduction takes by its size: in tree order and as ring all-reduce, by turns, on the cluster at hand."""

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from cluster.reduction import Reduction, replica_id

FORMS = ("ordered", "ring")
_LARGEST = 2_359_296  # elements of the largest tensor of a ResNet-50: gradients come in tensors of such sizes


def sweep(
    strategy,
    sizes: list[int],
    rounds: Callable[[int], int],
    forms: tuple[str, ...] = FORMS,
    communication: str = "auto",
    warmup: int = 3,
) -> dict[int, dict[str, list[float]]]:
    """Times reductions of float32 tensors that the N replicas of the strategy hold. Every worker calls it.

    Args:
      strategy: the tf.distribute strategy.
      sizes: in bytes.
      rounds: how many reductions of a size are timed.
      forms: those to measure; they take turns, which of them is first changing from round to round.
      communication: TensorFlow's hint for collectives.
      warmup: reductions of each form and size before those that count; the first one traces.
    Returns:
      {size: {form: seconds of each round on this worker}}.
    """
    replicas = strategy.num_replicas_in_sync
    reductions = {form: Reduction(strategy, replicas, form == "ordered", communication) for form in forms}
    found = {}
    for size in sizes:
        values = _tensors(size)
        functions = {form: _reducer(strategy, reductions[form], values) for form in forms}
        seconds = {form: [] for form in forms}
        for turn in range(warmup + rounds(size)):
            for form in forms if turn % 2 else forms[::-1]:
                began = time.perf_counter()
                last, reduced = functions[form](values)
                last.numpy()  # on an accelerator the call returns before the work is done
                del reduced
                seconds[form].append(time.perf_counter() - began)
        found[size] = {form: times[warmup:] for form, times in seconds.items()}
    return found


def _tensors(size):
    rng, left, made = np.random.default_rng(0), max(1, size // 4), []
    while left:
        made.append(tf.constant(rng.standard_normal(min(left, _LARGEST), dtype=np.float32)))
        left -= len(made[-1])
    return made


def _reducer(strategy, reduction, values):
    """The traced function: tensors -> (a scalar of the last reduced tensor, all of them)."""

    def on_replica(tensors):
        reduced = reduction(replica_id(), [tensors])
        return reduced[-1][0], reduced

    def on_worker(tensors):
        last, reduced = strategy.run(on_replica, args=(tensors,))
        return strategy.experimental_local_results(last)[0], reduced

    specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
    return tf.function(on_worker, autograph=False).get_concrete_function(specs)
