"""Invented images of any shape, that need no files and can be learned: a pattern for each class, under noise."""

import dataclasses
import hashlib
import math
import re

import numpy as np

from app.sources import Raw, Source, SourceError

_FORM = re.compile(r"synthetic:(\d+)x(\d+)x(\d+):(\d+):(\d+)")
_DEFAULT = "synthetic:32x32x3:10:1024"
_GRID = 4  # a pattern is so many by so many areas of one value, so that it outlives pooling


@dataclasses.dataclass(frozen=True, eq=False)
class Invented:
    """A Split whose examples are functions of (shape, classes, split, index), whatever its length and the machine."""

    shape: tuple[int, int, int]
    patterns: np.ndarray  # uint8 [classes, height, width, channels] on a coarse grid
    split: str
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Raw:
        if not 0 <= index < self.length:
            raise IndexError(index)
        label = index % len(self.patterns)
        rows, columns = (np.arange(size) * _GRID // size for size in self.shape[:2])
        pattern = self.patterns[label][rows][:, columns]
        noise = _random_bytes(f"{self.split} {self.shape} {len(self.patterns)}", index, self.shape)
        return Raw(pattern // 2 + noise // 2, label, f"synthetic {self.split}[{index}]")


def synthetic(name: str, data_dir: str) -> Source:
    """'synthetic:HxWxC:classes:examples'; 'synthetic' alone is 32x32x3:10:1024. A quarter as many again are held out."""
    match = _FORM.fullmatch(_DEFAULT if name == "synthetic" else name)
    numbers = [int(number) for number in match.groups()] if match else [0]
    if not all(numbers):
        raise SourceError(f"{name!r}: expected synthetic:HxWxC:classes:examples, each 1 or more, as {_DEFAULT}")
    *shape, classes, examples = numbers
    shape = tuple(shape)
    patterns = _random_bytes(f"patterns {shape} {classes}", 0, (classes, _GRID, _GRID, shape[2]))
    train, test = (Invented(shape, patterns, *part) for part in (("train", examples), ("test", -(-examples // 4))))
    return Source(name, tuple(map(str, range(classes))), train, test, shape, "none")


def _random_bytes(stream, index, shape):
    """uint8 of `shape`: bits of Philox, of which NumPy promises that they stay the same; keyed by stream, counted by index."""
    key = np.frombuffer(hashlib.sha256(stream.encode()).digest()[:16], "<u8")
    size = math.prod(shape)
    words = np.random.Philox(key=key, counter=[0, index, 0, 0]).random_raw(-(-size // 8))
    return words.astype("<u8").view(np.uint8)[:size].reshape(shape)
