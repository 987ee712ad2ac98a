"""One training run, top to bottom: the same function for every number of workers."""

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import time

import keras
import numpy as np
import tensorflow as tf

import app
from app import against, checkpoints, faults, initial, monitoring, optimizers, run_dir, schedules, seam
from app import config as config_module
from app import data as data_module
from app.callbacks import EvaluateAt, Profile, Skipped, Staleness
from app.randomness import Keyed
from app.terminal import Progress, Terminal, logged
from cluster import Trainer, checkpoint, fingerprint, global_batch_norm, lifeline, parameter_servers, spec, wishes
from cluster.agreement import agree, bytes_from_chief, from_chief
from models import ModelError, build

FINGERPRINTS = "fingerprints.jsonl"


def train(config: config_module.Config, strategy, callbacks=()) -> dict:
    """Trains, evaluates after every epoch, and leaves model, metrics and configuration in the run directory.

    Args:
      config: the resolved configuration.
      strategy: the tf.distribute strategy; its replicas share the logical replicas.
      callbacks: further Keras callbacks.
    Returns:
      What summary.json holds, "sha256" of weights, optimizer and metrics in it, and "history", Keras's.
    Raises:
      UsageError: for mistakes that show only here: the number of GPUs does not fit K, raw data that cannot be used.
      faults.DataFault: if a record cannot be read; the message names it.
      against.Differs: if the run is not that of --verify_against.
      cluster.drift.Drift: if the workers do not hold the same weights after a step that is recorded.
      wishes.Stopped: when a worker wished to stop, after a checkpoint; wishes.NonFinite: if loss or gradient is not finite.
    """
    run_dir.make(config.run_dir)
    chief = strategy.extended.should_checkpoint
    me = spec.from_environment()
    own = os.path.join(config.run_dir, f"worker-{me.number if me else 0}")
    with run_dir.claimed(config.run_dir) if chief else contextlib.nullcontext():
        run_dir.make(own)
        with logged(os.path.join(own, "log.txt")):
            return _train(config, strategy, callbacks, me, own)


