"""What a run tells while it trains: a line a step in metrics.jsonl, points in TensorBoard, progress in the terminal.

One callback, `Monitor`, reads what the trainer recorded of every step and what evaluations found, and hands it to sinks;
a sink does something with `step`, `evaluation` and `epoch` records (dicts of numbers), each of which comes once.
"""

import contextlib
import csv
import io
import json
import math
import resource
import time

import keras
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import pb as text_summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FLUSH_EVERY_S = 5


class Monitor(keras.callbacks.Callback):
    """Hands every step, evaluation and epoch to the sinks. Every worker has one; what it reads is the same on each, but times.

    Args:
      sinks: objects with any of the methods `step`, `evaluation`, `epoch` (each given a dict) and `close`.
      global_batch_size: B.
    """

    def __init__(self, sinks, global_batch_size):
        super().__init__()
        self._sinks, self._batch = sinks, global_batch_size

    def on_train_begin(self, logs=None):
        self._mark = self._evaluated_at = self._before = None
        self._epoch = self._began = self._first = self._stepping = 0

    def get_state(self):
        """For a checkpoint: what of the running epoch is not in the files."""
        seconds = time.monotonic() - self._began
        epoch = {"epoch": self._epoch, "first": self._first, "seconds": seconds, "stepping": self._stepping}
        return {"evaluated_at": self._evaluated_at, **epoch}

    def set_state(self, state):
        """Goes on from another process's `get_state`, in the same epoch."""
        self._evaluated_at, self._before = state["evaluated_at"], state

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._began = epoch + 1, time.monotonic()
        self._first, self._mark, self._stepping = self.model.step, None, 0.0
        if self._before and self._before["epoch"] == self._epoch:
            self._first, self._stepping = self._before["first"], self._before["stepping"]
            self._began -= self._before["seconds"]

    def on_train_batch_begin(self, batch, logs=None):
        self._mark = self._mark or time.monotonic()  # where the one before ended: what lies between belongs to the step

    def on_train_batch_end(self, batch, logs=None):
        records, now = self.model.records(), time.monotonic()
        self._stepping += now - self._mark
        seconds, self._mark = (now - self._mark) / len(records), now
        for index, values in enumerate(records):
            step = self.model.step - len(records) + 1 + index
            self._tell(
                "step",
                {"step": step, "epoch": self._epoch, **values, "step_time_s": seconds, "images_per_sec": self._batch / seconds},
            )

    def evaluated(self, logs: dict, step: int, seconds: float):
        """To be called with what an evaluation in the middle of training found; its time belongs to no step."""
        self._tell("evaluation", {"step": step, **logs, "examples": self.model.examples_evaluated, "seconds": seconds})
        self._mark, self._evaluated_at = None, step

    def on_epoch_end(self, epoch, logs=None):
        steps, seconds = self.model.step - self._first, time.monotonic() - self._began
        trained = {name: value for name, value in logs.items() if not name.startswith("val_")}
        held_out = {name.removeprefix("val_"): value for name, value in logs.items() if name.startswith("val_")}
        if held_out and self._evaluated_at != self.model.step:  # with --eval_every_steps it may have been told already
            self._tell("evaluation", {"step": self.model.step, **held_out, "examples": self.model.examples_evaluated})
            self._evaluated_at = self.model.step
        # An epoch's seconds are all of it, evaluations too; its speed is that of its steps.
        speed = {"steps": steps, "seconds": seconds, "images_per_sec": steps * self._batch / self._stepping}
        held_out = {f"val_{name}": value for name, value in held_out.items()}
        self._tell("epoch", {"epoch": epoch + 1, "step": self.model.step, **trained, **held_out, **speed})

    def _tell(self, kind, record):
        for sink in self._sinks:
            if hasattr(sink, kind):
                getattr(sink, kind)(record)

    def flush(self):
        """Writes out what sinks hold back."""
        for sink in self._sinks:
            if hasattr(sink, "flush"):
                sink.flush()

    def close(self):
        """Writes out what is left; to be called when training has ended, however it did."""
        with contextlib.ExitStack() as stack:  # each of them, also if one cannot
            for sink in self._sinks:
                if hasattr(sink, "close"):
                    stack.callback(sink.close)


