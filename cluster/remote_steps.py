"""The trainer's steps where parameter servers hold the variables: what a coordinator does, and what it asks workers for.

A unit of work is the pass of one logical replica k in one step t. A worker finds its examples by (t, k), reads the weights from
the ps, and returns what the pass gives, packed into one vector a type: one answer, not a tensor after another. Any worker may
compute any unit, so their number divides nothing, and TensorFlow's coordinator gives a dead worker's unit to another one.

Synchronous: the K results are added in the tree (`tree.py`) and applied once, which is the very step of all other clusters.
Asynchronous: each result is applied when it arrives. One writer does so, the coordinator, for Keras's own updates of several
workers lose some (`assign_add` reads, adds and writes).
"""

import collections
import itertools
import queue
import threading
import time

import tensorflow as tf
from tensorflow.python.distribute import input_lib

from cluster import tree, wishes
from cluster.reduction import add_lists
from cluster.remote_work import Packed, Workers, outcome, read, size

_AHEAD = 2  # units that are asked for before they are needed, for each worker


class Numbers(input_lib.DistributedDataset):
    """In the place of a data set in Keras's loop, which passes its iterator on: 0, 1, 2 ...

    (Keras knows a distributed data set by this base's name, and leaves it as it is.)

    Args:
      streams: what gives a batch by its place: `batch_at(step, k)`.
    """

    def __init__(self, streams):
        self.streams, self._iterator = streams, None

    def __iter__(self):
        return itertools.count()

    @property
    def cardinality(self):
        return tf.data.INFINITE_CARDINALITY

    @property
    def element_spec(self):
        return tf.TensorSpec([], tf.int64)


