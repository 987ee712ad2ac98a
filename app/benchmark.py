"""The speed of training or evaluation steps, told as tf_cnn_benchmarks tells it, and where their time goes; or of reductions.

A step is one of `Trainer.fit` (`--forward_only`: of `Trainer.evaluate`), timed on each worker from the end of the one before to
its own end. What it consists of:

    input wait   from asking for a batch until it is there; measured in the graph of every step (not in an evaluation)
    passes, reduction, update
                 each traced alone and timed after the steps, on workers that start together, less what a call by itself takes:
                 `cluster/step_parts.py`
    rest         the call of TensorFlow's function, less these: waiting for workers that come later, the call itself, recording;
                 negative where parts overlap
    host         the step, less the call: Keras's loop, callbacks, reading the step's metrics

All are medians over the steps that count. Memory is the most that the process has held when the steps have ended. The start is
split where a phase ends: "tracing" is building the graph; "first step" is TensorFlow's optimisation of it, XLA's compilation,
and running it.
"""

import dataclasses
import os
import resource
import time

import keras
import numpy as np
import tensorflow as tf

from app import benchmark_data, benchmark_report, config, run_dir, startup
from app.assembly import assemble, of_update
from app.callbacks import Profile
from app.terminal import Terminal
from app.train import surroundings
from cluster import allreduce, parameter_servers, spec, step_parts
from cluster.agreement import gather

_ROUNDS = 10  # in which the parts of a step are timed


