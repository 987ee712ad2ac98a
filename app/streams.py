"""The order of examples: K endless streams, one a logical replica, that depend on the run and never on the workers.

A logical replica reads its own shards and no others, so a worker opens the files of its logical replicas alone. Its stream is
the endless concatenation of its epochs, each shuffled by (seed, epoch, logical replica); batches straddle the seam of two
epochs, and nothing is dropped. What is done to an example's pixels follows from (seed, epoch, shard, record).
"""

import numpy as np
import tensorflow as tf

from app import records
from app.manifest import Manifest, Split
from app.positions import HIGH, Order, Records, shuffled
from app.preprocessing import Preprocessing
from cluster.tree import divisors


class ShardsError(ValueError):
    """K and the number of shards do not fit: one line with the numbers that would."""


class TrainingStreams:
    """The training examples, as `cluster.Trainer.fit` takes them: elements (image [h, w, c] float32, label [] int32).

    Args:
      manifest: of the prepared data.
      preprocessing: what becomes of an image.
      logical_replicas: K; must divide the number of shards.
      global_batch_size: B; K must divide it.
      seed: of order and augmentation.
      first_step: start at this step; what lies before is passed over unparsed.
      shuffle_buffer: records of a stream that are mixed at a time; the order of its shards is mixed too.
      one_hot: give labels as float32 [one_hot] instead; 0: as numbers.

    Raises:
      ShardsError: if K does not divide the number of shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        preprocessing: Preprocessing,
        logical_replicas: int,
        global_batch_size: int,
        seed: int,
        first_step: int = 0,
        shuffle_buffer: int = 1024,
        one_hot: int = 0,
    ):
        shards = len(manifest.train.shards)
        if shards % logical_replicas:
            raise ShardsError(
                f"{logical_replicas} logical replicas cannot share {shards} shards evenly: use --logical_replicas out of "
                f"{', '.join(map(str, divisors(shards)))}, or --shards={logical_replicas} or a multiple of it"
            )
        self._manifest, self._preprocessing = manifest, preprocessing
        self._seed, self._first_step, self._buffer = seed, first_step, shuffle_buffer
        self._one_hot = one_hot
        self._shards = np.arange(shards).reshape(logical_replicas, -1)  # row k: the shards of logical replica k
        bad = _bad_by_shard(manifest.train)
        held = [sum(manifest.train.shards[s].examples - bad.get(s, 0) for s in row) for row in self._shards]
        if min(held) == 0:
            raise ShardsError(f"some of {logical_replicas} logical replicas have no example: use fewer --logical_replicas")
        self._examples = np.array(held, np.int64)
        self._replica_batch_size = global_batch_size // logical_replicas
        self.steps = max(1, round(int(self._examples.sum()) / global_batch_size))
        self.element_spec = (tf.TensorSpec(preprocessing.shape, tf.float32), _label_spec(one_hot))
        self.ids = tf.TensorSpec([3], tf.int64)

    def shards_of(self, worker: int, workers: int) -> list[int]:
        """The shards that a worker reads: those of its block of logical replicas."""
        share = len(self._shards) // workers
        return self._shards[worker * share : (worker + 1) * share].ravel().tolist()

    def identified(self, first: int, last: int, replica_batch_size: int) -> tf.data.Dataset:
        """As `examples`, with where each comes from: (epoch, shard, record, serialized), all unparsed."""

        def stream(k):
            position = self._first_step * replica_batch_size
            examples = tf.constant(self._examples)[k]
            epochs = tf.data.Dataset.range(position // examples, tf.int64.max)
            return epochs.flat_map(lambda epoch: self._epoch(k, epoch)).skip(position % examples)

        return _in_turn(stream, first, last, replica_batch_size)

    def examples(self, first: int, last: int, replica_batch_size: int, with_ids: bool = False) -> tf.data.Dataset:
        """Endless: `replica_batch_size` examples of logical replica `first`, as many of the next, ... of `last` - 1, again.

        With ids, elements are (element, int64 [3]): epoch, shard, record.
        """
        identified = self.identified(first, last, replica_batch_size)
        return identified.map(self._load(with_ids), tf.data.AUTOTUNE, deterministic=True)

    def batch_at(self, step, k, with_ids: bool = False):
        """The b examples of logical replica k in step number `step`, from 0: what `examples` would give there, as one batch.

        In a graph, on any worker, without those before; `step` and `k` are scalar int64 tensors.
        """
        size, read = self._replica_batch_size, Records(self._manifest, self._manifest.train)
        numbers, epochs = Order(read, self._shards, self._seed, self._buffer).at(step * size, size, k)
        found = tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(epochs), read.read(numbers))
        loaded = found.map(lambda epoch, record: self._load(with_ids)(epoch, *record), **_decoding(self._manifest))
        return loaded.batch(size, drop_remainder=True).get_single_element()

    def _load(self, with_ids):
        def load(epoch, shard, record, serialized):
            image, label = records.parse(serialized, self._manifest)
            # Philox, which tf.random.stateless_* run on, takes any two different keys for independent streams.
            key = tf.stack([self._seed * HIGH + epoch, shard * HIGH + record])
            element = self._preprocessing.train(image, key), _as_wanted(label, self._one_hot)
            return (element, tf.stack([epoch, shard, record])) if with_ids else element

        return load

    def _epoch(self, k, epoch):
        """One pass over the shards of k, in another order each time, as are the examples of each block of the buffer's size."""

        def mixed(block, examples):
            order = shuffled(tf.range(tf.shape(examples[0])[0]), self._seed, epoch, k, block + 1)
            return tf.data.Dataset.from_tensor_slices(tuple(tf.gather(column, order) for column in examples))

        files = tf.data.Dataset.from_tensor_slices(shuffled(tf.constant(self._shards)[k], self._seed, epoch, k, 0))
        examples = files.flat_map(lambda shard: _records(self._manifest, self._manifest.train, shard))
        blocks = examples.batch(self._buffer).enumerate()
        mixed_examples = blocks.flat_map(mixed)
        return mixed_examples.map(lambda shard, record, serialized: (epoch, shard, record, serialized))


