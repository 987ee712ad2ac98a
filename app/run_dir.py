"""The run directory: which run is in it, and files that are written whole or not at all.

    config.json     everything resolved, and what it ran with     metrics.jsonl   a line a step, evaluation and epoch
    summary.json    there exactly when the run has finished       metrics.csv     a row an epoch
    model.keras     the trained model                             train/, validation/   TensorBoard's events
    worker-0/, ...  each worker's own: log.txt and events

The chief writes what is global, each worker its own subdirectory.
"""

import json
import os
import pathlib
import re
import subprocess

from app.config import Config, UsageError

_OURS = {"config.json", "metrics.jsonl", "metrics.csv", "model.keras", "summary.json", "train", "validation"}


def finished(config: Config) -> str | None:
    """What to say if this very run has finished in its directory already; None if it is to be run there.

    Needs no TensorFlow for a directory on this machine.

    Raises:
      UsageError: if the directory holds something else, another run, or this one unfinished.
    """
    directory, files = config.run_dir, _files(config.run_dir)
    if not files:
        return None
    recorded = _read_json(directory, "config.json")
    if recorded is None and all(name in _OURS or re.fullmatch(r"worker-\d+|\S+\.tmp", name) for name in files):
        return None  # a start that came to nothing
    if recorded is None:
        raise UsageError(
            f"--run_dir={directory} holds something else ({', '.join(sorted(files)[:3])}), and no run: name a new directory"
        )
    other = [
        f"{name} is {recorded.get(name)!r} there and {value!r} here"
        for name, value in config.result_fields().items()
        if recorded.get(name) != value
    ]
    if other:
        raise UsageError(f"--run_dir={directory} holds another run: {'; '.join(other)}. Name a new directory, or none")
    if summary := _read_json(directory, "summary.json"):
        return (
            f"{directory} holds this run, finished: {summary['steps']} steps, sha256 {summary['sha256']}. "
            "Delete the directory, or name another --run_dir, to train it again"
        )
    if "metrics.jsonl" not in files or not _read(directory, "metrics.jsonl"):
        return None  # ended before its first step
    raise UsageError(
        f"--run_dir={directory} holds this run, unfinished (still running, or ended early). It cannot be resumed yet: delete "
        "the directory, or name another"
    )


def write(path: str, text: str):
    """Writes a file whole: under a temporary name that is then renamed."""
    import tensorflow as tf

    with tf.io.gfile.GFile(path + ".tmp", "w") as file:
        file.write(text)
    tf.io.gfile.rename(path + ".tmp", path, overwrite=True)


def make(directory: str, flag: str = "run_dir"):
    """Makes the directory, with its parents. Raises UsageError."""
    import tensorflow as tf

    try:
        tf.io.gfile.makedirs(directory)
    except tf.errors.OpError as error:
        raise UsageError(f"--{flag}={directory} cannot be made: {error.message}") from None


def source_revision() -> str:
    """The commit of the program's own files, '+' if they were changed since; 'unknown' without git."""
    root = pathlib.Path(__file__).parent.parent

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _files(directory):
    if "://" not in directory:
        try:
            return set(os.listdir(directory))
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise UsageError(f"--run_dir={directory} cannot be used: {error.strerror}") from None
    import tensorflow as tf

    return {name.rstrip("/") for name in tf.io.gfile.listdir(directory)} if tf.io.gfile.isdir(directory) else set()


def _read(directory, name):
    path = os.path.join(directory, name)
    if "://" not in directory:
        try:
            return pathlib.Path(path).read_text()
        except OSError:
            return None
    import tensorflow as tf

    return tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else None


def _read_json(directory, name):
    try:
        record = json.loads(_read(directory, name) or "")
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
