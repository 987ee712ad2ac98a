"""Data sets by name, as raw examples that can be read in any order: pixels as stored, or a file's bytes as they lie.

A new one is a function (name, data_dir) -> Source, and a line in NAMES. Nothing here decodes, scales or shuffles.
"""

import dataclasses
import difflib
import importlib
import typing

if typing.TYPE_CHECKING:
    import numpy as np

NAMES = {
    "digits": "app.sources.digits:digits",
    "mnist": "app.sources.mnist:mnist",
    "fashion_mnist": "app.sources.mnist:fashion_mnist",
    "cifar10": "app.sources.cifar:cifar10",
    "cifar100": "app.sources.cifar:cifar100",
    "folder": "app.sources.folder:folder",
    "synthetic": "app.sources.synthetic:synthetic",
}
_USER = "app.sources.user:user"


class SourceError(ValueError):
    """A data set that cannot be used: one line that says which file, which place in it, why, and what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Raw:
    """An example.

    Attributes:
      image: uint8 [height, width, channels] (float32 if a user's function gives that), or the bytes of a JPEG or PNG file.
      label: 0 <= label < the number of classes.
      key: what a person calls it: a path relative to the data folder, or a file and a place, 'train-images-idx3-ubyte[17]'.
    """

    image: "np.ndarray | bytes"
    label: int
    key: str


class Split(typing.Protocol):
    """Examples 0 to len - 1; reading one does not depend on what was read before."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Raw: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A data set.

    Attributes:
      name: as given to `open_source`.
      classes: their names, in the order of the labels.
      train: what to learn from; never empty.
      test: what is held out; None if nothing is.
      image_shape: [height, width, channels] of every image; None if they are encoded files of any size.
      preprocessing: the name in app/preprocessing.py that suits it.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split | None
    image_shape: tuple[int, int, int] | None
    preprocessing: str


def open_source(name: str, data_dir: str = "") -> Source:
    """Opens the data set `name`.

    Args:
      name: one of NAMES; 'synthetic:HxWxC:classes:examples'; or 'package.module:function', a function of the user's.
      data_dir: the folder that holds it; relative to the current one. Not needed by digits and synthetic.
    Raises:
      SourceError: if the name is unknown, or the data is missing, damaged or not what the name says.
    """
    first, *rest = name.split(":")
    if first in NAMES and (not rest or first == "synthetic"):
        target = NAMES[first]
    elif rest:
        target = _USER
    else:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise SourceError(
            f"data set {name!r} is unknown{f'; did you mean {near[0]}?' if near else ''} One of: {', '.join(NAMES)}, "
            "or a function of your own as package.module:function"
        )
    module, function = target.split(":")
    source = getattr(importlib.import_module(module), function)(name, data_dir)
    for part, split in (("train", source.train), ("test", source.test)):
        if split is not None and not len(split):
            raise SourceError(f"{name}: the {part} split has no examples")
    return source
