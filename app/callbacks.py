"""Keras callbacks of a run: evaluation at chosen steps."""

import time

import keras


class EvaluateAt(keras.callbacks.Callback):
    """Evaluates in the middle of training; every worker has to have it, since an evaluation is all workers' work.

    It leaves the epoch's own metrics alone. With several steps an execution it evaluates after the execution in which a
    wanted step lies.

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
        if self._at_start and self._data is not None:
            self._evaluate()

    def on_train_batch_end(self, batch, logs=None):
        passed = range(self._done + 1, self.model.step + 1)
        self._done = self.model.step
        if self._data is not None and any(s in self._steps or (self._every and s % self._every == 0) for s in passed):
            self._evaluate()

    def _evaluate(self):
        began = time.monotonic()
        logs = self.model.evaluate(self._data, verbose=0, return_dict=True)
        self.seen.append((self._done, logs))
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        self._tell(logs, self._done, time.monotonic() - began)
        self._say(f"step {self._done}  held out: {numbers}  [{self.model.examples_evaluated} examples]")
