"""What a tensor is, in ten numbers: a hash of its bits, its norm, and eight fixed projections. In the graph, on any device.

A hash says that two tensors differ, and nothing more. A projection is the sum of the elements, each with a sign that is a
function of its index alone. It is linear, so that sums, means and multiples of gradients show in it, and the root mean square
of the differences of two tensors' projections is about the norm of their difference (Johnson & Lindenstrauss 1984; Achlioptas
2003). Elements are counted in C order. Sums of integers wrap around at 2^64 and so are the same in any order.
"""

import typing

import numpy as np
import tensorflow as tf

PROJECTIONS = 8
_BLOCK = 64  # rows
_ROW = 1024  # elements are treated in rows of so many: an element's key is made of the row's and the column's
_WEYL = 0x9E3779B97F4A7C15  # splitmix64 (Steele et al. 2014): its increment, and the factors of its finisher
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class Digests(typing.NamedTuple):
    """Of T tensors: `hash` int64 [T]; `numbers` float64 [T, 1 + 8], sum of squares and projections."""

    hash: tf.Tensor
    numbers: tf.Tensor

    def json(self) -> dict[str, list]:
        """The three lists of fingerprints.jsonl."""
        numbers = np.asarray(self.numbers)
        return {
            "hash": hex_digits(self.hash),
            "norm": np.sqrt(numbers[:, 0]).tolist(),
            "projections": numbers[:, 1:].tolist(),
        }


def of(tensors) -> Digests:
    """The digests of some tensors of any static shapes and numeric types."""
    order, hashes, numbers = [], [tf.zeros([0], tf.int64)], [tf.zeros([0, 1 + PROJECTIONS], tf.float64)]
    for dtype in sorted({t.dtype for t in tensors}, key=lambda dtype: dtype.name):
        group = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        rows, places, counts = _packed([tensors[i] for i in group])
        owner = np.repeat(np.arange(len(group)), counts)
        lengths = tf.constant([tensors[i].shape.num_elements() for i in group], tf.int64)
        with tf.device("CPU:0"):  # a few numbers; on GPUs such sums are refused in deterministic mode, or were
            hashes.append(_mixed(tf.math.segment_sum(_row_hashes(rows, places), owner) + lengths))
            numbers.append(tf.math.segment_sum(_row_numbers(rows, places), owner))
        order += group
    back = np.argsort(order).astype(np.int32)
    return Digests(tf.gather(tf.concat(hashes, 0), back), tf.gather(tf.concat(numbers, 0), back))


def of_all(tensors) -> tf.Tensor:
    """The sum of several tensors' numbers, as of one vector in which each has its own signs: float64 [1 + 8]."""
    of_types = [[t for t in tensors if t.dtype == dtype] for dtype in sorted({t.dtype for t in tensors}, key=str)]
    found = [tf.reduce_sum(_row_numbers(*_packed(group)[:2]), 0) for group in of_types]
    return tf.add_n(found) if found else tf.zeros([1 + PROJECTIONS], tf.float64)


def one_hash(hashes) -> tf.Tensor:
    """One hash, a scalar, of several in their order: int64 [n]."""
    rows, places = _in_rows(hashes[None])
    return _mixed(tf.reduce_sum(_row_hashes(rows, places)) + hashes.shape[0])


def of_examples(structure, count: int) -> tf.Tensor:
    """A hash of each example of a batch: int64 [count].

    Args:
      structure: nested tensors [count, ...]; None and empty structures are nothing.
    """
    total = tf.zeros([count], tf.int64)
    for tensor in tf.nest.flatten(structure):
        if tensor is not None:
            rows, places = _in_rows(tf.reshape(tensor, [count, -1]))
            total = _mixed(total + tf.reduce_sum(tf.reshape(_row_hashes(rows, places), [count, -1]), 1))
    return total


def hex_digits(hashes) -> list[str]:
    """int64 [n] as 16 hexadecimal digits each."""
    return [f"{value & (2**64 - 1):016x}" for value in np.asarray(hashes).tolist()]


