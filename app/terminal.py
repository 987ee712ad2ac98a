"""What the chief prints: phases as they begin, a bar on a terminal and plain lines elsewhere, a table of epochs."""

import contextlib
import math
import os
import shutil
import sys
import time
import traceback

BAR = "LOCKSTEP_BAR"  # set to the terminal's width by a launcher that shows a line beginning with CR as a bar
_PLAIN_LINE_EVERY_S = 30


class Terminal:
    """Prints lines, and a bar below them that the next line replaces.

    Args:
      silent: print nothing (workers other than the chief).
      quiet: print only `result`s.
    """

    def __init__(self, silent=False, quiet=False):
        self._silent, self._quiet = silent, quiet
        self._relayed = os.environ.get(BAR)
        self.has_bar = not (silent or quiet) and bool(self._relayed or sys.stdout.isatty())
        self._shown = False

    def say(self, text=""):
        """A line of the narration."""
        if not (self._silent or self._quiet):
            self._print(text)

    def result(self, text):
        """A line of the summary."""
        if not self._silent:
            self._print(text)

    @property
    def width(self) -> int:
        """Of the bar, in columns."""
        return max(0, int(self._relayed or shutil.get_terminal_size().columns) - 1)

    def bar(self, text):
        """Replaces the bar; only where there `has_bar`."""
        text = text[: self.width]
        sys.stdout.write(f"\r{text}\n" if self._relayed else f"\r\x1b[K{text}")
        sys.stdout.flush()
        self._shown = not self._relayed

    def _print(self, text):
        if self._shown:
            sys.stdout.write("\r\x1b[K")
            self._shown = False
        print(text, flush=True)


class Progress:
    """A sink of `monitoring.Monitor`: progress within an epoch, and the table of epochs.

    Args:
      terminal: where to.
      steps_per_epoch, epochs: of the run.
      total_steps: of the run.
      global_batch_size: B.
    """

    def __init__(self, terminal, steps_per_epoch, epochs, total_steps, global_batch_size):
        self._terminal, self._steps_per_epoch, self._epochs = terminal, steps_per_epoch, epochs
        self._total, self._batch = total_steps, global_batch_size
        self._began = self._told = time.monotonic()
        self._first, self._warned = True, False
        self._seconds = None  # of a step, a moving mean without the first, which traces
        self._header, self._number_width = False, max(7, 2 * len(str(epochs)) + 1)

    def step(self, record):
        now, step = time.monotonic(), record["step"]
        if not (math.isfinite(record["loss"]) or self._warned):
            self._warned = True
            self._terminal.result(f"warning: the loss of step {step} is {record['loss']}")
        if self._first:
            self._first = False
            self._terminal.say(f"first step after {now - self._began:.1f} s")
        else:
            self._seconds = (
                record["step_time_s"] if self._seconds is None else 0.9 * self._seconds + 0.1 * record["step_time_s"]
            )
        every = 0.2 if self._terminal.has_bar else _PLAIN_LINE_EVERY_S
        if now - self._told < every or self._seconds is None:
            return
        self._told = now
        in_epoch = step - (record["epoch"] - 1) * self._steps_per_epoch
        text = (
            f"epoch {record['epoch']}/{self._epochs}  step {in_epoch}/{self._steps_per_epoch}  loss {record['loss']:.4f}  "
            f"{self._batch / self._seconds:,.0f} images/s  {duration((self._total - step) * self._seconds)} left"
        )
        if self._terminal.has_bar:
            length = min(20, self._terminal.width - len(text) - len("[] "))
            done = round(length * in_epoch / self._steps_per_epoch)
            self._terminal.bar(f"[{'=' * done}{'.' * (length - done)}] {text}" if length > 3 else text)
        else:
            self._terminal.say(text)

    def epoch(self, record):
        metrics = [name for name in ("loss", "top_1", "top_5", "val_loss", "val_top_1", "val_top_5") if name in record]
        if not self._header:
            self._header = True
            titles = [name.replace("val_", "val ").replace("_", "-") for name in metrics]
            self._widths = [max(7, len(title)) for title in titles]
            cells = [f"{title:>{width}}" for title, width in zip(titles, self._widths, strict=True)]
            self._terminal.say("  ".join([f"{'epoch':>{self._number_width}}", *cells, "images/s", "   time"]))
        cells = [f"{record[name]:>{width}.4f}" for name, width in zip(metrics, self._widths, strict=True)]
        number = f"{record['epoch']}/{self._epochs}"
        speed = f"{record['images_per_sec']:>8,.0f}"
        self._terminal.say("  ".join([f"{number:>{self._number_width}}", *cells, speed, f"{duration(record['seconds']):>7}"]))


def duration(seconds: float) -> str:
    """As a person writes it: 8.2 s, 3 min 20 s, 2 h 05 min."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def workers(count: int) -> str:
    """1 worker, 2 workers."""
    return f"{count} {'worker' if count == 1 else 'workers'}"


def listed(names: list[str]) -> str:
    """1 worker; 1, 2 and 4 workers."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(name.split()[0] for name in names[:-1])} and {names[-1]}"


@contextlib.contextmanager
def logged(path):
    """Within the block, what this process prints goes to the file at `path` as well."""
    with _opened(path) as file:
        stdout, stderr = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Both(stdout, file), _Both(stderr, file)
        try:
            yield
        except BaseException:
            traceback.print_exc(file=file)
            raise
        finally:
            sys.stdout, sys.stderr = stdout, stderr


def _opened(path):
    if "://" not in path:
        return open(path, "a", buffering=1)
    import tensorflow as tf

    return tf.io.gfile.GFile(path, "w")


class _Both:
    """A stream that writes to two; the bar to the first alone."""

    def __init__(self, stream, file):
        self._stream, self._file = stream, file

    def write(self, text):
        if not text.startswith("\r"):
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name):
        return getattr(self._stream, name)
