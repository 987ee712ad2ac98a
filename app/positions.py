"""Examples by their place: record number i of a split, read alone, and the order in which a logical replica sees them.

A stream (`streams.py`) is read from its beginning. Where any worker may be asked for the batch of any step and logical replica,
as with parameter servers, the same examples are found by arithmetic instead, in a graph: which ones is a function of (seed,
step, k), and the manifest knows where each record starts.
"""

import numpy as np
import tensorflow as tf

from app.manifest import Manifest, Split

HIGH = 1 << 32  # two numbers in one of 64 bits


class Records:
    """The records of a split that are not bad, numbered through: shard after shard, each in the order of its file.

    Attributes:
      starts: int64 [shards], the number of each shard's first; counts: int64 [shards].
      shard, record: int64 [records], where each is.
    """

    def __init__(self, manifest: Manifest, split: Split):
        good = [np.ones(shard.examples, bool) for shard in split.shards]
        for shard, record in split.bad:
            good[shard][record] = False
        self.counts = np.array([each.sum() for each in good], np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.record = np.concatenate([np.zeros(0, np.int64), *(np.flatnonzero(each) for each in good)])
        self.shard = np.repeat(np.arange(len(good)), self.counts)
        self._offsets = np.concatenate(
            [np.zeros(0, np.int64), *(s.offsets[g] for s, g in zip(split.shards, good, strict=True))]
        )
        ends = [np.append(s.offsets[1:], s.bytes)[g] for s, g in zip(split.shards, good, strict=True)]
        self._sizes = np.concatenate([np.zeros(0, np.int64), *ends]) - self._offsets
        self._paths = [manifest.path(shard) for shard in split.shards]

    def read(self, numbers) -> tf.data.Dataset:
        """The records of these numbers, int64 [n]: (shard, record, serialized); checksums are looked at, as in any reading."""

        def one(shard, record, offset, size):
            paths = tf.constant(self._paths)
            # The public TFRecordDataset cannot begin within a file.
            variant = tf.raw_ops.TFRecordDatasetV2(
                filenames=[paths[shard]],
                compression_type="",
                buffer_size=tf.minimum(size, 1 << 20),
                byte_offsets=[offset],
            )
            found = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(1)
            return found.map(lambda serialized: (shard, record, serialized))

        tables = (self.shard, self.record, self._offsets, self._sizes)
        places = tuple(tf.gather(tf.constant(table, tf.int64), numbers) for table in tables)
        return tf.data.Dataset.from_tensor_slices(places).flat_map(one)


class Order:
    """The endless order of a logical replica's examples, as `TrainingStreams` has it.

    Args:
      records: of the training split.
      shards: int64 [K, shards of each].
      seed, shuffle_buffer: as for `TrainingStreams`.
    """

    def __init__(self, records: Records, shards: np.ndarray, seed: int, shuffle_buffer: int):
        self._records, self._shards, self._seed, self._buffer = records, shards, seed, shuffle_buffer
        self._examples = records.counts[shards].sum(1)

    def at(self, first, count: int, k):
        """(numbers, epochs), int64 [count] each, of the places [first, first + count) of k's order, scalar int64 tensors.

        The places are taken block by block of the shuffle buffer.
        """
        examples = tf.constant(self._examples)[k]

        def goes_on(place, *_):
            return place < first + count

        def block(place, numbers, epochs):
            epoch, within = place // examples, place % examples
            start = within // self._buffer * self._buffer
            order = self._block(epoch, k, start, tf.minimum(examples - start, self._buffer))
            found = order[within - start :][: first + count - place]
            epochs = tf.concat([epochs, tf.fill(tf.shape(found), epoch)], 0)
            return place + tf.size(found, tf.int64), tf.concat([numbers, found], 0), epochs

        nothing, shapes = tf.zeros([0], tf.int64), [tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape([None])]
        _, numbers, epochs = tf.while_loop(goes_on, block, [first, nothing, nothing], shapes, parallel_iterations=1)
        return tf.ensure_shape(numbers, [count]), tf.ensure_shape(epochs, [count])

    def _block(self, epoch, k, start, size):
        """The numbers of the records of one block, int64 [size], mixed."""
        files = shuffled(tf.constant(self._shards)[k], self._seed, epoch, k, 0)
        counts = tf.gather(tf.constant(self._records.counts), files)
        ends = tf.cumsum(counts)
        mixed = shuffled(tf.range(tf.cast(size, tf.int32)), self._seed, epoch, k, start // self._buffer + 1)
        places = start + tf.cast(mixed, tf.int64)
        file = tf.searchsorted(ends, places, side="right")
        first = tf.gather(tf.constant(self._records.starts), tf.gather(files, file))
        return first + places - tf.gather(ends - counts, file)


def shuffled(values, seed: int, epoch, k, number):
    """`values` in an order that follows from (seed, epoch, k, number) alone; the numbers are scalar int64 tensors.

    (Dataset.shuffle would mix TensorFlow's global seed in, and fails on a seed from the graph if that is 0.)
    """
    key = tf.stack([seed * HIGH + epoch, k * HIGH + number])
    return tf.gather(values, tf.random.experimental.stateless_shuffle(tf.range(tf.shape(values)[0]), key))
