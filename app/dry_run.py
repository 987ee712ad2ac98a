"""What a training would do, in lines, without starting it: batches, steps, rates, parameters, memory, files, threads."""

import itertools
import os

import keras

from app import config as config_module
from app import data as data_module
from app import optimizers, run_dir, schedules
from app.assembly import network, of_update, rate
from app.plan import plan
from cluster.tree import maximal_nodes

_TENSORFLOW_MB = 850  # resident memory of a worker on Linux whose network and data are tiny (measured, CPU)


def lines(config, workers: int, recipe: str, serving: int = 0):
    """Yields the lines.

    Args:
      config: the resolved configuration.
      workers: processes of the cluster.
      recipe: that it is based on, or "".
      serving: so many workers compute for a coordinator, and `workers` is 1.
    Raises:
      UsageError: for what would stop the training at its start.
    """
    if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, workers):
        raise config_module.UsageError(problem)
    ended = run_dir.finished(config)
    said = []
    data = data_module.load(config, said.append)
    yield from said
    if recipe:
        yield f"recipe {recipe}"
    steps_per_epoch = data.training.steps
    epochs = -(-config.steps // steps_per_epoch) if config.steps else config.epochs
    total_steps = config.steps or epochs * steps_per_epoch
    yield from plan(config, data, workers, steps_per_epoch, epochs, serving)
    config = of_update(config)
    yield f"{total_steps:,} steps of {config.global_batch_size} examples: {total_steps * config.global_batch_size:,} in all"

    keras.config.set_dtype_policy(config.dtype)
    plain = network(config, data)
    schedule = rate(config, data, total_steps)
    optimizer = optimizers.make(config, schedule, plain)
    trainable = sum(weight.shape.num_elements() for weight in plain.trainable_variables)
    yield f"{config.model} for images of {data.image_shape}: {plain.count_params():,} parameters, {trainable:,} of them trained"
    yield ""
    yield from schedules.table(schedule).splitlines()
    yield ""
    optimizer.build(plain.trainable_variables)
    for name, size in memory(plain, optimizer, config, workers).items():
        yield f"{size / 1e6:>10,.1f} MB  {name}"
    yield ""
    share = config.logical_replicas // workers
    for worker in range(workers):
        shards = data.training.shards_of(worker, workers)
        files = [data.manifest.path(data.manifest.train.shards[shard]) for shard in shards]
        size = sum(os.path.getsize(file) for file in files if os.path.exists(file))
        mine = _ranges(range(worker * share, (worker + 1) * share))
        yield (
            f"worker {worker}: logical replicas {mine}, shards {_ranges(shards)} ({len(shards)} files, {size / 1e6:,.1f} MB)"
        )
    yield f"each with --intra_op_threads={config.intra_op_threads}, {config.dtype}, on its GPUs if it has any, else the CPU"
    yield ended or f"it would be written to {config.run_dir}"


def memory(plain, optimizer, config, workers: int) -> dict[str, int]:
    """An estimate of what one worker holds, in bytes by purpose; the last entry is the sum.

    Counted: variables; the partial sums of the tree, of which a block of K/N passes holds log2(K/N) + 2; three packs of the
    reduction; and every layer's output for the examples of a pass, once for the forward and once for the backward pass.
    """
    weights = sum(_bytes(v) for v in plain.trainable_variables)
    state = sum(_bytes(v) for v in plain.non_trainable_variables)
    block = config.logical_replicas // workers
    examples = config.replica_batch_size
    if config.batch_norm == "global":  # a worker's examples are one pass
        block, examples = 1, config.global_batch_size // workers
    lists = sum(size.bit_length() + 1 for _, size in maximal_nodes(0, block))
    width = 4 if config.dtype == "float32" else 2
    outputs = 0
    for layer in plain._flatten_layers(include_self=False):
        with_outputs = getattr(layer, "output", None) if layer._inbound_nodes else None
        for tensor in keras.tree.flatten(with_outputs):
            if tensor is not None:
                outputs += width * examples * abs(_product(tensor.shape[1:]))
    found = {
        "weights and moving statistics": weights + state,
        "optimizer": sum(_bytes(v) for v in optimizer.variables),
        "partial sums of gradients": lists * (weights + state),
        "packs of the reduction": 3 * (weights + state) if workers > 1 else 0,
        f"layers' outputs of {examples} examples, twice": 2 * outputs,
        "Python, TensorFlow, Keras": _TENSORFLOW_MB * 10**6,
    }
    return found | {"estimated for each worker, without data buffers": sum(found.values())}


def _bytes(variable):
    return _product(variable.shape) * (8 if variable.dtype.endswith("64") else 4)


def _product(shape):
    size = 1
    for length in shape:
        size *= length or 1
    return size


def _ranges(numbers):
    """0-3, 8-11."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in run]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
