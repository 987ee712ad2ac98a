"""What a prepared data set consists of: its files, the place of every record in them, and all that reading them needs.

Stored as manifest.json and offsets.npy in one folder, whole or not at all. Needs no TensorFlow.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import socket

import numpy as np

FORMAT = 1
_FILE, _OFFSETS = "manifest.json", "offsets.npy"


class ManifestError(ValueError):
    """A manifest, or a file that it names, that cannot be used: one line."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A file of records.

    Attributes:
      path: relative to the manifest's folder; or absolute, for data that is read where it lies.
      examples: the number of records, bad ones included.
      bytes: the file's size.
      sha256: of the file, in hexadecimal; '' if it was not computed.
      offsets: int64 [examples], where in the file each record starts (its length field), in bytes.
    """

    path: str
    examples: int
    bytes: int
    sha256: str
    offsets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Shards in order; `bad` are the (shard, record) that are to be left out, sorted. One that does not exist has no shards."""

    shards: tuple[Shard, ...]
    bad: tuple[tuple[int, int], ...] = ()

    @property
    def examples(self) -> int:
        """The number of those that are not bad."""
        return sum(shard.examples for shard in self.shards) - len(self.bad)


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """A prepared data set; two are the same exactly if their digests are.

    Attributes:
      dataset: the name that it was prepared by.
      classes: their names, in the order of the labels.
      image_shape: [height, width, channels] of every image; None if they are encoded files of any size.
      image_dtype: 'uint8', 'float32' or 'encoded'.
      preprocessing: the name in app/preprocessing.py that suits it.
      mean, std: of each channel over the training images, in units in which uint8 / 255 is a pixel and float32 is as it is;
        empty if encoded.
      label_offset: what is subtracted from a stored label to count from 0.
      seed: of the order of the training examples.
      train, test: what to learn from, and what is held out.
      versions: of the programs that prepared it.
      directory: where it was loaded from; not stored.
    """

    dataset: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int] | None
    image_dtype: str
    preprocessing: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_offset: int
    seed: int
    train: Split
    test: Split
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    directory: str = ""

    def path(self, shard: Shard) -> str:
        """Where the shard's file is."""
        return os.path.join(self.directory, shard.path)

    def digest(self) -> str:
        """sha256 in hexadecimal of all that decides what is read: not where the files lie, and not the versions."""
        content = _content(self)
        del content["versions"]
        for split in ("train", "test"):
            for shard in content[split]["shards"]:
                shard["path"] = os.path.basename(shard["path"])
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def prepared_path(dataset: str, prepared_dir: str, shards: int, seed: int) -> str:
    """The folder of a prepared data set."""
    return os.path.join(prepared_dir, f"{re.sub(r'[^A-Za-z0-9._-]+', '_', dataset)}-{shards}shards-seed{seed}")


