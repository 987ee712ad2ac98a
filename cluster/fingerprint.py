"""sha256 of a run's result: equal exactly if the runs are the same to the last bit."""

import hashlib
import math
import struct

import keras
import numpy as np

from cluster.replica_pass import is_seed


def run_sha256(trainer, history: dict[str, list[float]]) -> str:
    """Hashes what a run ended with: the same function for the summary, for verification and for tests.

    In this order: trainable weights, moving statistics, optimizer variables (the model's order; every variable's shape and
    bytes), then the logged metrics by name, every value as a float64. Times belong in no history that is hashed. The
    states of random layers are left out: they are a function of seed and step.

    Args:
      trainer: a `cluster.Trainer`, or any compiled Keras model.
      history: Keras's History.history.
    """
    digest = hashlib.sha256()
    moving = [v for v in trainer.non_trainable_variables if not is_seed(v)]
    for variable in [*trainer.trainable_variables, *moving, *trainer.optimizer.variables]:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(repr(value.shape).encode() + value.tobytes())
    for name in sorted(history):
        values = [math.nan if math.isnan(v) else float(v) for v in history[name]]  # one NaN for all its bit patterns
        digest.update(name.encode() + struct.pack(f"<{len(values)}d", *values))
    return digest.hexdigest()
