"""`./run.sh doctor`: whether this machine, or this cluster, could train, and what keeps it from it; imports no TensorFlow."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import socket
import sys

import app
from app import early, manifest, run_dir
from app.config import Config, UsageError, batch_problem
from app.sources import SourceError, imagenet
from cluster import launcher, preflight
from cluster.meeting import Found

ROOT = pathlib.Path(__file__).parent.parent
_LITTLE_MEMORY, _LITTLE_DISK = 2 << 30, 2 << 30
_VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
_ABOUT = ("host", "process", "devices", "free memory", "free disk", "data")
_COLUMNS = ("worker", "address", *_ABOUT, "clock", "answer", "found")


def card(settings: Config, member=None, thorough: bool = False, problems=()) -> preflight.Card:
    """What this process tells the others before they start together.

    Args:
      settings: its configuration.
      member: its part in the cluster, None if it is alone.
      thorough: look at memory, disk, packages and the data's files as well.
      problems: that are known to prevent the start.
    """
    made = preflight.Card(problems=list(problems))
    files = [file for folder in ("app", "models") for file in (ROOT / folder).rglob("*.py")]
    source = {
        "revision": run_dir.source_revision(),
        **preflight.source([*sorted(files), *run_dir.own_modules(settings).values()], ROOT),
    }
    data = _prepared(settings, thorough)
    digest = data.digest() if data else None
    made.facts = {"source": source, "configuration": settings.shared_fields(), "data": {"data manifest": digest}}
    if thorough:
        made.problems += early.problems(settings)
        made.about["data"] = f"{data.train.examples:,} + {data.test.examples:,}" if data else _raw(settings)
        workers = member.workers if member else 1
        if problem := batch_problem(settings.global_batch_size, settings.logical_replicas, workers, "a cluster of {} workers"):
            made.warnings.append(f"training with these flags would be refused: {problem}")
        for examine in (_packages, _devices, _memory, _disk, _ports):
            examine(settings, made)
    return made


def _prepared(settings, thorough):
    """The manifest, or None if the data is not prepared yet, or not in a state to be used."""
    try:
        if settings.dataset != "imagenet":
            return manifest.load(settings.prepared_path())
        if thorough:  # it takes a moment; a training compares it when it opens the data
            return manifest.of_files(imagenet.manifest_path(settings.prepared_dir), imagenet.raw_files(settings.data_dir))
    except (manifest.ManifestError, SourceError):
        pass
    return None


def _raw(settings):
    """What there is of data that is not prepared."""
    if settings.dataset == "imagenet":
        try:
            return (
                " + ".join(f"{len(files):,}" for files in imagenet.raw_files(settings.data_dir).values())
                + " files, not read yet"
            )
        except SourceError:
            return "not found"
    return "not prepared"


def _packages(settings, made):
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        made.problems.append(f"this is Python {sys.version.split()[0]}; install 3.11, 3.12 or 3.13")
    for line in (ROOT / "requirements.txt").read_text().split():
        package, wanted = re.fullmatch(r"([\w-]+)(.*)", line).groups()
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = preflight.version(package)
        if not installed or not _fits(installed, wanted):
            made.problems.append(
                f"{package} {installed or 'is not installed'}; requirements.txt wants {line}: ./run.sh installs it"
            )


def _fits(installed: str, wanted: str) -> bool:
    """Whether a version is as '==2.21.*' or '>=2.1' wants it."""
    if wanted.startswith("=="):
        return f"{installed}.".startswith(wanted[2:].removesuffix("*"))
    numbers = [[int(part) for part in re.findall(r"\d+", version)] for version in (installed, wanted)]
    return numbers[0] >= numbers[1]


def _devices(settings, made):
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = len(launcher.visible_gpus())
    features = preflight.machine()["CPU features"] or ()
    vectors = next((f" with {name}" for feature, name in _VECTORS.items() if feature in features), "")
    made.about["devices"] = f"{cpus} CPU{'s' * (cpus != 1)}{vectors}" + (f", {gpus} GPU{'s' * (gpus != 1)}" if gpus else "")
    if cpus < settings.intra_op_threads:
        made.warnings.append(f"--intra_op_threads={settings.intra_op_threads} on {cpus} CPUs is slow; the bits follow the flag")


def _memory(settings, made):
    free = available_memory()
    made.about["free memory"] = _size(free)
    if free is not None and free < _LITTLE_MEMORY:
        made.warnings.append(f"{_size(free)} of memory are free; a worker needs about 1 GB, and its network and data")


def available_memory(root: str = "/") -> int | None:
    """Bytes that a new process could use: of the machine (Linux), and of its control group."""
    found = []
    try:
        text = pathlib.Path(root, "proc/meminfo").read_text()
        found.append(int(re.search(r"MemAvailable:\s*(\d+) kB", text)[1]) * 1024)
    except (OSError, TypeError):
        pass
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            folder = pathlib.Path(root, "sys/fs/cgroup")
            found.append(max(0, int((folder / most).read_text()) - int((folder / used).read_text())))
        except (OSError, ValueError):  # none, or 'max'
            continue
    return min(found, default=None)


def _disk(settings, made):
    for flag in ("prepared_dir", "run_dir"):
        folder = getattr(settings, flag)
        if "://" in folder:
            continue
        place = pathlib.Path(folder).absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        made.about["free disk"] = _size(free)  # of the run directory in the end
        if flag == "run_dir" and not (place.is_dir() and os.access(place, os.W_OK)):
            made.problems.append(f"--run_dir={folder}: {place} cannot be written; name another directory")
        elif free < _LITTLE_DISK:
            made.warnings.append(f"--{flag}={folder}: {_size(free)} of disk are free")


def _ports(settings, made):
    made.about |= {"host": socket.gethostname(), "process": os.getpid()}
    try:
        launcher.free_addresses(2)
    except OSError as error:
        made.problems.append(f"no port can be opened on 127.0.0.1: {error.strerror}; workers on this machine need some")


def _size(count):
    return "unknown" if count is None else f"{count / 1e9:,.1f} GB"


def heading(settings: Config, made: preflight.Card):
    """What is meant to run, in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in preflight.own_facts()["versions"].items())
    revision = made.facts["source"]["revision"]
    yield f"lockstep {app.__version__} ({revision[:10]}{'+' * revision.endswith('+')}), {versions}"
    yield (
        f"{settings.model} on {settings.dataset}, global batch {settings.global_batch_size}, "
        f"{settings.logical_replicas} logical replicas, seed {settings.seed}"
    )