def _packed(tensors):
    """Tensors of one type as rows [R, _ROW], each filled up with zeros; the rows' places in their tensors; rows of each."""
    rows, places = zip(*(_in_rows(tf.reshape(t, [1, -1])) for t in tensors), strict=True)
    return tf.concat(rows, 0), np.concatenate(places), [len(p) for p in places]


def _in_rows(matrix):
    """[m, n] as rows [m r, _ROW], each line filled up with zeros; and the rows' places, 0 to r - 1, in their lines."""
    lines, length = matrix.shape
    rows = -(-length // _ROW)
    padded = tf.pad(matrix, [[0, 0], [0, rows * _ROW - length]])
    return tf.reshape(padded, [lines * rows, _ROW]), np.tile(np.arange(rows), lines)


def _row_hashes(rows, places):
    """int64 [R]. The hash of a tensor is the sum over its rows; that of a row, over its elements."""

    def hashes(rows, places):
        return tf.reduce_sum(_mixed(_bits(rows) + _column_keys() + _row_keys(places)[:, None]), 1)

    return _in_blocks(hashes, rows, places, tf.TensorSpec([], tf.int64))


def _row_numbers(rows, places):
    """float64 [R, 1 + 8], of which the sums over a tensor's rows are its own."""

    def numbers(rows, places):
        values = tf.cast(rows, tf.float64)
        projections = tf.matmul(values, _signs(_column_keys())) * _signs(_row_keys(places))
        return tf.concat([tf.reduce_sum(values * values, 1, keepdims=True), projections], 1)

    return _in_blocks(numbers, rows, places, tf.TensorSpec([1 + PROJECTIONS], tf.float64))


def _in_blocks(function, rows, places, spec):
    """`function` of all rows, a block at a time: it makes several numbers of 64 bits for each element."""
    count = len(places)
    if count <= _BLOCK:
        return function(rows, tf.constant(places, tf.int64))
    blocks = -(-count // _BLOCK)
    rows = tf.pad(rows, [[0, blocks * _BLOCK - count], [0, 0]])
    places = np.pad(places, [0, blocks * _BLOCK - count]).astype(np.int64)
    blocked = tf.reshape(rows, [blocks, _BLOCK, _ROW]), tf.reshape(places, [blocks, _BLOCK])
    output = tf.TensorSpec([_BLOCK, *spec.shape], spec.dtype)
    found = tf.map_fn(lambda block: function(*block), blocked, fn_output_signature=output, parallel_iterations=1)
    return tf.reshape(found, [blocks * _BLOCK, *spec.shape])[:count]


def _column_keys():
    return _mixed((tf.range(_ROW, dtype=tf.int64) + 1) * _signed(_WEYL))


def _row_keys(places):
    return _mixed((places + _ROW + 1) * _signed(_WEYL))


def _signs(keys):
    bit = tf.bitwise.bitwise_and(keys[:, None], tf.constant([1 << j for j in range(PROJECTIONS)], tf.int64))
    return 1 - 2 * tf.cast(bit > 0, tf.float64)


def _bits(tensor):
    """The bits of each element, as int64 of the same shape."""
    if tensor.dtype.is_floating:
        tensor = tf.bitcast(tensor, _BITS[tensor.dtype.size])
    return tf.cast(tensor, tf.int64)


def _mixed(values):
    """splitmix64's finisher, a bijection of 64 bits."""
    values = tf.bitwise.bitwise_xor(values, _shifted(values, 30)) * _signed(_FACTORS[0])
    values = tf.bitwise.bitwise_xor(values, _shifted(values, 27)) * _signed(_FACTORS[1])
    return tf.bitwise.bitwise_xor(values, _shifted(values, 31))


def _shifted(values, places):
    """To the right, zeros following: TensorFlow's own shift of signed numbers repeats the sign."""
    shifted = tf.bitwise.right_shift(values, tf.constant(places, tf.int64))
    return tf.bitwise.bitwise_and(shifted, tf.constant((1 << 64 - places) - 1, tf.int64))


def _signed(number):
    return tf.constant(number - (1 << 64) if number >> 63 else number, tf.int64)
