"""What a step spends on its passes, its reduction and its update: the step's own code, each part traced alone and timed.

    passes      this worker's logical replicas, on one batch that stays in memory
    reduction   what the passes gave, over all workers, which start it together
    update      with the finished sums: division, clipping, optimizer, statistics, metric sums
    call        nothing: what calling each of these costs by itself

All run under the trainer's own strategy, by turns. What they leave of a whole step is the waiting for workers that come later,
and bookkeeping; it is negative where parts overlap in the whole step.
"""

import time

import tensorflow as tf

from cluster.reduction import replica_id


class _Reached(Exception):
    """Raised in place of the reduction, with the sums that a replica brings along."""


def measure(trainer, streams, training: bool, rounds: int) -> dict[str, list[float]]:
    """Times the parts of a step. Every worker calls it, after `fit` or `evaluate`. The updates change the weights.

    Args:
      trainer: a `cluster.Trainer` that has made such a step.
      streams: what it was given.
      training: parts of a training step, or of an evaluation step.
      rounds: how often each part is timed, after one time that is not.
    Returns:
      The seconds of each round on this worker, by part.
    """
    local = _local_replicas(trainer.distribute_strategy)
    functions = _functions(trainer, streams, training, local)
    together = _alone(
        trainer, local, lambda replica: trainer.reduction(replica, [[tf.ones([1])] for _ in trainer.reduction.nodes(replica)])
    )
    seconds = {name: [] for name in functions}
    for _ in range(1 + rounds):
        for name, function in functions.items():
            _finished(together())
            began = time.perf_counter()
            _finished(function())
            seconds[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in seconds.items()}


def _functions(trainer, streams, training, local):
    """A function without arguments for each part; its inputs are captured, so that nothing is computed beforehand."""
    step, original = trainer._step, trainer.reduction
    body = step.train if training else step.evaluate
    batches = {replica: _batch(trainer, streams, replica) for replica in local}

    def passes(replica):
        try:
            body(batches[replica], tf.zeros([2]))
        except _Reached as reached:
            return reached.args[0]
        raise AssertionError("a step without a reduction")

    def reduction(replica):
        return original(replica, sums[replica])

    def update(replica):
        *sums, wish = finished[replica]
        return step.update(sums, wish) if training else step.add_evaluated(sums)

    functions = {"call": _alone(trainer, local, lambda replica: tf.constant(0.0))}
    trainer.reduction = _Stop(original)
    try:
        functions["passes"] = _alone(trainer, local, passes)
    finally:
        trainer.reduction = original
    sums = dict(zip(local, functions["passes"](), strict=True))
    functions["reduction"] = _alone(trainer, local, reduction)
    finished = dict(zip(local, functions["reduction"](), strict=True))
    functions["update"] = _alone(trainer, local, update)
    return functions


class _Stop:
    """A reduction that ends the step where it would begin."""

    def __init__(self, reduction):
        for name in ("block", "leaves", "nodes", "passes", "replicas"):
            setattr(self, name, getattr(reduction, name))

    def __call__(self, replica, sums):
        raise _Reached(sums)


def _batch(trainer, streams, replica):
    first, last = trainer.reduction.block(replica)
    size = trainer.global_batch_size // trainer.logical_replicas
    examples = streams.examples(first, last, size)
    return next(iter(examples.batch((last - first) * size, drop_remainder=True)))


def _local_replicas(strategy):
    found = []
    tf.function(lambda: strategy.run(lambda: found.append(replica_id())), autograph=False)()
    return sorted(found)


def _alone(trainer, local, on_replica):
    """The function () -> [what `on_replica(replica)` returns, for each local replica], on the replicas' devices; traced."""

    @tf.function(autograph=False)
    def function():
        found = {}  # filled while tracing: replicas may return unlike structures, which strategy.run cannot put together

        def one():
            found[replica_id()] = on_replica(replica_id())

        trainer.distribute_strategy.run(one)
        return [found[replica] for replica in local]

    return function.get_concrete_function()


def _finished(results):
    """Waits for an accelerator, which works in the order of the calls, by one small result."""
    for tensor in [t for t in tf.nest.flatten(results) if t is not None][-1:]:
        tensor.numpy()
