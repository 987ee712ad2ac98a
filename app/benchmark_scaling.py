"""The same benchmark on several numbers of local workers, one cluster after another: speed and efficiency by workers.

Twice: with the global batch that the flags say, and with that batch on each worker (batch and logical replicas times workers).
Imports nothing of TensorFlow: each run is a cluster of processes of its own.
"""

import dataclasses
import json
import os
import pathlib
import sys
import tempfile

from app import benchmark_report, early, startup
from app.config import Config, UsageError
from cluster import launcher


def run(settings: Config, flags) -> int:
    """Runs the clusters, prints a table, and writes what the flags ask for. Returns the exit status.

    Raises:
      UsageError: if the data cannot be used, or a file cannot be written.
    """
    early.check(settings, data=flags.data == "real")
    runs = []
    for kind, width in [("global", width) for width in flags.widths] + [("worker", width) for width in flags.widths]:
        times = width if kind == "worker" else 1
        if known := next((one for one in runs if times == 1 and one["workers"] == width), None):
            runs.append({**known, "batch": kind})
            continue
        one = _scaled(settings, flags, times)
        workers = f"{width} {'worker' if width == 1 else 'workers'}"
        print(f"{workers}, global batch {one.global_batch_size}, {one.logical_replicas} logical replicas", flush=True)
        status, found = _cluster(one, flags, width)
        if status:
            return status
        runs.append(_point(found, kind, width))
    rows = benchmark_report.scaling(runs)
    for line in benchmark_report.scaling_lines(rows):
        print(line)
    cores = os.cpu_count()
    if max(flags.widths) * settings.intra_op_threads > cores:
        print(f"{max(flags.widths)} workers share {cores} cores here: their efficiency is that of the machine")
    title = f"{settings.model} on {settings.dataset if flags.data == 'real' else 'synthetic data'}, {cores} cores"
    try:
        written = benchmark_report.write({"title": title, "scaling": rows, "cores": cores}, flags)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None
    for path in written:
        print(f"saved   {path}")
    return 0


def _scaled(settings, flags, times):
    """The configuration with a batch so many times as large, of as large logical replicas."""
    replicas = settings.logical_replicas * times
    shards = settings.shards if flags.data == "real" else replicas
    batch = settings.global_batch_size * times
    return dataclasses.replace(settings, global_batch_size=batch, logical_replicas=replicas, shards=shards, quiet=True)


def _cluster(settings, flags, width):
    """Runs a benchmark on a local cluster. Returns its exit status and what its --json holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "found.json")
        flags = dataclasses.replace(flags, scaling="", json=path, csv="", picture="")
        startup.pass_on(startup.now())
        command = [sys.executable, "-m", "app", "benchmark", *settings.to_flags(), *flags.to_flags()]
        status = launcher.run(command, width)
        return status, None if status else json.loads(pathlib.Path(path).read_text())


def _point(found, kind, width):
    """What the table, and the files, hold of a run."""
    configuration = found["configuration"]
    return {
        "batch": kind,
        "workers": width,
        **{name: configuration[name] for name in ("global_batch_size", "logical_replicas")},
        **{
            name: found[name]
            for name in ("images_per_sec", "uncertainty", "jitter", "median_step_s", "seconds", "load_average")
        },
        **{name: [worker[name] for worker in found["workers"]] for name in ("breakdown_s", "startup_s", "resident_peak_bytes")},
    }
