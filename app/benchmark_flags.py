"""The flags that `benchmark` has beside those of `train`, checked together with them; imports nothing of TensorFlow."""

import dataclasses
import os
import re

from app.config import Config, UsageError, batch_problem

DATA = ("synthetic", "real")
_SIZES = "1000,10000,100000,1000000,10000000,100000000"


def _field(default, text, least=0, choices=None):
    return dataclasses.field(default=default, metadata={"group": "Benchmark", "help": text, "least": least, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Flags:
    """What is measured, how long, and where it is written."""

    benchmark_steps: int = _field(100, "steps that are measured", 1)
    warmup_steps: int = _field(10, "steps before them; the first one traces", 1)
    display_every: int = _field(10, "steps between two lines", 1)
    data: str = _field("synthetic", "a batch in memory of the data set's shape, or what is read from its files", choices=DATA)
    forward_only: bool = _field(False, "evaluation steps instead of training steps")
    breakdown: bool = _field(True, "also measure passes, reduction and update each alone")
    scaling: str = _field("", "numbers of workers on this machine to compare, as 1,2,4; instead of --workers")
    allreduce: bool = _field(False, "measure the reduction alone, in tree order and as ring all-reduce")
    allreduce_bytes: str = _field(_SIZES, "sizes for --allreduce")
    inter_op_threads: int = _field(0, "operations that a worker runs at a time; 0: as many as the machine has cores")
    json: str = _field("", "write all that was measured to this file")
    csv: str = _field("", "write a table to this file: of the steps, of --scaling, or of --allreduce")
    picture: str = _field("", "draw it into this PNG file")

    def problems(self):
        """What is wrong with single flags, a line each."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type is int and not f.metadata["least"] <= value < 2**31:
                yield f"--{f.name}={value}: at least {f.metadata['least']}{'' if value < 2**31 else ', and less than 2^31'}"
            if f.metadata["choices"] and value not in f.metadata["choices"]:
                yield f"--{f.name}={value} is unknown. One of: {', '.join(f.metadata['choices'])}"
        if self.scaling and not _numbers(self.scaling):
            yield f"--scaling={self.scaling}: different numbers of workers, as 1,2,4"
        if not _numbers(self.allreduce_bytes) or min(_numbers(self.allreduce_bytes)) < 4:
            yield f"--allreduce_bytes={self.allreduce_bytes}: different sizes of 4 bytes or more, as 1000,1000000"

    @property
    def widths(self) -> list[int]:
        """The numbers of workers of --scaling."""
        return _numbers(self.scaling)

    @property
    def sizes(self) -> list[int]:
        """The sizes of --allreduce in bytes."""
        return _numbers(self.allreduce_bytes)

    def to_flags(self) -> list[str]:
        """The flags that give these."""
        return [f"--{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)]


def with_default_data(arguments: list[str]) -> list[str]:
    """Where a network is named and no data set: images as the network was designed for, as tf_cnn_benchmarks has it."""
    from models import NAMES

    names = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
    network = NAMES.get(names.get("model"))
    if network is None or {"dataset", "flagfile"} & set(names):
        return arguments
    shape = "x".join(map(str, network.input_shape))
    return [*arguments, f"--dataset=synthetic:{shape}:{network.classes}:1024"]


def settled(config: Config, flags: Flags, workers: int | None, member) -> Config:
    """The configuration of a benchmark: with a run directory of its own, in which nothing is written but what was asked for.

    Args:
      workers: of --workers, or None.
      member: this process in its cluster, or None.
    Raises:
      UsageError: with a line for each contradiction.
    """
    problems = [*_contradictions(config, flags, workers, member)]
    if member is None or member.is_chief:
        for name in ("json", "csv", "picture"):
            path = getattr(flags, name)
            if path and (os.path.isdir(path) or not os.access(os.path.dirname(path) or ".", os.W_OK)):
                problems.append(f"--{name}={path} cannot be written: it is a folder, or its folder is missing or not ours")
    if problems:
        raise UsageError("\n".join(problems))
    if flags.allreduce:  # batch and logical replicas have no part in it, but are checked against the workers
        replicas = workers or (member.workers if member else 1)
        config = dataclasses.replace(config, global_batch_size=replicas, logical_replicas=replicas, shards=replicas)
    if config.run_dir == config.default_run_dir():
        config = dataclasses.replace(config, run_dir=re.sub("^runs/", "runs/benchmark-", config.run_dir))
    return config


def _contradictions(config, flags, workers, member):
    if flags.scaling and (workers or member):
        other = f"--workers={workers}" if workers else member.origin
        yield f"--scaling={flags.scaling} starts clusters of its own: leave out {other}"
    if flags.scaling and flags.allreduce:
        yield "--scaling and --allreduce are two measurements: ask for one"
    if flags.scaling and not flags.allreduce:
        yield from _scaling_problems(config, flags)
    if config.profile_steps:
        last = flags.warmup_steps + flags.benchmark_steps
        for name in ("scaling", "allreduce", "forward_only"):
            if getattr(flags, name):
                yield f"--profile_steps={config.profile_steps} traces training steps of one cluster: leave out --{name}"
        if config.profiled[1] > last:
            yield f"--profile_steps={config.profile_steps}, but there are {last} steps, those to warm up counted"


def _scaling_problems(config, flags):
    for width in flags.widths:
        if problem := batch_problem(config.global_batch_size, config.logical_replicas, width, "--scaling={}"):
            yield problem
        replicas = config.logical_replicas * width
        if flags.data == "real" and config.dataset != "imagenet" and config.shards % replicas:
            yield (
                f"--shards={config.shards} cannot be shared by the {replicas} logical replicas of {width} workers with a batch "
                f"of {config.global_batch_size} each: use a multiple of {replicas}"
            )


def _numbers(text):
    """The numbers of a list, ascending; [] if it is none, or if two are the same."""
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        return []
    numbers = sorted(map(int, text.split(",")))
    return numbers if len(set(numbers)) == len(numbers) else []
