"""A resumed run's files go on without a seam: what came after the checkpoint is taken away before anything is added.

Text files by the number of lines that they had; TensorBoard's events by their step, since each worker has its own and the
checkpoint is the chief's. A file that needs no cut is left as it is.
"""

import contextlib
import os

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event

from cluster.checkpoint import Checkpoint


def cut(config, resume: Checkpoint | None, chief: bool, worker: int, workers: int):
    """Cuts the run's files to the checkpoint; every worker its own, the chief what is global and what nobody owns now.

    Args:
      config: of the run; resume: where it goes on; None: it begins anew, where an earlier start may have left something.
      worker, workers: this process's number, and how many there are.
    """
    step, epoch, evaluated_at = -1, -1, -1
    if resume:
        step, epoch = resume.step, resume.epoch
        found = next(state["evaluated_at"] for name, state in resume.facts["callbacks"] if name == "Monitor")
        evaluated_at = -1 if found is None else found
    own = [f"worker-{worker}"]
    if chief:
        for name, lines in resume.facts["lines"].items() if resume else ():
            cut_lines(os.path.join(config.run_dir, name), lines)
        names = tf.io.gfile.listdir(config.run_dir)
        own += [n for name in names if (n := name.rstrip("/")).startswith("worker-") and int(n[7:]) >= workers]
        cut_events(os.path.join(config.run_dir, "train"), step, epoch)
        cut_events(os.path.join(config.run_dir, "validation"), evaluated_at, epoch)
    for name in own:
        cut_events(os.path.join(config.run_dir, name), step, epoch)


def cut_lines(path: str, lines: int):
    """Leaves the first `lines` lines of a text file, if there is one."""
    if not tf.io.gfile.exists(path):
        return
    text = tf.io.gfile.GFile(path, "rb").read()  # a crash may have left what is no text
    kept = b"".join(line + b"\n" for line in text.split(b"\n", lines)[:lines])
    if kept != text:
        with _instead_of(path) as temporary, tf.io.gfile.GFile(temporary, "wb") as file:
            file.write(kept)


def cut_events(directory: str, step: int, epoch: int):
    """Leaves the points up to this step, and of tags that begin with epoch_, up to this epoch."""
    for path in tf.io.gfile.glob(os.path.join(directory, "events.out.tfevents.*")):
        found, whole = _records(path)
        events = [Event.FromString(record) for record in found]
        kept = [
            record
            for record, event in zip(found, events, strict=True)
            if event.step <= (epoch if any(v.tag.startswith("epoch_") for v in event.summary.value) else step)
        ]
        if len(kept) < len(found) or not whole:
            with _instead_of(path) as temporary, tf.io.TFRecordWriter(temporary) as writer:
                for record in kept:
                    writer.write(record)


def _records(path):
    """The whole records of a file, and whether there is nothing else: a process that was killed may leave half of one."""
    found = []
    try:
        for record in tf.data.TFRecordDataset(path):
            found.append(record.numpy())
    except tf.errors.DataLossError:
        return found, False
    return found, True


@contextlib.contextmanager
def _instead_of(path):
    """A name to write to in the block, under which no file is taken for one of the run's; it then replaces the file."""
    temporary = os.path.join(os.path.dirname(path), ".cut.tmp")
    yield temporary
    tf.io.gfile.rename(temporary, path, overwrite=True)