class MetricsFiles:
    """metrics.jsonl, {"event": "step" | "evaluation" | "epoch", ...} a line, and metrics.csv, a row an epoch.

    Args:
      directory: of the run.
      every: so many steps, a step's line; the first step has one in any case, which shows that a run has begun.
      lines: go on with files of so many lines, {name: number}; none: begin anew.

    Attributes:
      lines: how many each has.
    """

    def __init__(self, directory, every=1, lines=None):
        self._every, self._flushed, mode = every, 0, "a" if lines else "w"
        self.lines = dict.fromkeys(("metrics.jsonl", "metrics.csv"), 0) | (lines or {})
        self._columns = None
        if self.lines["metrics.csv"]:
            self._columns = next(csv.reader(tf.io.gfile.GFile(f"{directory}/metrics.csv")), None)
        self._lines = tf.io.gfile.GFile(f"{directory}/metrics.jsonl", mode)
        self._table = tf.io.gfile.GFile(f"{directory}/metrics.csv", mode)

    def step(self, record):
        if _due(record, self._every):
            self._write("step", record)

    def evaluation(self, record):
        self._write("evaluation", record)

    def epoch(self, record):
        self._write("epoch", record)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns or list(record), restval="", extrasaction="ignore", lineterminator="\n")
        if self._columns is None:
            self._columns = list(record)
            writer.writeheader()
        writer.writerow(record)
        self._table.write(text.getvalue())
        self.lines["metrics.csv"] += text.getvalue().count("\n")
        self.flush()

    def flush(self):
        self._table.flush()
        self._lines.flush()

    def _write(self, event, record):
        self.lines["metrics.jsonl"] += 1
        self._lines.write(json.dumps({"event": event, **plain(record)}) + "\n")
        if time.monotonic() - self._flushed > _FLUSH_EVERY_S:
            self._lines.flush()
            self._flushed = time.monotonic()

    def close(self):
        self._lines.close()
        self._table.close()


class TrainEvents:
    """TensorBoard's events of the run, by the chief: runs `train` and `validation` on the same charts.

    By step: loss, top_1, top_5, learning_rate, gradient_norm, images_per_sec, step_time_s, input_wait_s; by epoch: epoch_loss
    and so on. The configuration as text.

    Args:
      directory: of the run.
      every: so many steps, a point; the first step has one in any case.
      text: {title: Markdown}.
    """

    def __init__(self, directory, every=1, text=None):
        self._train, self._validation = EventFileWriter(f"{directory}/train"), EventFileWriter(f"{directory}/validation")
        self._every = every
        for title, markdown in (text or {}).items():
            self._train.add_event(Event(wall_time=time.time(), step=0, summary=_bytes_of(text_summary(title, markdown))))

    def step(self, record):
        if _due(record, self._every):
            _points(self._train, record["step"], {k: v for k, v in record.items() if k not in ("step", "epoch")})

    def evaluation(self, record):
        _evaluated(self._validation, record)

    def epoch(self, record):
        metrics = {k: v for k, v in record.items() if k not in ("epoch", "step", "steps", "seconds", "images_per_sec")}
        trained = {f"epoch_{name}": value for name, value in metrics.items() if not name.startswith("val_")}
        held_out = {f"epoch_{n.removeprefix('val_')}": value for n, value in metrics.items() if n.startswith("val_")}
        _points(self._train, record["epoch"], trained | {"epoch_images_per_sec": record["images_per_sec"]})
        _points(self._validation, record["epoch"], held_out)
        self.flush()

    def flush(self):
        self._train.flush()
        self._validation.flush()

    def close(self):
        self._train.close()
        self._validation.close()


class EvaluatorEvents:
    """TensorBoard's events of the evaluator: loss, top_1, top_5, on the charts of `train` and `validation`."""

    def __init__(self, directory):
        self._writer = EventFileWriter(directory, flush_secs=_FLUSH_EVERY_S)

    def evaluation(self, record):
        _evaluated(self._writer, record)

    def close(self):
        self._writer.close()


class WorkerEvents:
    """TensorBoard's events of one worker: worker/step_time_s, worker/input_wait_s, worker/memory_mb.

    Args:
      directory: the worker's own.
      every: so many steps, a point; the first step has one in any case.
    """

    def __init__(self, directory, every=1):
        self._writer, self._every = EventFileWriter(directory, flush_secs=_FLUSH_EVERY_S), every
        self._gpus = tf.config.list_logical_devices("GPU")

    def step(self, record):
        if _due(record, self._every):
            points = {f"worker/{name}": record[name] for name in ("step_time_s", "input_wait_s")}
            points["worker/memory_mb"] = resident_bytes() / 2**20
            if self._gpus:
                peak = sum(tf.config.experimental.get_memory_info(d.name.partition("device:")[2])["peak"] for d in self._gpus)
                points["worker/gpu_memory_peak_mb"] = peak / 2**20
            _points(self._writer, record["step"], points)

    def flush(self):
        self._writer.flush()

    def close(self):
        self._writer.close()


def plain(record: dict) -> dict:
    """The record with null for what is no finite number, which JSON does not know."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the largest it has been
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _due(record, every):
    return record["step"] == 1 or record["step"] % every == 0


def _evaluated(writer, record):
    _points(writer, record["step"], {k: v for k, v in record.items() if k not in ("step", "examples", "seconds")})


def _points(writer, step, values):
    if values:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _bytes_of(summary):
    return Summary.FromString(summary.SerializeToString())  # the plugin may use TensorFlow's class of the same message
