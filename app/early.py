"""What would stop a command is said before TensorFlow is imported, which takes seconds: data, files, a port.

Looked at again where it is used, for this looks at no user's function and no path of a remote file system.
"""

import errno
import os
import socket
import zipfile

from app import manifest, sources
from app.config import Config, UsageError
from app.sources import imagenet
from models import imported

BY_ITSELF = 100_000  # training prepares sets of at most so many examples without being asked
UNUSABLE = "{} cannot be used; remove the folder, and it is prepared anew ({})"
_MEMBERS = {"config.json", "model.weights.h5"}  # of a .keras file


def data_problem(config: Config, by_itself: bool = True) -> str | None:
    """Why the data set cannot be used, in one line, as far as that can be said so soon; None if nothing is wrong.

    Args:
      by_itself: a large set has to be prepared before, as for a training.
    """
    place = config.prepared_path()
    if "://" in config.data_dir + place:
        return None
    try:
        if config.dataset == "imagenet":
            imagenet.raw_files(config.data_dir)
        elif os.path.exists(place):
            manifest.whole(place)
        elif config.dataset == "digits":
            pass  # comes with scikit-learn, whose import takes as long as one would save
        elif config.dataset.partition(":")[0] in sources.NAMES:
            source = sources.open_source(config.dataset, config.data_dir)
            return too_many(config, len(source.train)) if by_itself else None
        else:
            return imported.absent(config.dataset)
    except manifest.ManifestError as error:
        return UNUSABLE.format(place, error)
    except sources.SourceError as error:
        return str(error)
    return None


def too_many(config: Config, examples: int) -> str | None:
    """Why a training does not prepare so many examples by itself, in one line; None if it does."""
    if examples <= BY_ITSELF:
        return None
    return (
        f"{config.dataset} has {examples:,} training examples, and is not prepared in {config.prepared_dir}: run "
        f"./run.sh prepare with the same flags first (training prepares by itself what has {BY_ITSELF:,} or fewer)"
    )


def network_problem(config: Config) -> str | None:
    """Why the module of a user's network cannot be there, in one line; None if it may be."""
    first, colon, _ = config.model.partition(":")
    problem = imported.absent(config.model) if colon and first != "keras" else None
    return problem and f"--model={problem}"


def init_problem(config: Config) -> str | None:
    """Why the file of --init_from cannot be used; None if it may be, or a run that has begun may not need it any more."""
    path = config.init_from
    if path in ("", "imagenet") or os.path.exists(os.path.join(config.run_dir, "config.json")):
        return None
    return saved_problem("init_from", path)


def problems(config: Config, data: bool = True, network: bool = True, by_itself: bool = True, init: bool = False) -> list[str]:
    """What is wrong with the data set, the network and the file of first weights, of those that are needed."""
    found = (data and data_problem(config, by_itself), network and network_problem(config), init and init_problem(config))
    return [problem for problem in found if problem]


def check(config: Config, **which) -> None:
    """Raises UsageError with a line for each of `problems`."""
    if found := problems(config, **which):
        raise UsageError("\n".join(found))


def check_keras_file(path: str) -> None:
    """Raises UsageError if there is no saved model. (Whether it fits the data shows when it is opened.)"""
    if problem := saved_problem("keras_file", path):
        raise UsageError(problem)


def saved_problem(flag: str, path: str) -> str | None:
    """Why a file is none that Keras has saved, in one line, as far as its first bytes tell; None if it may be."""
    if "://" in path:
        return None
    try:
        if os.path.isdir(path):
            return f"--{flag}={path} is a folder; name the .keras file in it"
        with open(path, "rb") as file:
            head = file.read(4)
            good = head == b"\x89HDF" if path.endswith((".h5", ".hdf5")) else _is_archive(file)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "does not exist" if missing else f"cannot be read: {error.strerror}"
        return f"--{flag}={path} {what}"
    if not good:
        return f"--{flag}={path} is no model that Keras has saved, or it is damaged"
    if not path.endswith((".keras", ".h5", ".hdf5")):
        return f"--{flag}={path}: Keras opens it by its ending: name it .keras"
    return None


def _is_archive(file):
    try:
        with zipfile.ZipFile(file) as archive:
            return set(archive.namelist()) >= _MEMBERS
    except (zipfile.BadZipFile, ValueError):
        return False


def check_output(flag: str, path: str) -> None:
    """Raises UsageError if a file cannot be written there; no path is fine."""
    if not path or "://" in path:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise UsageError(f"--{flag}={path} is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise UsageError(f"--{flag}={path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{flag}={path} cannot be written: no permission")


def check_port(port: int, everywhere: bool) -> None:
    """Raises UsageError if a server could not listen at that port: of this machine alone, or of all its addresses."""
    host = None if everywhere else "localhost"
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        advice = "another program has it; name another" if taken else f"it cannot be opened: {error.strerror}"
        raise UsageError(f"--port={port}: {advice}") from None