class UnitStreams(TrainingStreams):
    """The same examples for asynchronous updates, each of one logical replica's batch.

    Batch number u is that of logical replica u mod K in step u div K, and an epoch is round(n / b) of them.
    """

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.steps = max(1, round(int(self._examples.sum()) / self._replica_batch_size))

    def batch_at(self, step, k, with_ids: bool = False):
        """Batch number `step`; there is one logical replica alone, k = 0."""
        replicas = len(self._shards)
        return super().batch_at(step // replicas, step % replicas, with_ids)


class EvaluationStreams:
    """The held-out examples, each once: elements ((image, label), valid), as `cluster.Trainer.evaluate` takes them.

    Logical replica k has the k-th of K equal, contiguous parts of the set in input order, padded at its end with what is not
    valid. So each worker reads its part alone, and every example counts once for any N, batch and size of the set.

    Args:
      manifest, preprocessing, logical_replicas, one_hot: as for `TrainingStreams`.
      global_batch_size: examples in one step of evaluation.
    """

    def __init__(
        self,
        manifest: Manifest,
        preprocessing: Preprocessing,
        logical_replicas: int,
        global_batch_size: int,
        one_hot: int = 0,
    ):
        self._manifest, self._preprocessing, self._one_hot = manifest, preprocessing, one_hot
        ends = np.cumsum([0] + [shard.examples for shard in manifest.test.shards])
        part = -(-int(ends[-1]) // logical_replicas)
        self.steps = max(1, -(-part // (global_batch_size // logical_replicas)))
        self.logical_replicas, self._replica_batch_size = logical_replicas, global_batch_size // logical_replicas
        self._pieces = []  # for each k: [shard, first record, records]
        for k in range(logical_replicas):
            start, stop = min(k * part, ends[-1]), min((k + 1) * part, ends[-1])
            touched = [s for s in range(len(ends) - 1) if ends[s] < stop and ends[s + 1] > start]
            self._pieces.append([[s, max(start - ends[s], 0), min(stop, ends[s + 1]) - max(start, ends[s])] for s in touched])
        self.element_spec = (
            (tf.TensorSpec(preprocessing.shape, tf.float32), _label_spec(one_hot)),
            tf.TensorSpec([], tf.bool),
        )

    def examples(self, first: int, last: int, replica_batch_size: int) -> tf.data.Dataset:
        """Endless passes over the set, `replica_batch_size` of each logical replica in turn; see the class."""
        pieces = tf.ragged.constant(self._pieces, dtype=tf.int64, ragged_rank=1, inner_shape=(3,))
        padding = tf.data.Dataset.from_tensors((tf.constant(""), tf.constant(False))).repeat()

        def stream(k):
            def piece(place):
                shard = _records(self._manifest, self._manifest.test, place[0])
                return shard.skip(place[1]).take(place[2])

            real = tf.data.Dataset.from_tensor_slices(pieces[k]).flat_map(piece)
            real = real.map(lambda shard, record, serialized: (serialized, True))
            return real.concatenate(padding).take(self.steps * replica_batch_size).repeat()

        return _in_turn(stream, first, last, replica_batch_size).map(self._load(), tf.data.AUTOTUNE, deterministic=True)

    def batch_at(self, step, k):
        """The batch of logical replica k in step number `step`, from 0, of an evaluation: see `TrainingStreams.batch_at`."""
        size = self._replica_batch_size
        read = Records(self._manifest, self._manifest.test)
        numbers = [_numbers(read, pieces)[: self.steps * size] for pieces in self._pieces]
        table = tf.ragged.constant([n.tolist() for n in numbers], dtype=tf.int64, ragged_rank=1)
        place = step % self.steps * size
        real = read.read(table[k][place : place + size]).map(lambda shard, record, serialized: (serialized, True))
        padding = tf.data.Dataset.from_tensors((tf.constant(""), tf.constant(False))).repeat()
        loaded = real.concatenate(padding).take(size).map(self._load(), **_decoding(self._manifest))
        return loaded.batch(size, drop_remainder=True).get_single_element()

    def _load(self):
        def load(serialized, valid):
            def real():
                image, label = records.parse(serialized, self._manifest)
                return self._preprocessing.evaluate(image), _as_wanted(label, self._one_hot)

            label_spec = _label_spec(self._one_hot)
            nothing = (tf.zeros(self._preprocessing.shape), tf.zeros(label_spec.shape, label_spec.dtype))
            return tf.cond(valid, real, lambda: nothing), valid

        return load


def _decoding(manifest):
    """How the examples of a batch are loaded: in parallel if that is worth the start of threads."""
    parallel = manifest.image_dtype == "encoded"
    return {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": True} if parallel else {}


def _numbers(read, pieces):
    """The numbers of the records in an evaluation's pieces, which count a shard's records without those that are bad."""
    ranges = [np.arange(first, min(first + count, read.counts[shard])) + read.starts[shard] for shard, first, count in pieces]
    return np.concatenate([np.zeros(0, np.int64), *ranges]).astype(np.int64)


def _label_spec(one_hot):
    return tf.TensorSpec([one_hot], tf.float32) if one_hot else tf.TensorSpec([], tf.int32)


def _as_wanted(label, one_hot):
    return tf.one_hot(label, one_hot) if one_hot else label


def _in_turn(stream, first, last, replica_batch_size):
    return tf.data.Dataset.range(first, last).interleave(
        stream,
        cycle_length=last - first,
        block_length=replica_batch_size,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def _records(manifest: Manifest, split: Split, shard):
    """The records of one shard, by index: (shard, record, serialized), without those that the manifest calls bad."""
    paths = tf.constant([manifest.path(shard) for shard in split.shards])
    dataset = tf.data.TFRecordDataset(paths[shard]).enumerate()
    dataset = dataset.map(lambda record, serialized: (shard, record, serialized))
    if split.bad:
        bad = tf.constant(split.bad, tf.int64)
        dataset = dataset.filter(
            lambda shard, record, _: ~tf.reduce_any(tf.reduce_all(bad == tf.stack([shard, record]), axis=1))
        )
    return dataset


def _bad_by_shard(split):
    return {shard: sum(1 for s, _ in split.bad if s == shard) for shard, _ in split.bad}
