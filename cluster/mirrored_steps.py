"""The trainer's steps where every worker has the variables: one graph on all of them, over the iterator of Keras's loop.

`remote_steps.py` has the same functions for a cluster with parameter servers.
"""

import time

import numpy as np
import tensorflow as tf

from cluster import wishes


class MirroredSteps:
    """The functions that a `Trainer` calls for steps and evaluations; each is traced when it is called first.

    Args:
      trainer: the `cluster.Trainer`.

    Attributes:
      several_steps: (iterator, steps) -> (metrics since the last reset, records, (steps made, wish, bad)).
      observed_step: iterator -> (metrics since the last reset, records, what one step told, (1, wish, bad)).
      evaluate_step: as `several_steps`, of an evaluation.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self.several_steps = self._on_iterator(lambda *part: trainer._step.train(*part, trainer._ids))
        self.observed_step = self._observed()
        self.evaluate_step = self._on_iterator(trainer._step.evaluate)

    def _on_iterator(self, replica_step):
        """The function (iterator, steps) -> (metrics since the last reset, records, (steps made, wish, bad)).

        The records of the steps are stacked by name. It ends early at a wish to stop, and at what is not finite.
        """

        trainer = self._trainer

        @tf.function(autograph=False)
        def several_steps(iterator, steps):
            def one_step(index, wish, bad, stacks):
                told, wait = self._one_step(iterator, replica_step)
                values = trainer._record(told, wait) if stacks else []
                stacks = [stack.write(index, value) for stack, value in zip(stacks, values, strict=True)]
                return index + 1, tf.maximum(wish, told.wish), told.bad, stacks

            def goes_on(index, wish, bad, stacks):
                return (index < steps) & (wish[wishes.STOP] == 0) & (bad < 0)

            count = 3 + len(trainer._metric_names()) if replica_step != trainer._step.evaluate else 0
            stacks = [tf.TensorArray(tf.float32, size=steps, element_shape=[]) for _ in range(count)]
            start = [tf.constant(0), tf.zeros([2]), tf.constant(-1), stacks]
            *ending, stacks = tf.while_loop(goes_on, one_step, start, parallel_iterations=1)
            return trainer.get_metrics_result(), [stack.stack()[: ending[0]] for stack in stacks], ending

        return several_steps

    def _observed(self):
        """The function iterator -> (metrics since the last reset, records, what one step told, (1, wish, bad)).

        A function of its own: a tf.cond around the collectives of several devices would make one wait for the other, and the
        steps that are not recorded should not pay.
        """

        trainer = self._trainer

        @tf.function(autograph=False)
        def observed_step(iterator):
            told, wait = self._one_step(iterator, lambda *part: trainer._step.train(*part, trainer._ids, observed=True))
            records = [value[None] for value in trainer._record(told, wait)]
            told.seen["learning_rate"] = told.learning_rate
            return trainer.get_metrics_result(), records, told, (tf.constant(1), told.wish, told.bad)

        return observed_step

    def _one_step(self, iterator, replica_step):
        """What a replica step returns, as one local replica has it, and the seconds that its data was waited for."""
        began, wish = tf.split(_now_and_wishes(), [1, 2])
        with tf.control_dependencies([began]):
            data = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
            wait = tf.cast(_now_and_wishes()[0] - began[0], tf.float32)
        strategy = self._trainer.distribute_strategy
        told = strategy.run(replica_step, args=(data, tf.cast(wish, tf.float32)))
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], told), wait


def _now_and_wishes():
    """Seconds of a monotonic clock, and this worker's wishes. (tf.timestamp refuses to run in deterministic mode.)"""
    return tf.ensure_shape(tf.numpy_function(lambda: np.array([time.monotonic(), *wishes.mine]), [], tf.float64), [3])
