"""What a benchmark measures with: a batch in memory of a data set's shape, or the data set itself."""

import contextlib
import dataclasses
import types

import numpy as np
import tensorflow as tf

from app import assembly, config, faults, sources
from app.assembly import open_data
from cluster.agreement import agree

_EXAMPLES = 50_000  # of an epoch of invented data: what a schedule goes by
_SHAPES = {  # of images, and classes, as the networks are given them; nothing has to be read
    "digits": ((8, 8, 1), 10),
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}


def load(settings, flags, strategy, me, say):
    """The data set as `assembly.assemble` needs it, the streams to measure with, and a context that names what is damaged.

    Raises:
      UsageError, faults.DataFault, cluster.spec.ClusterError: each in one line.
    """
    if flags.data == "real":
        data = open_data(settings, strategy, me, say, **_facts(flags))
        streams = data.evaluation if flags.forward_only else data.training
        if streams is None:
            raise config.UsageError(f"{settings.dataset} has no held-out examples for --forward_only")
        return data, streams, faults.named(data, me)
    what = "{} replicas (workers times the GPUs of each)"
    replicas = strategy.num_replicas_in_sync
    if problem := config.batch_problem(settings.global_batch_size, settings.logical_replicas, replicas, what):
        raise config.UsageError(problem)
    agree_without(settings, flags, me)
    shape, classes = _shape(settings)
    of_update = assembly.of_update(settings)
    one_hot, replicas = settings.label_smoothing > 0, of_update.logical_replicas
    streams = InMemory(shape, classes, of_update.global_batch_size, settings.seed, one_hot, flags.forward_only, replicas)
    manifest = types.SimpleNamespace(classes=range(classes), train=types.SimpleNamespace(examples=_EXAMPLES))
    data = types.SimpleNamespace(image_shape=shape, manifest=manifest, training=streams)
    return data, streams, contextlib.nullcontext()


def agree_without(settings, flags, me):
    """The workers' agreement on configuration and flags, where no data set is opened."""
    agree(me, settings.shared_fields() | _facts(flags))


def _facts(flags):
    return {name: value for name, value in dataclasses.asdict(flags).items() if name not in ("json", "csv", "picture")}


def _shape(settings) -> tuple[tuple[int, int, int], int]:
    """[height, width, channels] of the data set's images, as a network is given them, and the number of its classes."""
    square = (settings.image_size, settings.image_size, 3)
    if settings.dataset == "imagenet":
        return square, 1000
    if settings.dataset in _SHAPES:
        return _SHAPES[settings.dataset]
    try:
        source = sources.open_source(settings.dataset, settings.data_dir)
    except sources.SourceError as error:
        raise config.UsageError(str(error)) from None
    return tuple(source.image_shape or square), len(source.classes)


class InMemory:
    """Streams of one invented batch that comes again and again: normally distributed pixels, random labels.

    They are functions of (seed, logical replica), as all data is.

    Args:
      shape, classes: of the images.
      global_batch_size: B.
      seed: of the batch.
      one_hot: give labels as float32 [classes].
      evaluation: give ((image, label), valid) instead of (image, label).
      logical_replicas: K, of batches that are asked for by their place.
    """

    def __init__(self, shape, classes, global_batch_size, seed=0, one_hot=False, evaluation=False, logical_replicas=1):
        self._batch, self.logical_replicas = global_batch_size, logical_replicas
        self._shape, self._classes, self._seed = shape, classes, seed
        self._one_hot, self._evaluation = one_hot, evaluation
        self.steps = max(1, round(_EXAMPLES / global_batch_size))
        label = tf.TensorSpec([classes], tf.float32) if one_hot else tf.TensorSpec([], tf.int32)
        element = (tf.TensorSpec(shape, tf.float32), label)
        self.element_spec = (element, tf.TensorSpec([], tf.bool)) if evaluation else element

    def batch_at(self, step, k):
        """For parameter servers: a batch of logical replica k that is made anew, since a worker keeps none."""
        size, key = self._batch // self.logical_replicas, tf.stack([tf.constant(self._seed, tf.int64), k])
        images = tf.random.stateless_normal([size, *self._shape], key)
        labels = tf.random.stateless_uniform([size], key, 0, self._classes, tf.int32)
        element = images, tf.one_hot(labels, self._classes) if self._one_hot else labels
        return (element, tf.ones([size], tf.bool)) if self._evaluation else element

    def examples(self, first, last, replica_batch_size):
        """As `cluster.datasets.Streams` has it, but for `batch`, which cuts whole batches and copies nothing from then on."""
        return types.SimpleNamespace(
            batch=lambda size, drop_remainder: self._batches(range(first, last), replica_batch_size, size)
        )

    def _batches(self, replicas, replica_batch_size, size):
        images, labels = zip(*(self._of(k, replica_batch_size) for k in replicas), strict=True)
        images, labels = np.concatenate(images), np.concatenate(labels)
        batches = None
        for start in range(0, len(images), size):
            element = images[start : start + size], labels[start : start + size]
            element = (element, np.ones(size, bool)) if self._evaluation else element
            one = tf.data.Dataset.from_tensors(element)
            batches = one if batches is None else batches.concatenate(one)
        return batches.repeat()

    def _of(self, k, size):
        rng = np.random.default_rng([self._seed, k])
        labels = rng.integers(0, self._classes, size, dtype=np.int32)
        images = rng.standard_normal((size, *self._shape), dtype=np.float32)
        return images, np.eye(self._classes, dtype=np.float32)[labels] if self._one_hot else labels