def load(directory: str) -> Manifest:
    """Reads the manifest in `directory`; the files that it names are not looked at.

    Raises:
      ManifestError: if it is missing, damaged, or of another format.
    """
    path = os.path.join(directory, _FILE)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise ManifestError(
                f"{path}: has format {content.get('format')!r}, and this version of Lockstep reads {FORMAT}; "
                "remove the folder, then ./run.sh prepare"
            )
        return _manifest(content, np.load(os.path.join(directory, _OFFSETS)), os.fspath(directory))
    except FileNotFoundError as error:
        raise ManifestError(f"{error.filename}: is missing; ./run.sh prepare makes it") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, EOFError) as error:
        if isinstance(error, ManifestError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise ManifestError(
            f"{path}: is damaged ({reason}); remove the folder and prepare it again: ./run.sh prepare"
        ) from None


def save(manifest: Manifest, directory: str) -> None:
    """Writes the manifest into `directory`, which is made if need be: each file under a temporary name, then renamed."""
    os.makedirs(directory, exist_ok=True)
    content = json.dumps(_content(manifest), indent=1, ensure_ascii=False)
    _write(os.path.join(directory, _OFFSETS), lambda file: np.save(file, _offsets(manifest), allow_pickle=False))
    _write(os.path.join(directory, _FILE), lambda file: file.write(content.encode() + b"\n"))


def own_folder(final: str) -> str:
    """Makes an empty folder beside `final`, for this process alone, that is to be given that name by `publish`.

    Those that dead processes of this host have left for the same `final` are removed; there is no process with our own
    number but us, so one of that number is left from before as well.
    """
    parent, name = os.path.split(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    prefix = f".{name}.{socket.gethostname()}."
    for entry in os.listdir(parent):
        if (match := re.fullmatch(re.escape(prefix) + r"(\d+)\.tmp", entry)) and not _is_another(int(match[1])):
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
    folder = os.path.join(parent, f"{prefix}{os.getpid()}.tmp")
    os.mkdir(folder)
    return folder


def publish(folder: str, final: str) -> bool:
    """Renames `folder` to `final`; False if another process was first, whose folder stays."""
    try:
        os.rename(folder, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def check_files(manifest: Manifest, split: Split, shard_indices=None) -> None:
    """Asks for the sizes of the split's files, or of the shards `shard_indices`; reads nothing.

    Raises:
      ManifestError: names the first file that is missing or has another size than the manifest says.
    """
    for index in range(len(split.shards)) if shard_indices is None else shard_indices:
        shard = split.shards[index]
        path = manifest.path(shard)
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise ManifestError(f"{path}: {error.strerror or error}; the manifest names it") from None
        if size != shard.bytes:
            raise ManifestError(f"{path}: has {size} bytes; by the manifest it has {shard.bytes}. Was it copied in full?")


def whole(directory: str) -> Manifest:
    """`load`, and `check_files` for all of its files. Raises ManifestError."""
    manifest = load(directory)
    for split in (manifest.train, manifest.test):
        check_files(manifest, split)
    return manifest


def of_files(directory: str, files: dict[str, list[tuple[str, int]]]) -> Manifest | None:
    """The manifest in `directory`, if there is one that names exactly these (path, size) of each split."""
    try:
        manifest = load(directory)
    except ManifestError:
        return None
    return (
        manifest if all([(s.path, s.bytes) for s in getattr(manifest, part).shards] == files[part] for part in files) else None
    )


def _content(manifest):
    """The manifest as JSON has it; the offsets are represented by their sha256."""
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest) if f.name != "directory"}
    for split in ("train", "test"):
        shards = [{k: getattr(s, k) for k in ("path", "examples", "bytes", "sha256")} for s in content[split].shards]
        content[split] = {"shards": shards, "bad": content[split].bad}
    return {"format": FORMAT, **content, "offsets_sha256": _sha256(_offsets(manifest))}


def _manifest(content, offsets, directory):
    """The inverse of `_content`."""
    content = dict(content)
    if offsets.ndim != 1 or _sha256(offsets) != content.pop("offsets_sha256"):
        raise ValueError(f"{_OFFSETS} is not the one that was written with it")
    del content["format"]
    place = 0
    for name in ("train", "test"):
        shards = []
        for shard in content[name]["shards"]:
            shards.append(Shard(**shard, offsets=offsets[place : place + shard["examples"]]))
            place += shard["examples"]
        content[name] = Split(tuple(shards), tuple((shard, record) for shard, record in content[name]["bad"]))
    if place != len(offsets):
        raise ValueError(f"{_OFFSETS} has {len(offsets)} records, and the shards have {place}")
    for name in ("classes", "image_shape", "mean", "std"):
        content[name] = None if content[name] is None else tuple(content[name])
    return Manifest(**content, directory=directory)


def _offsets(manifest):
    """int64 [records of train, then of test]."""
    parts = [shard.offsets for split in (manifest.train, manifest.test) for shard in split.shards]
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype("<i8")


def _sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array, "<i8").tobytes()).hexdigest()


def _is_another(process):
    """Whether there is a process of this number which is not ours."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return process != os.getpid()


def _write(path, write):
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        write(file)
    os.replace(temporary, path)