def _train(config, strategy, callbacks, me, own):
    began = time.monotonic()
    chief, replicas = strategy.extended.should_checkpoint, strategy.num_replicas_in_sync
    serving = parameter_servers.workers_of(me)
    terminal = Terminal(silent=not chief, quiet=config.quiet)
    content, resume = checkpoints.latest(config, terminal.result) if chief else (None, None)
    first_step = from_chief(me, resume.step if resume else 0)
    data = open_data(config, strategy, me, terminal.say, first_step)
    recorded = against.opened(config)
    steps_per_epoch = data.training.steps
    epochs = -(-config.steps // steps_per_epoch) if config.steps else config.epochs
    total_steps = config.steps or epochs * steps_per_epoch
    if serving:
        terminal.say(parameter_servers.role(me))
    for line in plan(config, data, replicas, steps_per_epoch, epochs, serving):
        terminal.say(line)

    plain, model = assemble(config, data, strategy, total_steps)
    if (content := bytes_from_chief(me, content)) and not chief:
        resume = checkpoint.from_bytes(content)
    record = configuration(config, data.manifest, serving or replicas, me)
    if not resume and (begun := initial.put(config, plain, me, lambda: network(config, data))):
        terminal.say(begun[0])
        record["init_from_sha256"] = begun[1]
    if resume:
        terminal.say(f"resuming at step {resume.step:,} of {total_steps:,}, from the checkpoint in {config.run_dir}")
    seam.cut(config, resume, chief, me.number if me else 0, me.trainers if me else 1)
    if chief:
        run_dir.write_config(config.run_dir, record, first_step)
    terminal.say(f"{plain.count_params():,} parameters; tracing the first step")

    lines = resume.facts["lines"] if resume else {}
    sinks = [Progress(terminal, steps_per_epoch, epochs, total_steps, of_update(config).global_batch_size)]
    files = monitoring.MetricsFiles(config.run_dir, config.log_every_steps, lines) if chief else None
    sinks += [files] if files else []
    if config.tensorboard:
        sinks.append(monitoring.WorkerEvents(own, config.log_every_steps))
        if chief:
            text = {"configuration": "\n".join(f"    {line}" for line in json.dumps(record, indent=2).splitlines())}
            sinks.append(monitoring.TrainEvents(config.run_dir, config.log_every_steps, {} if resume else text))
    monitor = monitoring.Monitor(sinks, of_update(config).global_batch_size)
    started = time.monotonic()
    steps = [int(step) for step in config.eval_at_steps.split(",") if step]
    fingerprints, every = None, recorded.every if recorded else config.fingerprint_every
    if every:
        path = os.path.join(config.run_dir, FINGERPRINTS)
        fingerprints = fingerprint.Recorder(path, every, recorded, lines.get(FINGERPRINTS, 0))
    at_steps = EvaluateAt(
        data.evaluation, config.eval_every_steps, steps, config.eval_at_start, terminal.say, monitor.evaluated
    )
    profile = [Profile(config.profiled, own, terminal.say)] if config.profiled else []
    history, skipped = keras.callbacks.History(), Skipped(config.max_skipped_steps)
    staleness = [Staleness(terminal.say)] if config.asynchronous else []
    remembering = [history, Keyed(), monitor, at_steps, skipped, *staleness, *callbacks]
    saving = checkpoints.Checkpoints(
        config,
        me,
        remembering,
        steps_per_epoch,
        total_steps,
        monitor.flush,
        lambda: {**files.lines, **({FINGERPRINTS: fingerprints.lines} if fingerprints else {})},
        resume,
        terminal.result,
    )
    lifeline.stacks = os.path.join(own, "log.txt") if "://" not in own else None
    try:
        with faults.named(data, me), wishes.attended():
            model.fit(
                data.training,
                steps_per_epoch=steps_per_epoch,
                epochs=epochs,
                total_steps=total_steps,
                validation_data=data.evaluation,
                callbacks=[*remembering, *profile, saving],
                fingerprints=fingerprints,
                resume=resume,
                verbose=0,
            )
            # Epochs evaluate the weights as they are; the run ends with their averages as the weights.
            averaged = model.evaluate(data.evaluation, verbose=0, return_dict=True) if config.ema and data.evaluation else {}
    except wishes.Stopped:
        terminal.result(saving.stop())
        raise
    except checkpoint.Damaged as error:
        raise config_module.UsageError(
            f"--run_dir={config.run_dir} holds a checkpoint from which this program cannot go on: {error}; delete its "
            "checkpoints folder to begin anew"
        ) from None
    except wishes.NonFinite as error:
        raise wishes.NonFinite(
            f"{error}; the last checkpoint is kept, but the same command {saving.last()} to the same step"
        ) from None
    except global_batch_norm.Refused as error:
        raise config_module.UsageError(f"--batch_norm={config.batch_norm}: {error}") from None
    finally:
        monitor.close()
    seconds = time.monotonic() - started

    path = os.path.join(config.run_dir, "model.keras")
    model.save(path)
    history = history.history
    found = {"sha256": fingerprint.run_sha256(model, history), "steps": model.step, "first_step": first_step + 1}
    found |= {"replicas": serving or replicas, "fit_seconds": seconds, "seconds": time.monotonic() - began}
    found |= {"parameters": plain.count_params(), "skipped_steps": skipped.total}
    if staleness:
        found |= {"staleness_mean": staleness[0].mean, "staleness_max": staleness[0].largest}
    found |= {name: values[-1] for name, values in history.items()}
    found |= {f"val_{name}": value for name, value in averaged.items()}
    if data.evaluation:
        found |= {"best_epoch": int(np.argmax(history["val_top_1"])) + 1, "best_val_top_1": max(history["val_top_1"])}
        found["examples"] = data.manifest.test.examples - len(data.manifest.test.bad)
    if chief:
        run_dir.write(os.path.join(config.run_dir, "summary.json"), json.dumps(monitoring.plain(found), indent=2) + "\n")
    for line in [*summary(config, found), *([recorded.summary()] if recorded else [])]:
        terminal.result(line)
    return {**found, "history": history}


def summary(config, found: dict):
    """The lines at a run's end, from what summary.json holds."""
    workers = f"{found['replicas']} {'worker' if found['replicas'] == 1 else 'workers'}"
    steps = f"{found['steps']} steps" if found["first_step"] == 1 else f"steps {found['first_step']} to {found['steps']}"
    if found["first_step"] > found["steps"]:
        steps = "no step: only the end was missing,"
    yield f"trained {steps} in {found['fit_seconds']:.1f} s on {workers}"
    if config.asynchronous:
        yield f"staleness: mean {found['staleness_mean']:.2f}, largest {found['staleness_max']} updates"
    if found["skipped_steps"]:
        yield f"skipped {found['skipped_steps']} of them: the loss scale was too large for their gradients"
    if "val_top_1" in found:
        right, of = round(found["val_top_1"] * found["examples"]), found["examples"]
        best = f"best {found['best_val_top_1']:.4f} in epoch {found['best_epoch']}"
        by = " by the averaged weights" if config.ema else ""
        yield f"held out: {right:,} of {of:,} right{by}, top-1 {found['val_top_1']:.4f} ({best})"
    yield f"saved   {config.run_dir}: model.keras, config.json, metrics.jsonl, metrics.csv, summary.json"
    flag = shlex.quote(f"--run_dir={config.run_dir}")
    yield f"next    ./run.sh evaluate {flag}    ./run.sh tensorboard {flag}"
    same = ": the same for any number of workers" if config.identical and not config.asynchronous else ""
    yield f"sha256  {found['sha256']}  (weights, optimizer, metrics{same})"


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


def plan(config, data, replicas, steps_per_epoch, epochs, serving=0):
    """What is going to be done, in lines; every quantity that was derived is said.

    Args:
      serving: workers that compute for a coordinator; 0: each of the `replicas` has its share.
    """
    train, held_out = data.manifest.train, data.manifest.test
    yield (
        f"{config.model} on {config.dataset}: {train.examples:,} examples in {len(train.shards)} shards "
        f"to train with, {held_out.examples:,} held out"
    )
    workers = f"{replicas} {'worker' if replicas == 1 else 'workers'}"
    share = f"{config.logical_replicas // replicas} on each of {workers}"
    if serving:
        share = f"each by whichever of {serving} {'worker' if serving == 1 else 'workers'} is free"
    yield (
        f"global batch {config.global_batch_size} = {config.logical_replicas} logical replicas x {config.replica_batch_size}; "
        f"{share}"
    )
    if config.asynchronous:
        yield (
            f"asynchronous: an update for each {config.replica_batch_size} examples, in the order in which gradients come: no "
            "two runs are the same"
        )
    if config.batch_norm == "global":
        yield f"batch normalisation over the whole batch of {config.global_batch_size}: one pass of each worker's examples"
    threads = f"{config.intra_op_threads} intra-op {'thread' if config.intra_op_threads == 1 else 'threads'}"
    an_epoch = f"{steps_per_epoch} steps (round({train.examples:,} / {of_update(config).global_batch_size}))"
    yield (f"{epochs} epoch{'s' * (epochs > 1)} of {an_epoch}; {threads} a worker (part of the run: the bits follow it)")
    if config.global_batch_size > train.examples:
        yield (
            f"warning: --global_batch_size={config.global_batch_size} is more than the {train.examples:,} training examples: a "
            "step sees some of them more than once"
        )


def configuration(config, manifest, replicas, me) -> dict:
    """What config.json holds: everything resolved, and what it ran with."""
    return {
        **dataclasses.asdict(config),
        **surroundings(replicas, me),
        "classes": manifest.classes,
        "label_offset": manifest.label_offset,
        "data_manifest": manifest.digest(),
        "own_sources": run_dir.own_sources(config),
    }


def surroundings(replicas, me) -> dict:
    """What a program ran with: cluster, devices, versions."""
    return {
        "replicas": replicas,
        "cluster": me.addresses if me else (),
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "source_revision": run_dir.source_revision(),
        "versions": {
            "lockstep": app.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
