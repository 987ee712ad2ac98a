"""One training run, top to bottom: the same function for every number of workers."""

import contextlib
import dataclasses
import json
import os
import platform
import time

import keras
import numpy as np
import tensorflow as tf

import app
from app import against, checkpoints, faults, initial, monitoring, run_dir, seam
from app import config as config_module
from app.assembly import assemble, network, of_update, open_data
from app.callbacks import EvaluateAt, Profile, Skipped, Staleness
from app.plan import plan, summary
from app.randomness import Keyed
from app.terminal import Progress, Terminal, logged
from cluster import checkpoint, fingerprint, global_batch_norm, lifeline, parameter_servers, preflight, spec, wishes
from cluster.agreement import bytes_from_chief, from_chief

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
        terminal.say(f"resuming after step {resume.step:,} of {total_steps:,}, from the checkpoint in {config.run_dir}")
    seam.cut(config, resume, chief, me.number if me else 0, me.trainers if me else 1)
    if chief:
        run_dir.write_config(config.run_dir, record, first_step)
    terminal.say(f"{plain.count_params():,} parameters; tracing the first step")

    lines = resume.facts["lines"] if resume else {}
    progress = Progress(terminal, steps_per_epoch, epochs, total_steps, of_update(config).global_batch_size)
    files = monitoring.MetricsFiles(config.run_dir, config.log_every_steps, lines) if chief else None
    monitor = _monitor(config, own, [progress, *([files] if files else [])], None if resume else record, chief)
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
    found = {"sha256": fingerprint.run_sha256(model, history.history), "steps": model.step, "first_step": first_step + 1}
    found |= {"replicas": serving or replicas, "fit_seconds": seconds, "seconds": time.monotonic() - began}
    found |= {"parameters": plain.count_params(), "skipped_steps": skipped.total}
    if staleness:
        found |= {"staleness_mean": staleness[0].mean, "staleness_max": staleness[0].largest}
    found |= _numbers(history.history, averaged, data)
    if chief:
        run_dir.write(os.path.join(config.run_dir, "summary.json"), json.dumps(monitoring.plain(found), indent=2) + "\n")
    for line in [*summary(config, found), *([recorded.summary()] if recorded else [])]:
        terminal.result(line)
    return {**found, "history": history.history}


def _monitor(config, own, sinks, record, chief) -> monitoring.Monitor:
    """What tells the `sinks` of the run, and TensorBoard; with the configuration as its text, if `record` is given."""
    if config.tensorboard:
        sinks = [*sinks, monitoring.WorkerEvents(own, config.log_every_steps)]
        if chief:
            lines = json.dumps(record, indent=2).splitlines()
            text = {"configuration": "\n".join(f"    {line}" for line in lines)} if record else {}
            sinks.append(monitoring.TrainEvents(config.run_dir, config.log_every_steps, text))
    return monitoring.Monitor(sinks, of_update(config).global_batch_size)


def _numbers(history, averaged, data) -> dict:
    """The final numbers by their names in summary.json: of Keras's `history`, and of the `averaged` weights, if there are."""
    found = {name: values[-1] for name, values in history.items()} | {f"val_{k}": value for k, value in averaged.items()}
    if data.evaluation:
        found |= {"best_epoch": int(np.argmax(history["val_top_1"])) + 1, "best_val_top_1": max(history["val_top_1"])}
        found["examples"] = data.manifest.test.examples - len(data.manifest.test.bad)
    return found


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
    """What a program ran with: cluster, devices, processor, versions."""
    return {
        "replicas": replicas,
        "cluster": me.addresses if me else (),
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "machine": preflight.machine(),
        "source_revision": run_dir.source_revision(),
        "versions": {
            "lockstep": app.__version__,
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
