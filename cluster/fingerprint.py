"""What a run did at a step, in numbers that can be compared: fingerprints.jsonl, and the sha256 of a run's result.

A file of fingerprints is text, one JSON object a line, written by the chief while the run goes on. Hashes are 16 hexadecimal
digits, equal exactly if all bits are (`digest.py`); numbers are float64, written so that reading gives the same bits.
Logical replica k of K has the places [k B/K, (k+1) B/K) of the global batch of B examples.

The first line says what the others are about:
    format             1
    made_by            "cluster.Trainer" or "cluster.watch"
    every              E: recorded are the first step of the file and those that E divides
    global_batch_size  B; logical_replicas  K; replicas  N, of the strategy; seed; identical
    batch_norm         'replica' or 'global': which examples the statistics of batch normalisation are taken over
    weights, statistics, optimizer
                       [[path, shape, dtype] of each variable]: trainable weights, moving statistics, the optimizer's variables
    gradients          the positions in `weights` of which there are gradients
    metrics            [[path, shape, dtype]] of the variables that hold metrics' sums
    kept               by `watch`: the folder of states and batches, relative to the file's

The second holds the state before the first step; its `step` is the number of steps made before, 0 for a new run:
    step, weights, statistics, optimizer
where each of the three is {"hash": [a tensor], "norm": [a tensor], "projections": [[8] a tensor]}.

Then one line for each recorded step:
    step               t: this is the t-th step, from 1
    loss               float.hex() of the step's loss over the global batch
    metrics            {name: value} over the global batch, loss included
    metric_sums        [[elements] of each of the header's metrics]: the exact sums of this step
    learning_rate, loss_scale
    ids                [[epoch, shard, record] of each of B examples], where the data tells
    x, y               [hash of each of B examples], after augmentation; sample weights go with y
    replicas           by logical replica: {"metric_sums": [K][...], "gradient_norm": [K], "gradient_projections": [K][8]}; its
                       gradient is taken as one vector (`digest.of_all`), without the loss scale, not divided by K
    gradient           of the finished global gradient: divided by K, without the loss scale, before clipping
    update             weights after the step - before
    weights, statistics, optimizer
                       after the step
    workers            by replica of the strategy, after the step: {"weights": [N hashes], "statistics": [N hashes]}

And one for each evaluation:
    evaluation_after   steps made before it
    metrics, metric_sums, examples
                       {name: value}; the sums; how many examples were counted

What is not known is absent: a file made by `watch` has no `replicas`, and `gradient` and `ids` only where they can be had. With
batch_norm 'global' lines have no `replicas` either: a worker's logical replicas are one pass.
"""

import hashlib
import json
import math
import struct

import keras
import numpy as np
import tensorflow as tf

from cluster import digest, drift, observe
from cluster.replica_pass import is_seed

FORMAT = 1


