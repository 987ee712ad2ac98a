"""tf.data pipelines of global batches, made fit for any number of workers: sizes checked, endless, padded by weight 0.

A training data set yields global batches of exactly B examples; tf.distribute's auto-sharding gives replica i of N the
i-th of N equal parts of each. An evaluation data set may end with a smaller batch, which is padded; the padding is marked
and left out before the model sees it, so every example counts once and nothing else does.
"""

import typing

import numpy as np
import tensorflow as tf

_POLICY = tf.data.experimental.AutoShardPolicy


class Streams(typing.Protocol):
    """Examples by logical replica, for data that no worker should read whole: an alternative to a tf.data.Dataset.

    Attributes:
      element_spec: tf.TensorSpecs of one element: (x, y[, sample_weight]) to train with, ((x, y[, sample_weight]), valid) to
        evaluate, where elements that are not valid come last in a logical replica's batch.
      steps: steps of an epoch, or of an evaluation.
      ids: tf.TensorSpec([n], int64) of what names an example, if `examples` can tell it; optional.
    """

    element_spec: tuple
    steps: int

    def examples(self, first: int, last: int, replica_batch_size: int) -> tf.data.Dataset:
        """Endless elements of the logical replicas [first, last): `replica_batch_size` of each in turn.

        With `ids`, it takes with_ids=True and then yields (element, ids).
        """


def distribute(streams: Streams, strategy, logical_replicas: int, global_batch_size: int, with_ids: bool = False):
    """Gives every worker the streams of its own logical replicas, in batches of a replica of the strategy."""
    replica_batch_size = global_batch_size // logical_replicas

    def of_worker(context):
        share = logical_replicas // context.num_input_pipelines
        first = context.input_pipeline_id * share
        named = {"with_ids": True} if with_ids else {}
        examples = streams.examples(first, first + share, replica_batch_size, **named)
        batches = examples.batch(global_batch_size // strategy.num_replicas_in_sync, drop_remainder=True)
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return batches.apply(endless).prefetch(2)

    return strategy.distribute_datasets_from_function(of_worker)


def batch_spec(element_spec, global_batch_size: int):
    """The specs of a batch, from those of an element."""
    return tf.nest.map_structure(lambda s: tf.TensorSpec([global_batch_size, *s.shape], s.dtype), element_spec)


def training(dataset, global_batch_size, strategy, steps_per_epoch=None):
    """Checks a data set of global batches and makes it endless.

    Endless, because for a data set that may end tf.distribute asks all workers before every step whether it has, and
    because a finite one is then cut into epochs in the same way everywhere.

    Returns:
      (dataset, steps_per_epoch).
    Raises:
      ValueError: if it is not a tf.data.Dataset of batches of B, or its length is not known.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"fit takes a tf.data.Dataset of global batches; got {type(dataset).__name__}.")
    sizes = {spec.shape[0] if spec.shape.rank else None for spec in tf.nest.flatten(dataset.element_spec)}
    if sizes != {global_batch_size}:
        raise ValueError(
            f"fit needs batches of the global batch size, {global_batch_size}, each of them whole, but the data set has "
            f"{_shown(sizes)}. Use .repeat().batch({global_batch_size}, drop_remainder=True)."
        )
    cardinality = int(dataset.cardinality())
    if steps_per_epoch is None:
        if cardinality < 0:
            raise ValueError("The data set's length is not known: pass steps_per_epoch.")
        steps_per_epoch = cardinality
    if steps_per_epoch < 1:
        raise ValueError(f"The data set has no batch of {global_batch_size}: it is smaller. Call .repeat() before .batch().")
    if cardinality > 0:
        dataset = dataset.repeat()
    return _arranged(dataset, strategy), steps_per_epoch


def evaluation(data, strategy, logical_replicas, batch_size, steps=None):
    """Makes an endless data set of (element, valid) from a finite one; `valid` marks what is not padding.

    Args:
      data: a tf.data.Dataset of batches, of which the last may be smaller, or a tuple of arrays (x, y[, weight]).
      logical_replicas: K; batches are padded at their end to a multiple of it.
      batch_size: for arrays.
      steps: evaluate so many batches instead of all.
    Returns:
      (dataset, steps).
    """
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensor_slices(tuple(data)).batch(batch_size)
    largest = tf.nest.flatten(data.element_spec)[0].shape[0]
    if largest is None:
        largest = max((int(tf.shape(tf.nest.flatten(batch)[0])[0]) for batch in data.take(1)), default=logical_replicas)
    padded_size = -(-largest // logical_replicas) * logical_replicas
    if steps is None:
        steps = int(data.cardinality())
        if steps == tf.data.INFINITE_CARDINALITY:
            raise ValueError("The evaluation data set is endless: pass validation_steps (or steps).")
        if steps < 0:
            steps = int(data.reduce(np.int64(0), lambda count, _: count + 1))
    if steps < 1:
        raise ValueError("The evaluation data set is empty.")

    def pad(*batch):
        size = tf.shape(tf.nest.flatten(batch)[0])[0]

        def grow(tensor):
            widths = [[0, padded_size - size]] + [[0, 0]] * (tensor.shape.rank - 1)
            return tf.ensure_shape(tf.pad(tensor, widths), [padded_size, *tensor.shape[1:]])

        return tf.nest.map_structure(grow, batch), tf.range(padded_size) < size

    return _arranged(data.map(pad, tf.data.AUTOTUNE).repeat(), strategy), steps


def _arranged(dataset, strategy):
    """Sets the sharding policy, and orders a batch's parts so that replica i of N gets the i-th.

    Policy AUTO becomes DATA: what AUTO finds follows from how the pipeline was written, and the order of examples with it.
    Under DATA, tf.data deals the N parts of a batch to the W workers in turn, and each worker hands its R parts to its R
    devices in turn: part r W + w arrives at device r of worker w, which is replica w R + r.
    """
    options = tf.data.Options()
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICY.OFF:
        raise ValueError("auto_shard_policy OFF gives every worker the same batches. Use DATA, or FILE.")
    if policy != _POLICY.FILE:
        options.experimental_distribute.auto_shard_policy = policy = _POLICY.DATA
    dataset = dataset.with_options(options)
    devices = len(strategy.extended.worker_devices)
    workers = strategy.num_replicas_in_sync // devices
    if policy == _POLICY.DATA and workers > 1 and devices > 1:
        order = dealing_order(workers, devices)
        dataset = dataset.map(lambda *batch: tf.nest.map_structure(lambda t: _reordered(t, order), batch))
    return dataset


def dealing_order(workers: int, devices: int) -> list[int]:
    """At place p of a batch's parts the replica that tf.data's DATA policy gives it to."""
    return [w * devices + r for r in range(devices) for w in range(workers)]


def _reordered(tensor, order):
    parts = tf.reshape(tensor, [len(order), -1, *tensor.shape[1:]])
    return tf.ensure_shape(tf.reshape(tf.gather(parts, order), tf.shape(tensor)), tensor.shape)


def _shown(sizes):
    return " and ".join("batches of unknown size" if size is None else f"batches of {size}" for size in sizes)
