"""MNIST and Fashion-MNIST from their IDX files, compressed or not, every byte accounted for.

The format: two zero bytes, the type (8: unsigned byte), the number of dimensions, then each dimension as a big-endian 32-bit
integer, then the values, the last dimension fastest (LeCun et al., http://yann.lecun.com/exdb/mnist).
"""

import gzip
import math
import pathlib
import zlib

import numpy as np

from app.sources import Source, SourceError, files
from app.sources.arrays import Arrays

DEBIAN = pathlib.Path("/usr/share/datasets/fashion-mnist")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def mnist(name: str, data_dir: str) -> Source:
    """The files lie in data_dir/mnist or data_dir itself: train-images-idx3-ubyte and so on; .gz does as well."""
    hint = "they come from http://yann.lecun.com/exdb/mnist or a mirror of it"
    return _source(name, tuple("0123456789"), "gray", _folders(name, data_dir), hint)


def fashion_mnist(name: str, data_dir: str) -> Source:
    """As for MNIST; if data_dir has none of the files, those of Debian's package dataset-fashion-mnist are used."""
    hint = "Debian's package dataset-fashion-mnist has them, or https://github.com/zalandoresearch/fashion-mnist"
    return _source(name, _CLOTHES, "fashion", [*_folders(name, data_dir), DEBIAN], hint)


def _folders(name, data_dir):
    return [pathlib.Path(data_dir) / name, pathlib.Path(data_dir)] if data_dir else []


def _source(name, classes, preprocessing, folders, hint):
    stems = [f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    spellings = {stem: [stem, stem.replace("-idx", ".idx")] for stem in stems}
    wanted = {stem: [f"{s}-ubyte{end}" for end in ("", ".gz") for s in spellings[stem]] for stem in stems}
    found = files.find(name, folders, wanted, hint)

    def split(part):
        path = found[f"{part}-images-idx3"]
        images = read_idx(path, (None, 28, 28))
        labels = read_idx(found[f"{part}-labels-idx1"], (None,))
        if len(images) != len(labels):
            raise SourceError(f"{path}: {len(images)} images, but {len(labels)} labels in its companion; get both again")
        return Arrays(images[..., None], labels, lambda index: f"{path.name}[{index}]", len(classes))

    return Source(name, classes, split("train"), split("t10k"), (28, 28, 1), preprocessing)


def read_idx(path: pathlib.Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """The unsigned bytes of an IDX file, as an array of `shape` (None: any length).

    Raises:
      SourceError: if it is another kind of file, has another shape, or is shorter or longer than its header says.
    """
    content = files.read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceError(f"{path}: not a whole gzip file ({error}); download it again") from None
    header = 4 + 4 * len(shape)
    if len(content) < header or content[:4] != bytes([0, 0, 8, len(shape)]):
        raise SourceError(
            f"{path}: begins with {content[:4].hex()}, but an IDX file of unsigned bytes in {len(shape)} dimensions with "
            f"0000080{len(shape)} and its lengths; is this another file, or compressed without .gz in its name?"
        )
    lengths = tuple(int(n) for n in np.frombuffer(content, ">u4", len(shape), offset=4))
    if any(want is not None and want != got for want, got in zip(shape, lengths, strict=True)):
        raise SourceError(f"{path}: its header gives the shape {list(lengths)}; expected {['any', *shape[1:]]}")
    size = header + math.prod(lengths)
    if len(content) != size:
        raise SourceError(
            f"{path}: {len(content):,} bytes{' uncompressed' if path.suffix == '.gz' else ''}, but the shape "
            f"{list(lengths)} in its header makes {size:,}; download it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(lengths)
