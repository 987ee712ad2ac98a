"""A run's checkpoints: when they are written, which are kept, and which one a start goes on from.

    checkpoints/step-00000440.npz    the state after step 440; see cluster/checkpoint.py

The chief alone writes them, and reads them at a start: it sends the state to the others. A file appears whole, under its name,
or not at all; what cannot be written is told, and leaves the one before as it was.
"""

import contextlib
import os
import re
import threading
import time

import keras
import tensorflow as tf

from app.config import Config
from cluster import agreement, checkpoint, fingerprint, lifeline, wishes

_NAME = re.compile(r"step-(\d+)\.npz")


class Checkpoints(keras.callbacks.Callback):
    """Saves a run's state, puts back what callbacks remember, and ends `fit` when a worker wishes to stop.

    Every worker has one, the last of its callbacks: what they do at a step belongs to the checkpoint of that step.

    Args:
      config: of the run.
      me: this process in its cluster, or None.
      others: the callbacks before it, whose states are kept.
      steps_per_epoch, total_steps: of the run.
      flush: writes out what is to be on disk before the checkpoint; on every worker.
      lines: tells how many lines each text file of the run has, {name: number}.
      resume: the `checkpoint.Checkpoint` that the run goes on from.
      say: prints a line.
    """

    def __init__(self, config: Config, me, others, steps_per_epoch, total_steps, flush, lines, resume=None, say=print):
        super().__init__()
        self._config, self._me, self._others = config, me, others
        self._steps_per_epoch, self._total = steps_per_epoch, total_steps
        self._flush, self._lines, self._resume, self._say = flush, lines, resume, say
        self._chief = me is None or me.is_chief
        self._epoch, self._best = (resume.epoch, resume.facts["best"]) if resume else (0, None)
        self._writer = None
        self._ended = False

    def on_train_begin(self, logs=None):
        state = {"step to go on from": self.model.step, "state before the first step": fingerprint.run_sha256(self.model, {})}
        agreement.agree(self._me, state)
        if self._resume:
            checkpoint.put_back_callbacks(self._resume, self._others)
        self._saved, self._saved_at = self.model.step, time.monotonic()
        lifeline.remedy = f"the same command {self.last()}"

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.model.wished[wishes.STOP]:
            raise wishes.Stopped
        every, minutes = self._config.checkpoint_every_steps, self._config.checkpoint_every_min
        step, in_epoch = self.model.step, self._in_epoch
        due = every and step // every > self._saved // every
        if (due or self.model.wished[wishes.SAVE]) and in_epoch < self._steps_per_epoch and step < self._total:
            self._save(in_epoch)
        if self._chief and minutes and time.monotonic() - self._saved_at > 60 * minutes:
            wishes.mine[wishes.SAVE] = 1

    def on_epoch_end(self, epoch, logs=None):
        self._epoch = epoch + 1
        top_1 = logs.get("val_top_1")
        if top_1 is not None and (self._best is None or top_1 > self._best[0]):
            self._best = [top_1, self.model.step]
        self._save(0)

    def on_train_end(self, logs=None):
        self._ended = True
        self._written()

    @property
    def _in_epoch(self):
        return self.model.step - self._epoch * self._steps_per_epoch

    def stop(self) -> str:
        """Saves where training was stopped. Returns what to say."""
        if not self._ended:  # after it the weights may be averages; the last epoch's checkpoint is the state
            self._save(self._in_epoch)
        return f"stopped at step {self.model.step}: the same command {self.last()}"

    def last(self) -> str:
        """What the same command does after an end: 'goes on from ...'."""
        self._written()
        directory = os.path.join(self._config.run_dir, "checkpoints")
        found = listed(directory) if self._chief else []
        return f"goes on from {os.path.join(directory, found[0][1])}" if found else "begins anew: there is no checkpoint yet"

    def _save(self, in_epoch):
        wishes.mine[wishes.SAVE] = 0
        if bad := checkpoint.not_finite(self.model):  # a ReLU may hide it from the loss; and it is no state to go on from
            raise wishes.NonFinite(f"step {self.model.step}: {bad} is not finite")
        self._saved, self._saved_at = self.model.step, time.monotonic()
        self._flush()
        if not self._chief or not self._config.keep_checkpoints:
            return
        facts = {"run": self._config.result_fields(), "lines": self._lines(), "best": self._best}
        state = checkpoint.take(self.model, self._epoch, in_epoch, self._others, facts)
        self._written()
        self._writer = threading.Thread(target=self._write, args=(state,), name="checkpoint")
        self._writer.start()

    def _written(self):
        """Waits for the file that is being written."""
        if self._writer:
            self._writer.join()
            self._writer = None

    def _write(self, state):
        directory = os.path.join(self._config.run_dir, "checkpoints")
        path = os.path.join(directory, f"step-{state.step:08}.npz")
        temporary = os.path.join(directory, f".{os.path.basename(path)}.tmp")
        try:
            tf.io.gfile.makedirs(directory)
            with tf.io.gfile.GFile(temporary, "wb") as file:
                file.write(state.to_bytes())
            tf.io.gfile.rename(temporary, path, overwrite=True)
            lifeline.remedy = f"the same command goes on from {path}"
            self._remove_old(directory)
        except (OSError, MemoryError, tf.errors.OpError) as error:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(temporary)  # half of it takes the room that is missing
            reason = next(iter(getattr(error, "message", str(error)).splitlines()), type(error).__name__)
            self._say(f"warning: the checkpoint of step {state.step} could not be written: {reason}; those before are kept")

    def _remove_old(self, directory):
        kept = self._best[1:] if self._best else []
        for step, name in listed(directory)[self._config.keep_checkpoints :]:
            if step not in kept:
                tf.io.gfile.remove(os.path.join(directory, name))


def listed(directory: str) -> list[tuple[int, str]]:
    """(step, name) of the checkpoints in a directory, the latest first; nothing is said of what is in the files."""
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    found = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(found, reverse=True)


def latest(config: Config, say) -> tuple[bytes, checkpoint.Checkpoint] | tuple[None, None]:
    """The last whole checkpoint of this very run: its file's content, and it; one that is not is set aside, by a line."""
    directory = os.path.join(config.run_dir, "checkpoints")
    for _, name in listed(directory):
        path = os.path.join(directory, name)
        try:
            content = tf.io.gfile.GFile(path, "rb").read()
            found = checkpoint.from_bytes(content)
            if other := list(config.differs(found.facts.get("run") or {})):
                raise checkpoint.Damaged(f"it is of another run ({', '.join(other[:3])})")
            return content, found
        except (checkpoint.Damaged, OSError, tf.errors.OpError) as error:
            reason = getattr(error, "message", str(error)).splitlines()[0]
            say(f"warning: {path} is passed over, and renamed to {name}.unusable: {reason}")
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.rename(path, f"{path}.unusable", overwrite=True)  # it would be taken for the latest
    return None, None
