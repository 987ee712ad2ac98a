"""scikit-learn's 1,797 handwritten digits of 8x8 pixels, which come with the package and need no folder."""

import numpy as np

from app.sources import Source
from app.sources.arrays import Arrays


def digits(name: str, data_dir: str) -> Source:
    """Pixels are uint8, 0 to 16 as scikit-learn has them. Every fifth digit, beginning with the first, is held out (360)."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8)[..., None], bunch.target
    held_out = np.arange(len(labels)) % 5 == 0

    def split(chosen):
        places = np.flatnonzero(chosen)
        return Arrays(images[places], labels[places], lambda index: f"digits[{places[index]}]", 10)

    return Source(name, tuple("0123456789"), split(~held_out), split(held_out), (8, 8, 1), "digits")