def benchmark(settings: config.Config, flags, strategy) -> dict | None:
    """Measures, prints, and writes what the flags ask for.

    Args:
      settings: the configuration of a training.
      flags: `benchmark_flags.Flags`.
      strategy: the tf.distribute strategy.
    Returns:
      What --json writes, on the chief.
    Raises:
      UsageError, faults.DataFault, cluster.spec.ClusterError: each in one line.
    """
    me = spec.from_environment()
    terminal = Terminal(silent=not strategy.extended.should_checkpoint, quiet=settings.quiet)
    measure = _reductions if flags.allreduce else _steps
    found = measure(settings, flags, strategy, me, terminal)
    if found is None:
        return None
    record = {**dataclasses.asdict(settings), **dataclasses.asdict(flags)}
    about = surroundings(strategy.num_replicas_in_sync, me)
    found |= {"configuration": record, **about, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    try:
        for path in benchmark_report.write(found, flags):
            terminal.say(f"saved   {path}")
    except OSError as error:
        raise config.UsageError(f"{error.filename} cannot be written: {error.strerror}") from None
    return found


def _steps(settings, flags, strategy, me, terminal):
    data, streams, damaged = benchmark_data.load(settings, flags, strategy, me, terminal.say)
    startup.mark("data")
    plain, model = assemble(settings, data, strategy, settings.steps or settings.epochs * data.training.steps)
    startup.mark("network")
    each = 1 if flags.forward_only else settings.steps_per_execution
    warmup, measured = (-(-steps // each) for steps in (flags.warmup_steps, flags.benchmark_steps))
    title = (
        f"{settings.model} on {settings.dataset if flags.data == 'real' else 'synthetic data'}: "
        f"{'evaluation' if flags.forward_only else 'training'}, {settings.dtype}{', XLA' if settings.jit_compile else ''}"
    )
    if serving := parameter_servers.workers_of(me):
        terminal.say(parameter_servers.role(me))
    for line in _plan(settings, data, strategy.num_replicas_in_sync, serving, title, warmup * each, measured * each):
        terminal.say(line)

    clock = _Clock(terminal.say, warmup, flags.display_every, of_update(settings).global_batch_size)
    with damaged:
        if flags.forward_only:
            model.evaluate(streams, steps=warmup + measured, callbacks=[clock], verbose=0)
        else:
            own = os.path.join(settings.run_dir, f"worker-{me.number if me else 0}")
            profile = [Profile(settings.profiled, own, terminal.say)] if settings.profiled else []
            if profile:
                run_dir.make(own)
            model.fit(streams, steps_per_epoch=(warmup + measured) * each, epochs=1, callbacks=[clock, *profile], verbose=0)
        worker = {"startup_s": startup.parts(), **_memory()}
        rounds = min(_ROUNDS, flags.benchmark_steps)
        alone = flags.breakdown and not parameter_servers.workers_of(me)
        parts = step_parts.measure(model, streams, not flags.forward_only, rounds) if alone else {}
    worker |= {"breakdown_s": benchmark_report.breakdown(clock.rows, parts), "parts_s": parts}
    workers = gather(me, worker)
    if workers is None:
        return None

    images, seconds = ([row[name] for row in clock.rows] for name in ("images", "seconds"))
    mean, uncertainty, jitter = benchmark_report.speed(images, seconds)
    terminal.result(benchmark_report.total_line(mean))
    for line in benchmark_report.breakdown_lines([each["breakdown_s"] for each in workers]):
        terminal.say(line)
    served = model.coordinator_spent and np.median(model.coordinator_spent[-len(clock.rows) * each :], axis=0).tolist()
    if served:
        terminal.say(benchmark_report.coordinator_line(*served))
    terminal.say(benchmark_report.memory_line(workers))
    terminal.say(benchmark_report.startup_line(workers[0]["startup_s"]))
    return {
        "title": title,
        "images_per_sec": mean,
        "uncertainty": uncertainty,
        "jitter": jitter,
        "seconds": sum(seconds),
        "images": sum(images),
        "median_step_s": float(np.median(seconds)),
        "parameters": plain.count_params(),
        "steps": clock.rows,
        "workers": workers,
        **({"coordinator": dict(zip(("waiting_s", "update_s", "bytes"), served, strict=True))} if served else {}),
    }


def _plan(settings, data, replicas, serving, title, warmup, measured):
    shape = "x".join(map(str, data.image_shape))
    yield f"{title}; images {shape}, {len(data.manifest.classes):,} classes"
    workers = f"{replicas} {'worker' if replicas == 1 else 'workers'}"
    yield (
        f"global batch {settings.global_batch_size} = {settings.logical_replicas} logical replicas x "
        f"{settings.replica_batch_size}; "
        + (
            f"each by whichever of {serving} workers is free"
            if serving
            else f"{settings.logical_replicas // replicas} on each of {workers}"
        )
    )
    threads = f"{settings.intra_op_threads} intra-op {'thread' if settings.intra_op_threads == 1 else 'threads'}"
    yield f"{threads} a worker; {warmup} steps to warm up, {measured} measured"


class _Clock(keras.callbacks.Callback):
    """Takes the time of every step, and tells it.

    Args:
      say: prints a line.
      warmup: executions that do not count.
      every: steps between two lines.
      batch: B.

    Attributes:
      rows: a dict of each step that counts, by the names of the CSV file's columns.
    """

    def __init__(self, say, warmup, every, batch):
        super().__init__()
        self._say, self._warmup, self._every, self._batch = say, warmup, every, batch
        self.rows, self._executions, self._examined = [], 0, 0

    def on_train_begin(self, logs=None):
        self.model.train_function = self._timed(self.model.train_function)
        self._tell_when_traced()

    def on_test_begin(self, logs=None):
        self.model.test_function = self._timed(self.model.test_function)
        self._tell_when_traced()

    def _timed(self, function):
        def call(iterator):
            began = time.perf_counter()
            logs = function(iterator)
            for value in logs.values():  # on an accelerator the call returns before the work is done
                value.numpy()
            self._in_graph = time.perf_counter() - began
            return logs

        return call

    def _tell_when_traced(self):
        """Marks the end of tracing: the last that the traced function asks of the model is what the metrics are."""
        result, marked = self.model.get_metrics_result, []

        def get_metrics_result():
            found = result()
            if not marked:
                startup.mark("tracing")
                marked.append(True)
            return found

        self.model.get_metrics_result = get_metrics_result

    def on_train_batch_end(self, batch, logs=None):
        records = self.model.records()
        self._count(records, self._batch)

    def on_test_batch_end(self, batch, logs=None):
        """An evaluation's metrics are over all its steps so far; padding is no image."""
        images = self.model.examples_evaluated - self._examined
        self._examined += images
        self._count([{name: float(value) for name, value in logs.items()}], images)

    def _count(self, records, images):
        now = time.perf_counter()
        self._executions += 1
        if self._executions == 1:
            startup.mark("first step")
        if self._executions > self._warmup:
            for record in records:
                self._row(record, images, (now - self._ended) / len(records), self._in_graph / len(records))
        self._ended = now

    def _row(self, record, images, seconds, in_graph):
        step = {"step": len(self.rows) + 1, "seconds": seconds, "images": images, "images_per_sec": images / seconds}
        self.rows.append({**step, "in_graph_s": in_graph, **record})
        if len(self.rows) == 1:
            self._say(benchmark_report.header(record))
        if len(self.rows) % self._every == 0:
            self._say(benchmark_report.step_line(self.rows))


def _memory():
    gpus = [device.name.partition("device:")[2] for device in tf.config.list_logical_devices("GPU")]
    return {
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gpu_peak_bytes": sum(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus),
    }


def _reductions(settings, flags, strategy, me, terminal):
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        raise config.UsageError("--allreduce: one replica alone has nothing to reduce; use --workers=2 or more")
    benchmark_data.agree_without(settings, flags, me)
    terminal.say(f"reductions of float32 over {replicas} replicas, K = {replicas}; the two forms take turns")

    def rounds(size):  # at most as many bytes as 100 reductions of 10 MB
        return max(min(3, flags.benchmark_steps), min(flags.benchmark_steps, 10**9 // size))

    warmup = min(3, flags.warmup_steps)
    seconds = allreduce.sweep(strategy, flags.sizes, rounds, communication=settings.communication, warmup=warmup)
    workers = gather(me, seconds)
    if workers is None:
        return None
    rows = benchmark_report.reductions(workers, replicas)
    for line in benchmark_report.allreduce_lines(rows):
        terminal.result(line)
    title = f"reductions of float32 over {replicas} replicas"
    return {"title": title, "allreduce": rows, "seconds": dict(enumerate(workers)), **_memory()}
