"""One training run, top to bottom: the same function for every number of workers."""

import dataclasses
import json
import os
import platform
import time

import keras
import numpy as np
import tensorflow as tf

import app
from app import callbacks, faults
from app import config as config_module
from app import data as data_module
from cluster import Trainer, spec
from cluster.agreement import agree
from cluster.fingerprint import run_sha256
from models import build


def train(config: config_module.Config, strategy) -> dict:
    """Trains, evaluates after every epoch, and writes `model.keras` and `config.json` to the run directory.

    Args:
      config: the resolved configuration.
      strategy: the tf.distribute strategy; its replicas share the logical replicas.
    Returns:
      {"sha256": of weights, optimizer and metrics; "history": Keras's; "seconds": of fit}.
    Raises:
      UsageError: for mistakes that show only here: the number of GPUs does not fit K, raw data that cannot be used.
      faults.DataFault: if a record cannot be read; the message names it.
    """
    me = spec.from_environment()
    chief = strategy.extended.should_checkpoint
    say = print if chief else lambda *_, **__: None
    replicas = strategy.num_replicas_in_sync
    data = open_data(config, strategy, me, say)
    if chief:
        _make_run_dir(config)
    steps_per_epoch = data.training.steps
    epochs = -(-config.steps // steps_per_epoch) if config.steps else config.epochs
    _narrate(config, data, replicas, steps_per_epoch, epochs, say)

    keras.config.set_dtype_policy(config.dtype)
    with strategy.scope():
        plain = _network(config, data)
        model = trainer(config, plain)
        compile_trainer(model, optimizer(config, config.steps or epochs * steps_per_epoch), config, len(data.manifest.classes))
    if chief:
        _write_config(config, data.manifest, replicas)
    say(f"{plain.count_params():,} parameters; tracing the first step", flush=True)

    started = time.monotonic()
    steps = [int(step) for step in config.eval_at_steps.split(",") if step]
    with faults.named(data, me):
        history = model.fit(
            data.training,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            total_steps=config.steps or None,
            validation_data=data.evaluation,
            callbacks=[
                callbacks.EvaluateAt(data.evaluation, config.eval_every_steps, steps, config.eval_at_start, say),
                callbacks.EpochLines(epochs, config.global_batch_size * steps_per_epoch, say),
            ],
            verbose=0,
        ).history
    seconds = time.monotonic() - started

    path = os.path.join(config.run_dir, "model.keras")
    model.save(path)
    sha256 = run_sha256(model, history)
    say(f"\ntrained {model.step} steps in {seconds:.1f} s on {replicas} {'worker' if replicas == 1 else 'workers'}")
    if data.evaluation:
        best, last = int(np.argmax(history["val_top_1"])), history["val_top_1"][-1]
        right, of = round(last * model.examples_evaluated), model.examples_evaluated
        say(f"held out: {right:,} of {of:,} right, top-1 {last:.4f} (best in epoch {best + 1})")
    say(f"saved   {path}, {os.path.join(config.run_dir, 'config.json')}")
    say(f"sha256  {sha256}  (weights, optimizer, metrics: the same for any number of workers)", flush=True)
    return {"sha256": sha256, "history": history, "seconds": seconds}


def open_data(config, strategy, me, say, **facts) -> data_module.Data:
    """The data of a run, checked; and the workers' agreement on it, on the configuration, and on further `facts`.

    Raises:
      UsageError, faults.DataFault, cluster.spec.ClusterError: each in one line.
    """
    replicas = strategy.num_replicas_in_sync
    what = "{} replicas (workers times the GPUs of each)"
    if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, replicas, what):
        raise config_module.UsageError(problem)
    data = data_module.load(config, say)
    places = ("data_dir", "prepared_dir", "run_dir")
    same = {name: value for name, value in dataclasses.asdict(config).items() if name not in places}
    agree(me, {**same, "data manifest": data.manifest.digest(), **facts})
    return data


def _make_run_dir(config):
    try:
        tf.io.gfile.makedirs(config.run_dir)
    except tf.errors.OpError as error:
        raise config_module.UsageError(f"--run_dir={config.run_dir} cannot be made: {error.message}") from None


def _network(config, data):
    try:
        return build(config.model, data.image_shape, len(data.manifest.classes))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise config_module.UsageError(f"--model={config.model} cannot take images of {data.image_shape}: {reason}") from None


def trainer(config, plain) -> Trainer:
    """The plain model wrapped for the run; to be called under the strategy's scope."""
    return Trainer(
        plain, config.global_batch_size, config.logical_replicas, config.seed, config.identical, config.communication
    )


def compile_trainer(model, optimizer, config, classes, metrics=()):
    """Cross entropy of logits; top-1, and top-5 where there are more than five classes."""
    top_5 = [keras.metrics.SparseTopKCategoricalAccuracy(k=5, name="top_5")] if classes > 5 else []
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="top_1"), *top_5, *metrics],
        jit_compile=config.jit_compile,
        steps_per_execution=config.steps_per_execution,
    )


def optimizer(config, total_steps):
    """The configured optimizer; a schedule runs over `total_steps`."""
    rate = config.learning_rate
    if config.schedule == "cosine":
        rate = keras.optimizers.schedules.CosineDecay(rate, total_steps)
    common = {"learning_rate": rate, "weight_decay": config.weight_decay or None}
    match config.optimizer:
        case "sgd":
            return keras.optimizers.SGD(**common)
        case "momentum" | "nesterov":
            return keras.optimizers.SGD(momentum=0.9, nesterov=config.optimizer == "nesterov", **common)
        case "adam":
            return keras.optimizers.Adam(**common)
        case "adamw":
            return keras.optimizers.AdamW(**common)
    raise AssertionError(config.optimizer)


def _narrate(config, data, replicas, steps_per_epoch, epochs, say):
    manifest = data.manifest
    say(
        f"{config.model} on {config.dataset}: {manifest.train.examples:,} examples in {len(manifest.train.shards)} shards "
        f"to train with, {manifest.test.examples:,} held out"
    )
    say(
        f"global batch {config.global_batch_size} = {config.logical_replicas} logical replicas x {config.replica_batch_size}; "
        f"{config.logical_replicas // replicas} on each of {replicas} {'worker' if replicas == 1 else 'workers'}"
    )
    say(
        f"{epochs} epochs of {steps_per_epoch} steps (round({manifest.train.examples:,} / {config.global_batch_size})); "
        f"{config.intra_op_threads} intra-op thread a worker (part of the run: the bits follow it)",
        flush=True,
    )


def _write_config(config, manifest, replicas):
    """Leaves what this run was made of beside its model, whole or not at all."""
    record = {
        **dataclasses.asdict(config),
        "replicas": replicas,
        "classes": manifest.classes,
        "label_offset": manifest.label_offset,
        "data_manifest": manifest.digest(),
        "versions": {
            "lockstep": app.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
    path = os.path.join(config.run_dir, "config.json")
    with tf.io.gfile.GFile(path + ".tmp", "w") as file:
        file.write(json.dumps(record, indent=2) + "\n")
    tf.io.gfile.rename(path + ".tmp", path, overwrite=True)
