"""A split that lies in memory, whose labels have been checked."""

import dataclasses
from collections.abc import Callable

import numpy as np

from app.sources import Raw, SourceError


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A Split of images [n, height, width, channels] and as many integer labels [n].

    Attributes:
      key: names the example at an index, for people.
      classes: their number.

    Raises:
      SourceError: if a label is not in 0 <= label < classes.
    """

    images: np.ndarray
    labels: np.ndarray
    key: Callable[[int], str]
    classes: int

    def __post_init__(self):
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= self.classes))
        if wrong.size:
            index = int(wrong[0])
            raise SourceError(
                f"{self.key(index)}: its label is {self.labels[index]}, but labels go from 0 to {self.classes - 1}"
                f"{f'; {wrong.size} labels are wrong' if wrong.size > 1 else ''}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Raw:
        return Raw(self.images[index], int(self.labels[index]), self.key(index))
