"""The run directory: which run is in it, and files that are written whole or not at all.

    config.json     everything resolved, and what it ran with     metrics.jsonl   a line a step, evaluation and epoch
    summary.json    there exactly when the run has finished       metrics.csv     a row an epoch
    model.keras     the trained model                             train/, validation/   TensorBoard's events
    fingerprints.jsonl   what single steps did: see cluster/fingerprint.py
    worker-0/, ...  each worker's own: log.txt and events

The chief writes what is global, each worker its own subdirectory.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

from app import manifest
from app.config import Config, UsageError
from cluster import quiet

# What a start leaves that ends before it has written config.json.
_BEFORE_CONFIG = r"worker-\d+|config\.json\.tmp|running|evaluator"


def finished(config: Config) -> str | None:
    """What to say if this very run has finished in its directory already; None if it is to be run there.

    Needs no TensorFlow for a directory on this machine.

    Raises:
      UsageError: if the directory holds something else, or another run; or if it cannot be written.
    """
    if "://" in config.run_dir:
        _import_tensorflow(config.verbose)
    directory, files = config.run_dir, _files(config.run_dir)
    recorded = _read_json(directory, "config.json")
    if recorded is None and all(re.fullmatch(_BEFORE_CONFIG, name) for name in files):
        _check_writable(directory)
        return None
    if recorded is None or not recorded.keys() & config.result_fields().keys():
        raise UsageError(
            f"--run_dir={directory} holds something else ({', '.join(sorted(files)[:3])}), and no run: name a new directory"
        )
    other = [
        f"{name} is {there!r} there and {getattr(config, name)!r} here" for name, there in config.differs(recorded).items()
    ]
    if (digest := _data_digest(config)) and digest != recorded.get("data_manifest"):
        other.append(f"the data in {config.prepared_path()} is another")
    if own := [name for name, digest in own_sources(config).items() if digest != recorded.get("own_sources", {}).get(name)]:
        other.append(f"{' and '.join(own)} has been edited since")
    if (there := recorded.get("init_from_sha256")) and (digest := init_sha256(config)) and digest != there:
        other.append(f"{config.init_from} has been changed since")
    if other:
        raise UsageError(f"--run_dir={directory} holds another run: {'; '.join(other)}. Name a new directory, or none")
    summary = _read_json(directory, "summary.json") or {}
    if {"steps", "sha256"} <= summary.keys():
        return (
            f"{directory} holds this run, finished: {summary['steps']} steps, sha256 {summary['sha256']}. "
            "Delete the directory, or name another --run_dir, to train it again"
        )
    _read(directory, "metrics.jsonl")  # which is going to be added to
    _check_writable(directory)
    return None  # it goes on from its last checkpoint, or begins anew


def checkpointed(directory: str) -> list[str] | None:
    """The names of its checkpoints; None for a directory that is not on this machine."""
    return None if "://" in directory else sorted(_files(os.path.join(directory, "checkpoints")))


def own_modules(config: Config) -> dict[str, str]:
    """{module: its file} of the user's own that --dataset and --model name as package.module:function."""
    found = {}
    for name in (config.dataset, config.model):
        module, colon, function = name.partition(":")
        if colon and function.isidentifier() and module not in ("keras", "synthetic"):
            path = os.path.join(*module.split("."))
            files = (os.path.join(folder or ".", path + end) for folder in (".", *sys.path) for end in (".py", "/__init__.py"))
            if file := next(filter(os.path.isfile, files), None):
                found[module] = file
    return found


def own_sources(config: Config) -> dict[str, str]:
    """{module: sha256 of its file} of `own_modules`."""
    return {m: hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for m, file in own_modules(config).items()}


def init_sha256(config: Config) -> str | None:
    """Of the file of --init_from; None if there is none here that can be read."""
    try:
        with open(config.init_from, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


@contextlib.contextmanager
def claimed(directory: str):
    """Within the block, this process alone trains in the directory; a file there says so, if it is on this machine.

    Raises:
      UsageError: if another process does.
    """
    if "://" in directory:
        yield
        return
    path, host = pathlib.Path(directory, "running"), socket.gethostname()
    try:
        there, _, pid = path.read_text().rpartition(" ")
        if there == host and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
            path.unlink()  # it was ended before it could remove its file
    except (OSError, ValueError):
        pass
    try:
        with open(path, "x") as file:
            file.write(f"{host} {os.getpid()}")
    except FileExistsError:
        raise UsageError(
            f"--run_dir={directory} is being trained in, by the host and process in {path}: wait, name another directory, or "
            "remove that file if it is not true"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def write(path: str, text: str):
    """Writes a file whole: under a temporary name that is then renamed."""
    import tensorflow as tf

    with tf.io.gfile.GFile(path + ".tmp", "w") as file:
        file.write(text)
    tf.io.gfile.rename(path + ".tmp", path, overwrite=True)


def write_config(directory: str, record: dict, first_step: int):
    """Writes config.json: the record, and what each start of the run ran with."""
    there = (_read_json(directory, "config.json") or {}) if first_step else {}
    before = there.get("starts", [])
    if "init_from_sha256" in there:
        record = {"init_from_sha256": there["init_from_sha256"], **record}
    names = ("replicas", "cluster", "devices", "machine", "source_revision", "versions")
    start = {"after_step": first_step, **{name: record[name] for name in names}}
    write(os.path.join(directory, "config.json"), json.dumps({**record, "starts": [*before, start]}, indent=2) + "\n")


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


def _import_tensorflow(verbose):
    """Without what it prints at that, unless that is wanted."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if verbose else "3")
    with quiet.hushed(not verbose):
        import tensorflow  # noqa: F401


def _data_digest(config):
    """Of the prepared data, if it is there."""
    try:
        return manifest.load(config.prepared_path()).digest()
    except manifest.ManifestError:
        return None  # to be prepared, or refused, when it is opened


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


def _check_writable(directory):
    """Raises UsageError if this process may not write there; if there is no such directory, in the nearest above it."""
    if "://" in directory:
        return
    path = os.path.abspath(directory)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UsageError(f"--run_dir={directory} cannot be written: no permission in {path}")


def _read(directory, name):
    path = os.path.join(directory, name)
    if "://" not in directory:
        try:
            return pathlib.Path(path).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"--run_dir={directory}: {name} cannot be read ({why}): name a new directory") from None
    import tensorflow as tf

    return tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else None


def _read_json(directory, name):
    try:
        record = json.loads(_read(directory, name) or "")
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
