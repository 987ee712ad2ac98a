"""Lockstep as a user runs it: the time of every training step of Trainer.fit on W worker processes, in one line of JSON.

    python -m benchmarks.lockstep_step --workers=2 --batch=128

The data is one batch in memory, repeated.
"""

import contextlib
import pathlib
import sys
import tempfile

from benchmarks import work
from cluster import launcher


def main() -> int:
    return on_workers("benchmarks.lockstep_step", work.parser(__doc__), as_worker)


def on_workers(module, parser, as_worker, workers=1) -> int:
    """Runs a script of this folder once for each worker, and prints the line that one of them leaves. Returns the exit status.

    Args:
      module: the script's name for -m.
      parser: of its flags; --workers (default: `workers`), --steps_per_execution and --child are added.
      as_worker: called with the flags in a worker; writes the line to the file `child`, and ends the process.
    """
    parser.add_argument("--workers", type=int, default=workers, help="processes on 127.0.0.1")
    parser.add_argument("--steps_per_execution", type=int, default=1, help="steps in one call; their time is divided evenly")
    parser.add_argument("--child", default="", help="for the script itself: be a worker, and write the line to this file")
    options = parser.parse_args()
    if options.child:
        as_worker(options)
    with tempfile.TemporaryDirectory() as folder:
        line = pathlib.Path(folder, "line.json")
        command = [sys.executable, "-m", module, *sys.argv[1:], f"--child={line}"]
        with contextlib.redirect_stdout(sys.stderr):  # the workers' output
            status = launcher.run(command, options.workers)
        if status == 0:
            print(line.read_text())
        return status


def as_worker(options):
    """Trains as this process's part in the cluster; does not return."""
    import cluster

    work.set_inter_op_threads(options.inter_op_threads)
    cluster.run(lambda strategy: train(options, strategy), options.identical, options.threads)


def train(options, strategy, at_end=lambda: None):
    import keras
    import tensorflow as tf

    import cluster
    from cluster import reduction

    if options.bucket_kb:
        reduction.BUCKET_BYTES = options.bucket_kb << 10

    class Repeated:
        """One batch, endlessly, as streams that `Trainer.fit` takes (cluster/datasets.py)."""

        def __init__(self, images, labels, steps):
            self._columns, self.steps = (images, labels), steps
            self.element_spec = tuple(tf.TensorSpec(column.shape[1:], column.dtype) for column in self._columns)

        def examples(self, first, last, replica_batch_size):
            rows = slice(first * replica_batch_size, last * replica_batch_size)
            return tf.data.Dataset.from_tensor_slices(tuple(column[rows] for column in self._columns)).repeat()

    with strategy.scope():
        trainer = cluster.Trainer(
            work.network(options.model), options.batch, options.logical_replicas or None, identical=options.identical
        )
        trainer.compile(
            work.optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="top_1"), keras.metrics.SparseTopKCategoricalAccuracy(5)],
            jit_compile=options.jit_compile,
            steps_per_execution=options.steps_per_execution,
        )
    each = options.steps_per_execution
    warmup, timed = max(1, -(-options.warmup // each)), -(-options.steps // each)  # in executions
    clock = work.Clock()
    at_ends = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: (clock.tick(), at_end()))
    streams = Repeated(*work.batch(options.model, options.batch), each * (warmup + timed))
    trainer.fit(streams, epochs=1, callbacks=[at_ends], verbose=0)
    if strategy.extended.should_checkpoint:
        facts = {"workers": options.workers, "logical_replicas": trainer.logical_replicas, "steps_per_execution": each}
        pathlib.Path(options.child).write_text(clock.report(options, warmup, each, side="Lockstep", **facts))


if __name__ == "__main__":
    sys.exit(main())
