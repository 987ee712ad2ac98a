"""The flags that `verify` and `repeat` have beside those of `train`, checked with them; imports nothing of TensorFlow."""

import dataclasses
import re

from app.config import Config, UsageError, batch_problem

STEPS = 100


def _field(default, group, text):
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "choices": None})


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    """What is compared, and where it is written."""

    on: str = _field("", "Verify", "numbers of workers to compare, as 1,2,4; default: those of 1, 2 and 4 that divide K")
    verify_dir: str = _field("", "Verify", "where runs, verify.json, verify.html are written; default: runs/verify- and a name")

    def problems(self):
        """What is wrong with single flags, a line each."""
        if self.on and not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3})+", self.on) or len(set(self.widths)) < len(self.widths):
            yield f"--on={self.on}: two or more different numbers of workers, as 1,2,4"

    @property
    def widths(self) -> list[int]:
        """The numbers of workers of --on."""
        return [int(part) for part in self.on.split(",") if part.isdecimal()]


@dataclasses.dataclass(frozen=True)
class RepeatFlags:
    """How many seeds, and where it is written."""

    seeds: int = _field(5, "Repeat", "train so many runs, with the seeds from --seed on")
    repeat_dir: str = _field("", "Repeat", "where runs, repeat.json, repeat.png are written; default: runs/repeat- and a name")

    def problems(self):
        """What is wrong with single flags, a line each."""
        if not 2 <= self.seeds <= 1000:
            yield f"--seeds={self.seeds}: 2 to 1000; a spread takes two runs"


def settled_verify(config: Config, flags: VerifyFlags, options, member) -> tuple[Config, VerifyFlags]:
    """The configuration of the runs that `verify` makes, but for their directories; and the flags, filled in.

    Args:
      options: what the command line says of workers.
      member: this process in its cluster, or None.
    Raises:
      UsageError: with a line for each contradiction.
    """
    if not flags.on:
        flags = dataclasses.replace(flags, on=",".join(str(n) for n in (1, 2, 4) if config.logical_replicas % n == 0))
    problems = [*_alone("verify", config, options, member)]
    if len(flags.widths) < 2:
        problems.append(
            f"K = {config.logical_replicas} logical replicas cannot be shared by 2 or 4 workers: name others with --on, or a K "
            "with --logical_replicas"
        )
    for width in flags.widths:
        if problem := batch_problem(config.global_batch_size, config.logical_replicas, width, "{} workers of --on"):
            problems.append(problem)
    if problems:
        raise UsageError("\n".join(problems))
    config = dataclasses.replace(config, steps=config.steps or STEPS, fingerprint_every=1, tensorboard=False)
    name = re.sub("^runs/", "runs/verify-", config.default_run_dir())
    return config, dataclasses.replace(flags, verify_dir=flags.verify_dir or name)


def settled_repeat(config: Config, flags: RepeatFlags, options, member) -> RepeatFlags:
    """The flags of `repeat`, filled in. Arguments and errors as for `settled_verify`."""
    if problems := [*_alone("repeat", config, options, member, own=())]:
        raise UsageError("\n".join(problems))
    name = re.sub("^runs/", "runs/repeat-", config.default_run_dir())
    return dataclasses.replace(flags, repeat_dir=flags.repeat_dir or name)


def _alone(command, config, options, member, own=("workers",)):
    if member:
        yield f"{command} starts processes on this machine, but {member.origin} says that this is {member.name} of a cluster"
    if "workers" in own and options.workers is not None:
        yield f"--workers={options.workers}: {command} takes the numbers of workers as --on=1,2,4"
    if config.run_dir != config.default_run_dir():
        yield f"--run_dir={config.run_dir} is for one run; {command} has --{command}_dir"
    if config.verify_against:
        yield f"--verify_against={config.verify_against} is for train: {command} compares its own runs"
