"""Keras callbacks of a run: evaluation at chosen steps, and a line an epoch."""

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

    Attributes:
      seen: [(step, logs)].
    """

    def __init__(self, data, every=0, steps=(), at_start=False, say=print):
        super().__init__()
        self._data, self._every, self._steps, self._at_start, self._say = data, every, set(steps), at_start, say
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
        logs = self.model.evaluate(self._data, verbose=0, return_dict=True)
        self.seen.append((self._done, logs))
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        self._say(f"step {self._done}  held out: {numbers}  [{self.model.examples_evaluated} examples]", flush=True)


class EpochLines(keras.callbacks.Callback):
    """Prints a line an epoch: the metrics of training and evaluation, and the speed, evaluation included.

    Args:
      epochs: of the run.
      examples: that one epoch trains with, over all workers.
      say: prints a line.
    """

    def __init__(self, epochs, examples, say=print):
        super().__init__()
        self._epochs, self._examples, self._say = epochs, examples, say

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.monotonic() - self._started
        line = f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}"
        for title, prefix in (("train", ""), ("held out", "val_")):
            if prefix + "loss" in logs:
                line += f"  {title}: loss {logs[prefix + 'loss']:.4f} top-1 {logs[prefix + 'top_1']:.4f}"
        self._say(f"{line}  {self._examples / seconds:,.0f} images/s", flush=True)
