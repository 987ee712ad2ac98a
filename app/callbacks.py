"""Keras callbacks of a run: evaluation at chosen steps, a profiler's trace of some steps."""

import math
import os
import time

import keras
import tensorflow as tf

from cluster import wishes


class EvaluateAt(keras.callbacks.Callback):
    """Evaluates in the middle of training; every worker has to have it, since an evaluation is all workers' work.

    It leaves the epoch's own metrics alone. With several steps an execution it evaluates after the execution in which a
    wanted step lies. One that a stop has cut short is made at the beginning of the resumed run.

    Args:
      data: what `evaluate` takes; None: never.
      every: every so many steps, 0 for none.
      steps: after these too.
      at_start: before the first too.
      say: prints a line.
      tell: called as tell(logs, step, seconds) after each evaluation.

    Attributes:
      seen: [(step, logs)].
    """

    def __init__(self, data, every=0, steps=(), at_start=False, say=print, tell=lambda *_: None):
        super().__init__()
        self._data, self._every, self._steps, self._at_start = data, every, set(steps), at_start
        self._say, self._tell = say, tell
        self.seen = []

    def on_train_begin(self, logs=None):
        self._done = self.model.step
        if self._at_start and self._data is not None and not self._done:  # a resumed run has done it
            self._evaluate()

    def get_state(self):
        return {"done": self._done}

    def set_state(self, state):
        self._done = state["done"]

    def on_epoch_begin(self, epoch, logs=None):
        self._evaluate_if_due()

    def on_train_batch_end(self, batch, logs=None):
        self._evaluate_if_due()

    def _evaluate_if_due(self):
        passed = range(self._done + 1, self.model.step + 1)
        if self._data is not None and any(s in self._steps or (self._every and s % self._every == 0) for s in passed):
            self._evaluate()
        self._done = self.model.step  # not before: a stop in the evaluation is to leave it to be made

    def _evaluate(self):
        began = time.monotonic()
        logs = self.model.evaluate(self._data, verbose=0, return_dict=True)
        step = self.model.step
        self.seen.append((step, logs))
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        self._tell(logs, step, time.monotonic() - began)
        self._say(f"step {step}  held out: {numbers}  [{self.model.examples_evaluated} examples]")


class Skipped(keras.callbacks.Callback):
    """Counts the steps that a loss scale skips because their gradient is not finite, and ends `fit` when it does not recover.

    Args:
      limit: raise wishes.NonFinite at so many in a row.

    Attributes:
      total: so many were skipped.
    """

    def __init__(self, limit):
        super().__init__()
        self._limit, self.total, self._in_a_row = limit, 0, 0

    def get_state(self):
        return {"total": self.total, "in_a_row": self._in_a_row}

    def set_state(self, state):
        self.total, self._in_a_row = state["total"], state["in_a_row"]

    def on_train_batch_end(self, batch, logs=None):
        for record in self.model.records():
            skipped = not math.isfinite(record["gradient_norm"])  # without a loss scale the step has raised
            self.total, self._in_a_row = self.total + skipped, self._in_a_row + 1 if skipped else 0
            if self._in_a_row >= self._limit:
                raise wishes.NonFinite(
                    f"step {self.model.step}: the loss scale has skipped {self._in_a_row} steps in a row, for their gradients "
                    "are not finite at any scale"
                )


class Staleness(keras.callbacks.Callback):
    """Of asynchronous updates: how many others were made between reading the weights and applying the gradient; told by epoch.

    Args:
      say: prints a line.

    Attributes:
      mean, largest: of all updates so far.
    """

    def __init__(self, say=print):
        super().__init__()
        self._say, self._sum, self._count, self.largest = say, 0, 0, 0

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._count)

    def get_state(self):
        return {"sum": self._sum, "count": self._count, "largest": self.largest}

    def set_state(self, state):
        self._sum, self._count, self.largest = state["sum"], state["count"], state["largest"]

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = []

    def on_train_batch_end(self, batch, logs=None):
        found = [int(record["staleness"]) for record in self.model.records()]
        self._epoch += found
        self._sum, self._count, self.largest = self._sum + sum(found), self._count + len(found), max(self.largest, *found)

    def on_epoch_end(self, epoch, logs=None):
        if self._epoch:
            mean = sum(self._epoch) / len(self._epoch)
            self._say(f"epoch {epoch + 1}  staleness: mean {mean:.2f}, largest {max(self._epoch)} updates")


class Profile(keras.callbacks.Callback):
    """Leaves a trace of some training steps for TensorBoard's profiler, in plugins/profile/ of a directory.

    Every worker traces itself, into a directory of its own. With several steps an execution the trace begins with the
    execution in which the first step lies, and ends with that of the last.

    Args:
      steps: (first, last), both traced, counted from 1 over the whole run.
      directory: where to.
      say: prints a line.
    """

    def __init__(self, steps, directory, say=print):
        super().__init__()
        (self._first, self._last), self._directory, self._say = steps, directory, say
        self._began, self._tracing = None, False

    def on_train_batch_begin(self, batch, logs=None):
        if self._began is None:
            coming = self.model.step + 1
            if self._first < coming + self.model.steps_per_execution and coming <= self._last:
                self._began, self._tracing = coming, True
                tf.profiler.experimental.start(self._directory)

    def on_train_batch_end(self, batch, logs=None):
        if self._tracing and self.model.step >= self._last:
            self._stop()

    def on_train_end(self, logs=None):
        if self._tracing:
            self._stop()
        if self._began is None:
            self._say(f"no trace: the run had no step from {self._first} to {self._last}")

    def _stop(self):
        tf.profiler.experimental.stop()
        self._tracing = False
        where = os.path.join(self._directory, "plugins", "profile")
        self._say(f"traced  steps {self._began} to {self.model.step}: {where}")
