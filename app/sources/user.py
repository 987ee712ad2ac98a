"""The user's own data: a function 'package.module:function' that returns arrays or finite tf.data.Datasets.

It returns ((x_train, y_train), (x_test, y_test)) as keras.datasets do, or {'train': (x, y), 'test': (x, y)} of which 'test'
may be missing; a tf.data.Dataset of (image, label) may stand for each (x, y). Images are uint8 or float32, [n, height, width]
or [n, height, width, channels]; labels are whole numbers from 0, [n] or [n, 1]. Every process of a run calls the function,
and must get the same examples in the same order.
"""

import sys

import numpy as np

from app.sources import Source, SourceError
from app.sources.arrays import Arrays
from models import imported

MOST_BYTES = 4 << 30  # of a tf.data.Dataset's images, which are all held in memory
MOST_CLASSES = 100_000  # larger labels are numbers of something else
_FORMS = "((x_train, y_train), (x_test, y_test)) or {'train': (x, y), 'test': (x, y)}"


def user(name: str, data_dir: str) -> Source:
    """Calls the function and checks all that it returns; what the function itself raises is passed on.

    Args:
      name: 'package.module:function', looked for in the current folder, on PYTHONPATH and among installed packages.
      data_dir: given to the function if it has a parameter `data_dir`.
    Raises:
      SourceError: one line that says what was returned and what was expected.
    """
    parts = _parts(name, _called(name, data_dir))
    arrays = {part: _arrays(f"{name} {part}", value) for part, value in parts.items()}
    images, labels = arrays["train"]
    classes = int(labels.max(initial=0)) + 1
    for part, (others, _) in arrays.items():
        if (others.shape[1:], others.dtype) != (images.shape[1:], images.dtype):
            raise SourceError(f"{name} {part}: images {_shown(others)}, but those of train are {_shown(images)}")
    splits = {part: Arrays(x, y, f"{name} {part}[{{}}]".format, classes) for part, (x, y) in arrays.items()}
    return Source(name, tuple(map(str, range(classes))), splits["train"], splits.get("test"), images.shape[1:], "none")


def _called(name, data_dir):
    function = imported.function(name, SourceError)
    keywords = {"data_dir": data_dir} if imported.takes(function, "data_dir") else {}
    if problem := imported.fits(function, **keywords):
        raise SourceError(f"{name}: can be called with nothing but data_dir: {problem}")
    return function(**keywords)


def _parts(name, result):
    """{'train': ..., 'test': ...} of what the function has returned."""
    if isinstance(result, tuple | list) and len(result) == 2:
        result = dict(zip(("train", "test"), result, strict=True))
    if not isinstance(result, dict) or not {"train"} <= set(result) <= {"train", "test"}:
        shown = f"a dict of {list(result)}" if isinstance(result, dict) else type(result).__name__
        raise SourceError(f"{name}: returned {shown}; expected {_FORMS}")
    return {part: value for part, value in result.items() if part == "train" or value is not None}


def _arrays(where, part):
    """Checked images [n, height, width, channels] and labels [n] of (x, y) or of a tf.data.Dataset."""
    tf = sys.modules.get("tensorflow")  # whoever made a Dataset has imported it
    if tf and isinstance(part, tf.data.Dataset):
        part = _materialised(where, part, infinite=tf.data.INFINITE_CARDINALITY)
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise SourceError(f"{where}: is {type(part).__name__}, not (images, labels) or a tf.data.Dataset, as in {_FORMS}")
    try:
        images, labels = map(np.asarray, part)
    except ValueError:
        raise SourceError(f"{where}: images or labels of differing shape; all must be of one") from None
    if images.dtype not in (np.uint8, np.float32) or images.ndim not in (3, 4):
        raise SourceError(
            f"{where}: images {_shown(images)}; expected uint8 or float32 (.astype('float32')), [n, height, width, channels]"
        )
    finite = np.isfinite(images).all(axis=tuple(range(1, images.ndim)))
    if not finite.all():
        raise SourceError(f"{where}[{finite.argmin()}]: a pixel is NaN or infinite")
    return images if images.ndim == 4 else images[..., None], _labels(where, labels, len(images))


def _labels(where, labels, examples):
    if labels.shape == (examples, 1):
        labels = labels[:, 0]
    if labels.shape != (examples,):
        raise SourceError(f"{where}: labels {_shown(labels)} for {examples} images; expected one number each")
    if labels.dtype.kind not in "iuf":
        raise SourceError(f"{where}: labels are {labels.dtype}; expected whole numbers from 0")
    wrong = np.flatnonzero(~((labels >= 0) & (labels < MOST_CLASSES) & (labels == np.floor(labels))))
    if wrong.size:
        index = wrong[0]
        raise SourceError(
            f"{where}[{index}]: its label is {labels[index]}; expected a whole number from 0 to {MOST_CLASSES - 1}"
        )
    return labels.astype(np.int64)


def _materialised(where, dataset, infinite):
    """All the images and labels of a tf.data.Dataset, MOST_BYTES at most."""
    if int(dataset.cardinality()) == infinite:
        raise SourceError(f"{where}: the tf.data.Dataset is endless; leave out .repeat()")
    images, labels, size = [], [], 0
    for index, element in enumerate(dataset.as_numpy_iterator()):
        if not isinstance(element, tuple) or len(element) != 2 or np.size(element[1]) != 1:
            raise SourceError(f"{where}[{index}]: the tf.data.Dataset gives no (image, label); is it a batch, or a dict?")
        image = np.asarray(element[0])
        images.append(image)
        labels.append(np.reshape(element[1], ()))
        size += image.nbytes
        if image.shape != images[0].shape:
            raise SourceError(
                f"{where}[{index}]: an image of shape {list(image.shape)} after {list(images[0].shape)}; resize them"
            )
        if size > MOST_BYTES:
            raise SourceError(f"{where}: more than {MOST_BYTES >> 30} GiB; write the images to files and use --dataset=folder")
    return np.array(images), np.array(labels)


def _shown(array):
    return f"{array.dtype} {list(array.shape)}"