class RemoteSteps:
    """The functions that a `Trainer` calls for steps and evaluations, in the place of those that run on all workers.

    Args:
      trainer: the `cluster.Trainer`; its reduction has one replica. If it is `asynchronous`, each result is applied when it
        arrives.
      strategy: of the variables.
    """

    def __init__(self, trainer, strategy):
        # Of the last training steps: seconds of waiting for results, seconds of the update, bytes that have come.
        self.spent = collections.deque(maxlen=10_000)
        self._trainer, self._workers = trainer, Workers(strategy)
        self._streams, self._units, self._made = {}, {}, {}
        self._arrived, self._outstanding, self._next = queue.SimpleQueue(), 0, 0
        self._asked, self._place, self._to_ask = collections.deque(), -1, 0

    def distribute(self, streams, training):
        """What stands for the streams in Keras's loop."""
        if not hasattr(streams, "batch_at"):
            raise ValueError("With parameter servers, data has to tell a batch by its place: streams with `batch_at(step, k)`.")
        if self._streams.get(training) is not streams:
            self._streams[training] = streams
            for made in (self._units, self._made):
                for key in [key for key in made if key[0] is training]:
                    del made[key]
        return Numbers(streams)

    # ---- training ----------------------------------------------------------------------------------------------------

    def several_steps(self, iterator, steps):
        """As `MirroredSteps.several_steps`: (metrics since the last reset, records, (steps made, wish, bad))."""
        return self._steps(int(steps), observed=False)[:3]

    def observed_step(self, iterator):
        """As `MirroredSteps.observed_step`."""
        logs, records, ending, told = self._steps(1, observed=True)
        told.seen["learning_rate"] = told.learning_rate
        return logs, records, told, ending

    def _steps(self, steps, observed):
        unit, update = self._training(observed)
        first, last = self._trainer.step, self._trainer.step + self._trainer.steps_to_come
        rows, wish = [], tf.zeros([2])
        for made in range(1, steps + 1):
            step, stale, began, self._came = first + made - 1, 0, time.perf_counter(), 0
            if self._trainer.asynchronous:
                vectors, stale = self._next_update(unit, step, last)
            else:
                vectors = self._sum(unit, step)
            waited = time.perf_counter() - began
            logs, values, told = update(vectors, self._wish(), tf.constant(stale, tf.int64))
            rows.append(values)
            wish = tf.maximum(wish, told.wish)
            ends = bool(wish[wishes.STOP] > 0 or told.bad >= 0)  # known when the update is done
            self.spent.append((waited, time.perf_counter() - began - waited, self._came))
            if ends:
                break
        records = [tf.stack(column) for column in zip(*rows, strict=True)]
        return logs, records, (tf.constant(made), wish, told.bad), told

    def _sum(self, unit, step):
        """The packed sum of a step's K units, in the order of the tree."""
        leaves = self._trainer.reduction.leaves
        to_ask = (self._workers.ask(unit, step, k) for k in range(leaves))
        asked = collections.deque(itertools.islice(to_ask, _AHEAD * self._workers.count))

        def leaf():
            result = asked.popleft()()
            asked.extend(itertools.islice(to_ask, 1))
            self._came += size(result)
            return result

        # The tree takes its leaves from left to right, so that few of them are here at a time.
        return tree.root(_Leaves(leaf), leaves, add_lists)

    def _wish(self):
        if self._trainer.asynchronous and self._outstanding:  # what is under way belongs to the run
            return tf.constant([0, wishes.mine[wishes.SAVE]], tf.float32)
        return tf.constant(wishes.mine, tf.float32)

    def _next_update(self, unit, step, last):
        """The result that arrives next, and how many updates were made since its weights were read.

        No unit from `last` on is asked for: an epoch's updates are those of its own examples, and then nothing is under way.
        """
        self._next = max(self._next, step) if self._outstanding else step
        while self._next < last and self._outstanding < self._workers.count:  # more would only wait here and grow stale
            if self._outstanding and wishes.mine[wishes.STOP]:
                break
            result = self._workers.ask(unit, self._next, 0)
            threading.Thread(target=lambda result=result: self._arrived.put(outcome(result)), daemon=True).start()
            self._next, self._outstanding = self._next + 1, self._outstanding + 1
        found = self._arrived.get()
        if isinstance(found, Exception):
            raise found
        self._outstanding -= 1
        *vectors, version = found
        self._came += size(found)
        return vectors, int(self._trainer.optimizer.iterations.numpy()) - int(version)

    def _training(self, observed):
        """(what a worker computes: (step, k) -> vectors; what the coordinator does with their sum), traced once.

        What is asked for ahead of an asynchronous update may be recorded when it arrives, so then all tell what is observed.
        """
        trainer, step = self._trainer, self._trainer._step
        tells = observed or (trainer.asynchronous and trainer._recorder is not None)
        streams, ids = self._streams[True], trainer._ids
        if (True, tells, observed, ids) not in self._made:
            one_pass, _, specs = step.training_part(ids, tells)
            packed = Packed(specs)

            def unit(t, k):
                examples = streams.batch_at(t, k, with_ids=True) if ids else streams.batch_at(t, k)
                version = tf.identity(trainer.optimizer.iterations.value)
                with tf.control_dependencies([version]):
                    _, call, _ = step.training_part(ids, tells)
                    weights, state = _values(one_pass)
                    run = step.runner(one_pass, t, weights, state)
                results = call(lambda element: run(element, k), examples, tf.cast(k, tf.int32))
                if not self._trainer.asynchronous:
                    return packed.pack(results)
                return [*packed.pack(_changes(one_pass, state, results)), version]

            def update(vectors, wish, stale):
                told = step.update(packed.unpack(vectors), wish, observed)
                extra = {"staleness": stale} if self._trainer.asynchronous else {}
                return trainer.get_metrics_result(), trainer._record(told, tf.constant(0.0), extra), told

            asked = self._units.get((True, tells, ids)) or _traced(unit, 2)
            self._units[True, tells, ids] = asked
            self._made[True, tells, observed, ids] = asked, _here(update)
        return self._made[True, tells, observed, ids]

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate_step(self, iterator, _):
        """As `MirroredSteps.evaluate_step`; the next steps' units are asked for meanwhile."""
        unit, add = self._evaluation()
        replicas, asked = self._streams[False].logical_replicas, self._asked
        place = next(iterator) % self._streams[False].steps
        if place != self._place:  # another evaluation
            asked.clear()
            self._place = self._to_ask = place
        last = min(self._streams[False].steps, place + 1 + -(-_AHEAD * self._workers.count // replicas))
        while self._to_ask < last:
            asked.extend(self._workers.ask(unit, self._trainer.step, self._to_ask, k) for k in range(replicas))
            self._to_ask += 1
        vectors = tree.root({(k, 1): asked.popleft()() for k in range(replicas)}, replicas, add_lists)
        self._place += 1
        add(vectors)
        return self._trainer.get_metrics_result(), [], (tf.constant(1), self._wish(), tf.constant(-1))

    def _evaluation(self):
        if (False,) not in self._made:
            step, streams = self._trainer._step, self._streams[False]
            one_pass, call, specs = step.evaluation_part()
            packed = Packed(specs)

            def unit(t, place, k):
                run = step.runner(one_pass, t, *_values(one_pass))
                return packed.pack(call(lambda element: run(element, k), streams.batch_at(place, k), k))

            self._made[False,] = _traced(unit, 3), _here(lambda vectors: step.add_evaluated(packed.unpack(vectors)))
        return self._made[False,]


class _Leaves:
    """The tree's leaves, each taken by calling a function when its turn comes."""

    def __init__(self, leaf):
        self._leaf = leaf

    def __contains__(self, node):
        return node[1] == 1

    def __getitem__(self, node):
        return self._leaf()


def _values(one_pass):
    """What weights and state are, on a worker."""
    values = read(one_pass.weights + one_pass.state)
    return values[: len(one_pass.weights)], values[len(one_pass.weights) :]


def _changes(one_pass, state, results):
    """A pass's results with the changes of the moving statistics in their place: what can be added to other ones."""
    gradients, statistics, sums = one_pass.split(results[: len(one_pass.output_specs)])
    changes = [after - state[position] for position, after in zip(one_pass.moving, statistics, strict=True)]
    return [*gradients, *changes, *sums, *results[len(one_pass.output_specs) :]]


def _traced(unit, numbers):
    """A function of so many integers, for workers to run."""
    return tf.function(unit, autograph=False).get_concrete_function(*[tf.TensorSpec([], tf.int64)] * numbers)


def _here(function):
    return tf.function(function, autograph=False)
