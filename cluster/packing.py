"""Several tensors of one type as one vector, and back: one message instead of many."""

import tensorflow as tf


def packed(tensors) -> tf.Tensor:
    """All entries of tensors of one type, one tensor after the other: [entries]."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unpacked(vector, shapes) -> list[tf.Tensor]:
    """The tensors of these shapes that `packed` has made a vector of."""
    shapes = [tf.TensorShape(shape) for shape in shapes]
    pieces = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