class Recorder:
    """Writes a trainer's fingerprints: pass it to `Trainer.fit(fingerprints=...)`, one on every worker.

    Args:
      path: of the file, which the chief writes anew; None: no file.
      every: record the first step, and every so many.
      listen: called on every worker with each line, a dict, when it is written; an exception from it ends `fit`.
      lines: go on with the file, which has so many lines; 0: begin anew.

    Attributes:
      lines: how many the file has.
    """

    def __init__(self, path, every=1, listen=None, lines=0):
        if every < 1:
            raise ValueError(f"every={every}: record every so many steps, at least 1")
        self.every, self._path, self._listen, self.lines = every, path, listen, lines

    def due(self, step: int) -> bool:
        """Whether step number `step`, from 1, is to be recorded."""
        return step == self._first or step % self.every == 0

    def begin(self, trainer):
        """Writes what precedes the first step."""
        self._trainer, chief = trainer, trainer.distribute_strategy.extended.should_checkpoint
        self._file = tf.io.gfile.GFile(self._path, "a" if self.lines else "w") if self._path and chief else None
        self._first, variables = None if self.lines else trainer.step + 1, trainer._step.variables
        header = {
            "format": FORMAT,
            "made_by": "cluster.Trainer",
            "every": self.every,
            "global_batch_size": trainer.global_batch_size,
            "logical_replicas": trainer.logical_replicas,
            "replicas": trainer.reduction.replicas,
            "seed": trainer.seed,
            "identical": trainer.reduction.ordered,
            "batch_norm": trainer.batch_norm,
            **{kind: described(of_kind) for kind, of_kind in variables.items()},
            "gradients": trainer._step.differentiable(),
            "metrics": described(trainer.metrics_variables),
        }
        self._by_replica = trainer.batch_norm == "replica"
        self._sizes = [math.prod(shape) for _, shape, _ in header["metrics"]]
        if not self.lines:
            self._write(header)
            self._write({"step": trainer.step, **state(variables)})

    def stepped(self, step, metrics, metric_sums, seen):
        """Writes a step: its number, its metrics and their sums, and what `Step.train` has observed, as tensors.

        Raises:
          drift.Drift: on every worker, if they do not hold the same weights and moving statistics after it.
        """
        seen = tf.nest.map_structure(lambda tensor: tensor.numpy(), seen)
        examples = seen["examples"].reshape([-1, seen["examples"].shape[-1]])
        numbers, sums = np.split(seen["replicas"], [1 + digest.PROJECTIONS], axis=1)
        cuts = np.cumsum(self._sizes)[:-1]
        of_replicas = {
            "metric_sums": [[part.tolist() for part in np.split(row, cuts)] for row in sums],
            "gradient_norm": np.sqrt(numbers[:, 0]).tolist(),
            "gradient_projections": numbers[:, 1:].tolist(),
        }
        self._write(
            {
                "step": step,
                "loss": metrics["loss"].hex(),
                "metrics": metrics,
                "metric_sums": metric_sums,
                "learning_rate": float(seen["learning_rate"]),
                "loss_scale": float(seen["loss_scale"]),
                **({"ids": examples[:, :-2].tolist()} if examples.shape[1] > 2 else {}),
                "x": digest.hex_digits(examples[:, -2]),
                "y": digest.hex_digits(examples[:, -1]),
                **({"replicas": of_replicas} if self._by_replica else {}),
                **{k: seen[k].json() for k in ("gradient", "update", "weights", "statistics", "optimizer")},
                "workers": {
                    "weights": digest.hex_digits(seen["workers"][:, 0]),
                    "statistics": digest.hex_digits(seen["workers"][:, 1]),
                },
            }
        )

    def evaluated(self, step, metrics, metric_sums, examples):
        """Writes an evaluation."""
        line = {"evaluation_after": step, "metrics": metrics, "metric_sums": metric_sums, "examples": examples}
        self._write(line)

    def end(self):
        """Closes the file."""
        self._trainer = None
        if self._file:
            self._file.close()

    def _write(self, line):
        self.lines += 1
        if self._file:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if "workers" in line:
            drift.check(self._trainer, line)
        if self._listen:
            self._listen(line)


def described(variables) -> list[tuple[str, list[int], str]]:
    """Path, shape and type of each variable."""
    return [(v.path, list(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]


def state(variables: dict[str, list]) -> dict[str, dict]:
    """The digests of variables by kind, as the lines hold them."""
    return {kind: digest.of(observe.values(of_kind)).json() for kind, of_kind in variables.items()}


def read(path: str) -> list[dict]:
    """The lines of a file of fingerprints; one that was cut off at its end is left out.

    Raises:
      ValueError: if it is no such file, or of another format; OSError, tf.errors.OpError: if it cannot be read.
    """
    lines = tf.io.gfile.GFile(path).read().splitlines()
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} is damaged") from None
    if not found or not isinstance(found[0], dict) or found[0].get("format") != FORMAT:
        raise ValueError(f"{path} is no file of fingerprints of format {FORMAT}")
    for number, line in enumerate(found[1:], 2):
        if not isinstance(line, dict) or not {"step", "evaluation_after"} & set(line):
            raise ValueError(f"{path}: line {number} is damaged")
    return found


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
