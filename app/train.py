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
from app import config as config_module
from app import data as data_module
from cluster import Trainer
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
      UsageError: if the strategy's number of replicas does not divide K.
    """
    chief = strategy.extended.should_checkpoint
    say = print if chief else lambda *_, **__: None
    replicas = strategy.num_replicas_in_sync
    if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, replicas):
        raise config_module.UsageError(problem)

    data = getattr(data_module, config.dataset)()
    examples = len(data.train_labels)
    steps_per_epoch = data_module.steps_per_epoch(examples, config.global_batch_size)
    epochs = config.epochs
    if config.steps:
        steps_per_epoch = min(steps_per_epoch, config.steps)
        epochs = -(-config.steps // steps_per_epoch)
    say(f"{config.model} on {config.dataset}: {examples} examples to train with, {len(data.test_labels)} held out")
    say(
        f"global batch {config.global_batch_size} = {config.logical_replicas} logical replicas x {config.replica_batch_size}; "
        f"{config.logical_replicas // replicas} on each of {replicas} {'worker' if replicas == 1 else 'workers'}"
    )
    say(
        f"{epochs} epochs of {steps_per_epoch} steps; "
        f"{config.intra_op_threads} intra-op thread a worker (part of the run: the bits follow it)",
        flush=True,
    )

    keras.config.set_dtype_policy(config.dtype)
    with strategy.scope():
        plain = build(config.model, data.image_shape, data.classes)
        model = Trainer(
            plain,
            config.global_batch_size,
            config.logical_replicas,
            config.seed,
            config.identical,
            config.communication,
        )
        model.compile(
            _optimizer(config, epochs * steps_per_epoch),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="top_1"),
                keras.metrics.SparseTopKCategoricalAccuracy(k=5, name="top_5"),
            ],
            jit_compile=config.jit_compile,
            steps_per_execution=config.steps_per_execution,
        )
    if chief:
        _write_config(config, replicas)
    say(f"{plain.count_params():,} parameters; tracing the first step", flush=True)

    started = time.monotonic()
    history = model.fit(
        data_module.training_batches(data, config.global_batch_size, config.seed),
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        validation_data=(data.test_images, data.test_labels),
        callbacks=[EpochLines(epochs, config.global_batch_size * steps_per_epoch)] if chief else [],
        verbose=0,
    ).history
    seconds = time.monotonic() - started

    path = os.path.join(config.run_dir, "model.keras")
    model.save(path)
    sha256 = run_sha256(model, history)
    best = int(np.argmax(history["val_top_1"]))
    correct = round(history["val_top_1"][-1] * len(data.test_labels))
    say(f"\ntrained {model.step} steps in {seconds:.1f} s on {replicas} {'worker' if replicas == 1 else 'workers'}")
    say(
        f"held out: {correct} of {len(data.test_labels)} right, top-1 {history['val_top_1'][-1]:.4f} (best in epoch {best + 1})"
    )
    say(f"saved   {path}, {os.path.join(config.run_dir, 'config.json')}")
    say(f"sha256  {sha256}  (weights, optimizer, metrics: the same for any number of workers)", flush=True)
    return {"sha256": sha256, "history": history, "seconds": seconds}


def _optimizer(config, total_steps):
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


def _write_config(config, replicas):
    """Leaves what this run was made of beside its model, whole or not at all."""
    tf.io.gfile.makedirs(config.run_dir)
    record = {
        **dataclasses.asdict(config),
        "replicas": replicas,
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


class EpochLines(keras.callbacks.Callback):
    """Prints a line an epoch: the metrics of training and evaluation, and the speed of training and evaluating it.

    Args:
      epochs: of the run.
      examples: that one epoch trains with, over all workers.
    """

    def __init__(self, epochs, examples):
        super().__init__()
        self._epochs, self._examples = epochs, examples

    def on_epoch_begin(self, epoch, logs=None):
        self._started = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.monotonic() - self._started
        line = f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}"
        for title, prefix in (("train", ""), ("held out", "val_")):
            line += f"  {title}: loss {logs[prefix + 'loss']:.4f} top-1 {logs[prefix + 'top_1']:.4f}"
        print(f"{line}  {self._examples / seconds:,.0f} images/s", flush=True)
