"""Data sets in memory whose order and augmentation belong to the run: functions of (seed, epoch, example) alone."""

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images [n, height, width, channels] in [0, 1] as float32 and labels [n] as int32, for training and held out."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.train_images.shape[1:]


def digits() -> ImageData:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; every fifth (360 of them) is held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., None]
    labels = bunch.target.astype(np.int32)
    held_out = np.arange(len(labels)) % 5 == 0
    return ImageData("digits", images[~held_out], labels[~held_out], images[held_out], labels[held_out], 10)


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """round(n/B), at least 1: batches straddle the seam of two epochs, so that nothing is dropped for good."""
    return max(1, round(examples / global_batch_size))


def training_batches(data: ImageData, global_batch_size: int, seed: int, first_step: int = 0) -> tf.data.Dataset:
    """Endless global batches ([B, h, w, c], [B]) from step `first_step` on.

    The examples are the concatenation of the epochs' permutations; what lies before `first_step` is skipped unread.
    """
    examples = len(data.train_labels)
    first_epoch, offset = divmod(first_step * global_batch_size, examples)
    images, labels = tf.constant(data.train_images), tf.constant(data.train_labels)

    def epoch_order(epoch):
        order = tf.random.experimental.stateless_shuffle(tf.range(examples, dtype=tf.int64), [seed, epoch])
        return tf.data.Dataset.from_tensor_slices(order).map(lambda example: (epoch, example))

    def load(epoch, example):
        key = tf.random.experimental.stateless_fold_in(tf.stack([seed, epoch]), example)
        return augment(images[example], key), labels[example]

    order = tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(epoch_order).skip(offset)
    batches = order.map(load, tf.data.AUTOTUNE, deterministic=True).batch(global_batch_size, drop_remainder=True)
    return batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)).prefetch(8)


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