def table(found: Found, addresses) -> str:
    """What the chief found, a row a worker."""
    rows = [_COLUMNS]
    for number, address in enumerate(addresses):
        about = found.cards.get(number, {}).get("about", {})
        trip, ahead = found.trips.get(number, (None, None))
        rows.append(
            (
                str(number),
                address,
                *(str(about.get(name, "-")) for name in _ABOUT),
                "-" if ahead is None else f"{round(ahead, 1) + 0.0:+.1f} s",
                "-" if trip is None else f"{trip * 1000:.1f} ms",
                _verdict(found, number, addresses),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _verdict(found, number, addresses):
    if number in found.missing:
        return f"missing: {found.missing[number]}"
    named = re.compile(rf"worker number {number}\b|{re.escape(addresses[number])}(?!\d)")
    if any(named.search(text) for text in found.problems):
        return "see below"
    if number not in found.cards:
        return "not heard yet"
    return "fine"


def shown(settings: Config, made: preflight.Card, member):
    """For `cluster.run`: prints the table of what the chief found, and the warnings."""

    def show(found: Found):
        print(f"doctor: {member.workers} workers, told by {member.origin}")
        print("\n".join([*heading(settings, made), "", table(found, member.addresses), ""]))
        for warning in found.warnings:
            print(f"warning: {warning}")
        sys.stdout.flush()

    return show


def alone(settings: Config, made: preflight.Card) -> None:
    """Prints what was found on this machine. Raises UsageError if it could not train."""
    print("doctor: this process alone; --workers=N looks at a cluster of N on this machine")
    print("\n".join([*heading(settings, made), ""]))
    for name in _ABOUT:
        print(f"{name:<11}  {made.about[name]}")
    for warning in made.warnings:
        print(f"warning: {warning}")
    sys.stdout.flush()
    if made.problems:
        raise UsageError("\n".join(made.problems))


def through_tensorflow(settings: Config, strategy) -> None:
    """Lets TensorFlow add over all workers, checks the sum, and says how fast that was."""
    import tensorflow as tf

    from cluster import reduction_check

    if isinstance(strategy, tf.distribute.ParameterServerStrategy):  # which has connected them
        print("through TensorFlow: the coordinator reaches all workers and ps\nfine: ready to train")
        return
    megabytes, replicas = 32, strategy.num_replicas_in_sync
    found = reduction_check.check(strategy, megabytes, settings.start_timeout_s, settings.communication)
    if strategy.extended.should_checkpoint:
        if replicas > 1:
            speed = f"{found['seconds'] * 1000:,.0f} ms, {found['bytes_per_second'] / 1e9:.2f} GB/s sent by each"
            print(f"through TensorFlow: a sum of {megabytes} MB over {replicas} replicas is right ({speed})")
        else:
            print(f"through TensorFlow: a sum of {megabytes} MB on {', '.join(strategy.extended.worker_devices)} is right")
        print("fine: ready to train")
