"""What a run is made of, from its configuration: data that all workers agree on, network, trainer, optimizer, loss, metrics."""

import dataclasses

import keras

from app import config as config_module
from app import data as data_module
from app import optimizers, schedules
from cluster import Trainer, global_batch_norm
from cluster.agreement import agree
from models import ModelError, build


def open_data(config, strategy, me, say, first_step=0, **facts) -> data_module.Data:
    """The data of a run, checked; and the workers' agreement on it, on the configuration, and on further `facts`.

    Training begins with the batch after `first_step` steps.

    Raises:
      UsageError, faults.DataFault, cluster.spec.ClusterError: each in one line.
    """
    replicas = strategy.num_replicas_in_sync
    what = "{} replicas (workers times the GPUs of each)"
    if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, replicas, what):
        raise config_module.UsageError(problem)
    data = data_module.load(config, say, first_step)
    agree(me, {**config.shared_fields(), "data manifest": data.manifest.digest(), **facts})
    return data


def assemble(config, data, strategy, total_steps):
    """The plain model, and the trainer around it, compiled. Raises UsageError."""
    config = of_update(config)
    keras.config.set_dtype_policy(config.dtype)
    schedule = rate(config, data, total_steps)
    with strategy.scope():
        plain = network(config, data)
        model = trainer(config, plain)
        optimizers.regularize(plain, config)
        optimizer = optimizers.make(config, schedule, plain)
        compile_trainer(model, optimizer, config, len(data.manifest.classes), schedule=None if schedule.constant else schedule)
    return plain, model


def of_update(config: config_module.Config) -> config_module.Config:
    """The configuration with the batch of one update: with --asynchronous that is a logical replica's."""
    if not config.asynchronous:
        return config
    return dataclasses.replace(config, global_batch_size=config.replica_batch_size, logical_replicas=1)


def rate(config, data, total_steps) -> schedules.Schedule:
    """The schedule of the learning rate. Raises UsageError."""
    try:
        return schedules.make(config, data.manifest.train.examples, total_steps)
    except ValueError as error:
        raise config_module.UsageError(str(error)) from None


def network(config, data):
    """The plain model. Raises UsageError."""
    try:
        return build(config.model, data.image_shape, len(data.manifest.classes))
    except ModelError as error:  # what a user's function raises is theirs to see, with its traceback
        raise config_module.UsageError(f"--model={config.model}: {str(error).removeprefix(f'{config.model}: ')}") from None


def trainer(config, plain) -> Trainer:
    """The plain model wrapped for the run; to be called under the strategy's scope. Raises UsageError."""
    shape = config.global_batch_size, config.logical_replicas
    try:
        return Trainer(
            plain, *shape, config.seed, config.identical, config.communication, config.batch_norm, config.asynchronous
        )
    except global_batch_norm.Refused as error:
        raise config_module.UsageError(f"--batch_norm={config.batch_norm}: {error}") from None


def compile_trainer(model, optimizer, config, classes, metrics=(), schedule=None):
    """Cross entropy of logits; top-1, and top-5 where there are more than five classes.

    With label smoothing (Szegedy et al. 2016, section 7) the labels are one-hot: see `data.load`.
    """
    if config.label_smoothing:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=config.label_smoothing)
        top_1, top_5 = keras.metrics.CategoricalAccuracy, keras.metrics.TopKCategoricalAccuracy
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        top_1, top_5 = keras.metrics.SparseCategoricalAccuracy, keras.metrics.SparseTopKCategoricalAccuracy
    accuracies = [top_1(name="top_1"), *([top_5(k=5, name="top_5")] if classes > 5 else [])]
    model.compile(
        optimizer,
        loss,
        metrics=[*accuracies, *metrics],
        jit_compile=config.jit_compile,
        steps_per_execution=config.steps_per_execution,
        auto_scale_loss=not config.loss_scale,
        schedule=schedule,
    )
