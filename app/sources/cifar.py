"""CIFAR-10 and CIFAR-100 from their published files, of the binary or the python version.

A picture is 32x32 red, then green, then blue bytes, row by row (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

import dataclasses
import functools
import pathlib

import numpy as np

from app.sources import Source, SourceError, files
from app.sources.arrays import Arrays
from app.sources.plain_pickle import load

_PIXELS = 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class _Layout:
    """One of the two sets: how its archives name things."""

    folders: tuple[str, ...]
    train: tuple[str, ...]  # without the .bin of the binary version
    test: tuple[str, ...]
    examples: tuple[int, int]  # in each file of train, of test
    text_names: str
    pickled_names: str
    names_key: str
    labels_key: str
    label_bytes: int  # of a record of the binary version; the last is the label


_CIFAR10 = _Layout(
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    examples=(10_000, 10_000),
    text_names="batches.meta.txt",
    pickled_names="batches.meta",
    names_key="label_names",
    labels_key="labels",
    label_bytes=1,
)
_CIFAR100 = _Layout(
    folders=("cifar-100-binary", "cifar-100-python"),
    train=("train",),
    test=("test",),
    examples=(50_000, 10_000),
    text_names="fine_label_names.txt",
    pickled_names="meta",
    names_key="fine_label_names",
    labels_key="fine_labels",
    label_bytes=2,
)


def cifar10(name: str, data_dir: str) -> Source:
    """Takes data_batch_1 to 5, test_batch and batches.meta, in data_dir or in the folder that the archive makes in it."""
    return _source(name, data_dir, _CIFAR10, 10)


def cifar100(name: str, data_dir: str) -> Source:
    """The 100 fine labels. Takes train, test and the names, in data_dir or in the folder that the archive makes in it."""
    return _source(name, data_dir, _CIFAR100, 100)


def _source(name, data_dir, layout, classes):
    root = pathlib.Path(data_dir)
    folders = [root, *(root / f for f in layout.folders)] if data_dir else []
    wanted = {f: (f"{f}.bin", f) for f in (*layout.train, *layout.test)}
    wanted["names"] = (layout.text_names, layout.pickled_names)
    found = files.find(name, folders, wanted, "unpack the archive from https://www.cs.toronto.edu/~kriz/cifar.html there")
    names = _class_names(found["names"], layout.names_key)
    if len(names) != classes:
        raise SourceError(f"{found['names']}: names {len(names)} classes; {name} has {classes}")

    def split(parts, examples):
        paths = [found[part] for part in parts]
        images, labels = zip(*(_read(path, layout, examples) for path in paths), strict=True)
        key = functools.partial(_key, [path.name for path in paths], examples)
        return Arrays(np.concatenate(images), np.concatenate(labels), key, classes)

    train, test = (split(*part) for part in zip((layout.train, layout.test), layout.examples, strict=True))
    return Source(name, names, train, test, (32, 32, 3), "cifar")


def _key(file_names, examples, index):
    return f"{file_names[index // examples]}[{index % examples}]"


def _read(path, layout, examples):
    """Images [examples, 32, 32, 3] and labels [examples] of a file."""
    content = files.read(path)
    if path.suffix == ".bin":
        size = layout.label_bytes + _PIXELS
        if len(content) != examples * size:
            raise SourceError(
                f"{path}: {len(content):,} bytes, but {examples:,} records of {size:,} make {examples * size:,}; "
                "unpack the archive again"
            )
        records = np.frombuffer(content, np.uint8).reshape(examples, size)
        planes, labels = records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]
    else:
        entries = load(path, content)
        planes, labels = entries.get("data"), entries.get(layout.labels_key)
        if not isinstance(planes, np.ndarray) or planes.shape != (examples, _PIXELS):
            raise SourceError(f"{path}: has no 'data' of {examples:,} x {_PIXELS:,} bytes; unpack the archive again")
        if not isinstance(labels, list) or len(labels) != examples or not all(type(label) is int for label in labels):
            raise SourceError(f"{path}: has no '{layout.labels_key}' of {examples:,} integers; unpack the archive again")
        labels = np.array(labels)
    return np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


def _class_names(path, key):
    content = files.read(path)
    names = content.split() if path.suffix == ".txt" else load(path, content).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise SourceError(f"{path}: has no list '{key}'; unpack the archive again")
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)
