"""Damaged data, named: which file, which record, what is wrong with it.

TensorFlow reports a damaged record without its file. When a step fails on its data, the worker that met the fault looks
through its own shards. (Missing and cut files are found before: opening prepared data compares their sizes with the manifest.)
"""

import contextlib
import sys

import tensorflow as tf

from app import records
from app.config import UsageError
from app.data import Data

# What TensorFlow raises for damaged records; not what it raises when memory or another worker is gone.
_OF_DATA = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
)


class DataFault(ValueError):
    """A record that cannot be used: one line with file, record number and reason."""


@contextlib.contextmanager
def named(data: Data, me):
    """Within the block, an error of TensorFlow that comes from this worker's data is raised as a DataFault.

    And one that says that an operation has no deterministic form, as a UsageError.
    """
    try:
        yield
    except tf.errors.UnimplementedError as error:
        reason = next((line for line in error.message.splitlines() if "determinis" in line), None)
        if reason is None:
            raise
        raise UsageError(
            f"an operation has no deterministic form here: {reason.strip(' .')}. Use --noidentical, or do without it "
            "(--nojit_compile, if that was given; or another network)"
        ) from None
    except _OF_DATA as error:
        print("a step failed on its data; looking for the damaged record in this worker's files", file=sys.stderr, flush=True)
        if fault := _find(data, me):
            raise DataFault(fault) from error
        raise


def _own(data, me):
    workers, number = (me.trainers, me.number) if me else (1, 0)
    return data.training.shards_of(number, workers)


def _find(data, me):
    """The first fault in this worker's shards, or None: framing and checksums, then what the records hold."""
    manifest = data.manifest
    for split, shards in ((manifest.train, _own(data, me)), (manifest.test, range(len(manifest.test.shards)))):
        for shard in shards:
            path = manifest.path(split.shards[shard])
            try:
                records.scan(path)
            except (records.RecordError, OSError) as error:
                return str(error)
            for record, serialized in enumerate(tf.data.TFRecordDataset(path)):
                if (shard, record) in split.bad:
                    continue
                try:
                    data.treatment.evaluate(records.parse(serialized, manifest)[0])
                except tf.errors.OpError as error:
                    return f"{path}, record {record}: {records.reason(error)}"
    return None
