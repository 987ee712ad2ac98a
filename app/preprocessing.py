"""From a stored image to what a network is given, by name: TensorFlow functions of an example and its key, for tf.data.

Every random choice comes from the key alone, so that any process makes the same pixels.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

NAMES = ("digits", "gray", "fashion", "cifar", "imagenet", "none")
_PADS = {"gray": 2, "fashion": 2, "cifar": 4}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a data set's images are treated; `train` and `evaluate` return float32 of `shape`.

    Attributes:
      name: one of NAMES.
      shape: [height, width, channels].
      train: (image, key) -> tensor; `key` is int64 [2], as tf.random.stateless_* take it.
      evaluate: (image) -> tensor.
    Here `image` is uint8 or float32 [height, width, channels]; for imagenet a string, the bytes of a JPEG or PNG file.
    """

    name: str
    shape: tuple[int, int, int]
    train: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    evaluate: Callable[[tf.Tensor], tf.Tensor]


def make(name: str, image_shape=None, mean=None, std=None, image_size: int = 224) -> Preprocessing:
    """The preprocessing `name`.

    digits: pixels / 16; turned, scaled and shifted for training (see `augment`).
    gray, fashion, cifar: standardised; for training padded by 2 (cifar: 4) on each side, cropped at random and, but for
      gray, flipped by chance (He et al. 2016, 4.2). The padding is 0 after standardising, which is the mean.
    imagenet: scaled to [-1, 1]; for training a random box of the image, flipped by chance; the middle for evaluation.
    none: nothing but uint8 / 255; float32 stays as it is.

    Args:
      image_shape: [height, width, channels] of the stored images; imagenet needs none.
      mean, std: of the training images, a number or one for each channel, in units in which uint8 / 255 is a pixel. Used by
        gray, fashion and cifar; if left out, 0 and 1.
      image_size: height and width of what imagenet gives.
    Raises:
      ValueError: if the name is unknown, or a std is not positive.
    """
    if name == "imagenet":
        return Preprocessing(
            name,
            (image_size, image_size, 3),
            lambda image, key: _random_box(image, key, image_size),
            lambda image: _middle(image, image_size),
        )
    if name == "digits":
        return _of_arrays(name, image_shape, lambda image: tf.cast(image, tf.float32) / 16, augment)
    if name == "none":
        return _of_arrays(name, image_shape, _unit, lambda image, key: image)
    if name not in _PADS:
        raise ValueError(f"preprocessing {name!r} is unknown; one of {', '.join(NAMES)}")
    mean, std = np.float32(0 if mean is None else mean), np.float32(1 if std is None else std)
    if not np.all(std > 0):
        raise ValueError(f"preprocessing {name}: std is {std}; standardising divides by it, so it must be positive")

    def shifted(image, key):
        crop_key, flip_key = tf.unstack(tf.random.split(key, 2))
        image = random_crop(image, _PADS[name], crop_key)
        return image if name == "gray" else tf.image.stateless_random_flip_left_right(image, flip_key)

    return _of_arrays(name, image_shape, lambda image: (_unit(image) - mean) / std, shifted)


def _of_arrays(name, shape, prepare, vary):
    def evaluate(image):
        return prepare(tf.ensure_shape(image, shape))

    return Preprocessing(name, tuple(shape), lambda image, key: vary(evaluate(image), key), evaluate)


def _unit(image):
    return tf.cast(image, tf.float32) / 255 if image.dtype == tf.uint8 else image


def random_crop(image, pad, key):
    """An equally large part of `image` [height, width, channels] with `pad` zeros on each side, by `key` [2] alone."""
    corner = tf.random.stateless_uniform([2], key, 0, 2 * pad + 1, tf.int32)
    padded = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]])
    return tf.slice(padded, tf.concat([corner, [0]], 0), image.shape)


def augment(image, key):
    """Turns by up to 10 degrees, scales by up to 10 %, shifts by up to one pixel: by `key` [2] alone."""
    height, width, _ = image.shape
    angle, scale, down, right = tf.unstack(tf.random.stateless_uniform([4], key, -1.0, 1.0))
    angle, scale = angle * np.pi / 18, 1 + 0.1 * scale
    cos, sin = tf.cos(angle) * scale, tf.sin(angle) * scale
    y, x = (height - 1) / 2, (width - 1) / 2
    # Maps an output pixel to the input pixel that it shows: about the centre, then shifted.
    transform = [cos, -sin, x - cos * x + sin * y + right, sin, cos, y - sin * x - cos * y + down, 0.0, 0.0]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack(transform)[None],
        output_shape=[height, width],
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
        fill_value=0.0,
    )[0]


def _random_box(encoded, key, size):
    """A box of aspect 3/4 to 4/3 and of 5 % of the image or more, or else all of it (Szegedy et al. 2015, 6; they: 8 %)."""
    box_key, flip_key = tf.unstack(tf.random.split(key, 2))

    def box(image_size):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.concat([image_size, [3]], 0),
            tf.zeros([1, 0, 4]),  # no objects to be kept in sight: the whole image may be cut
            box_key,
            min_object_covered=0.0,
            area_range=(0.05, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], extent[:2]], 0)

    return tf.image.stateless_random_flip_left_right(_resized(_decoded(encoded, box), size), flip_key)


def _middle(encoded, size):
    """The central square of 7/8 of the shorter side: what is left of 256 pixels by a central crop of 224."""

    def box(image_size):
        side = tf.maximum(tf.reduce_min(image_size) * 7 // 8, 1)
        return tf.concat([(image_size - side) // 2, [side, side]], 0)

    return _resized(_decoded(encoded, box), size)


def _resized(pixels, size):
    # The cast is for tf.image.resize, which leaves uint8 as it is where nothing is to be resized.
    return tf.cast(tf.image.resize(pixels, [size, size]), tf.float32) / 127.5 - 1


def _decoded(encoded, box):
    """The part of an encoded image that `box` chooses, uint8 [height, width, 3].

    Gray and CMYK JPEGs become three channels in TensorFlow's hands (seen with 2.21). But decode_and_crop_jpeg refuses a
    PNG, whatever its name, and it stops reading below the box, so that of a truncated JPEG it gives the boxes above the
    cut without a word. Both are therefore decoded whole, which fails if truncated. A JPEG that lacks the end marker FFD9
    in its place, because something is appended, is decoded whole as well.

    Args:
      encoded: scalar string, the bytes of a file.
      box: from [height, width] to [y, x, height, width], int32.
    """

    def one_operation():
        window = box(tf.image.extract_jpeg_shape(encoded)[:2])
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3)

    def whole():
        pixels = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        y, x, height, width = tf.unstack(box(tf.shape(pixels)[:2]))
        return pixels[y : y + height, x : x + width]

    has_end = tf.strings.substr(encoded, -2, 2) == b"\xff\xd9"
    return tf.cond(tf.io.is_jpeg(encoded) & has_end, one_operation, whole)
