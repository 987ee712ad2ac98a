"""The configuration of a run: flags and a recipe, resolved into one frozen, validated object.

Names are checked against tables that need no imports, so that a mistake is answered before TensorFlow is loaded.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
import re
import typing

from absl import flags

from app import manifest, sources
from cluster import tree
from models import NAMES as MODELS

RECIPES = pathlib.Path(__file__).parent.parent / "recipes"
DATASETS = (*sources.NAMES, "imagenet")
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
DTYPES = ("float32", "mixed_bfloat16", "mixed_float16")
COMMUNICATIONS = ("auto", "ring", "nccl")


class UsageError(ValueError):
    """A user's mistake; each line of the message says what is wrong, with which value, and what to do."""


def _field(default, group, text, choices=None, least=None, most=2**31 - 1, result=True, open=False):
    metadata = {"group": group, "help": text, "choices": choices, "result": result, "open": open}
    metadata |= {"least": least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All that decides a run's result, and a few fields that do not (`result=False`: where and how it is computed)."""

    dataset: str = _field("digits", "Run", "data set", DATASETS, open=True)
    model: str = _field("small_cnn", "Run", "network", tuple(MODELS))
    global_batch_size: int = _field(128, "Run", "B, examples a step over all workers", least=1)
    logical_replicas: int = _field(
        0, "Run", "K, what the batch is divided into; 0: the largest power of two that leaves 32 examples each", least=0
    )
    seed: int = _field(1, "Run", "of the initial weights, the order of examples, augmentation, dropout", least=0)
    epochs: int = _field(10, "Run", "passes over the training examples", least=1)
    steps: int = _field(0, "Run", "stop after exactly so many steps; 0: by --epochs", least=0)
    data_dir: str = _field("", "Data", "folder with the raw files of the data set", result=False)
    prepared_dir: str = _field("data/prepared", "Data", "folder for prepared data: TFRecord shards, manifests", result=False)
    shards: int = _field(64, "Data", "training shards; K divides them", least=1)
    prepare_seed: int = _field(0, "Data", "of the order in which examples are dealt to the shards", least=0)
    shuffle_buffer: int = _field(1024, "Data", "examples of a logical replica that are mixed at a time", least=1)
    image_size: int = _field(224, "Data", "height and width for data sets of JPEG or PNG files", least=1)
    on_bad_record: str = _field("stop", "Data", "when an image cannot be read or decoded", ("stop", "skip"))
    max_bad_records: int = _field(100, "Data", "skip so many, and stop at one more", least=0)
    eval_every_steps: int = _field(
        0, "Evaluation", "evaluate every so many steps too, besides each epoch's end", least=0, result=False
    )
    eval_at_steps: str = _field("", "Evaluation", "evaluate after these steps too, as 10,100,1000", result=False)
    eval_at_start: bool = _field(False, "Evaluation", "evaluate before the first step too", result=False)
    optimizer: str = _field("momentum", "Optimizer", "update rule", OPTIMIZERS)
    learning_rate: float = _field(0.1, "Optimizer", "at the start of the schedule, for the global batch")
    schedule: str = _field("constant", "Optimizer", "of the learning rate, over the whole run", SCHEDULES)
    weight_decay: float = _field(0.0, "Optimizer", "decoupled, times the learning rate; 0: none")
    identical: bool = _field(True, "Arithmetic", "the same bits on any number of workers; --noidentical: equal up to rounding")
    intra_op_threads: int = _field(1, "Arithmetic", "threads in an operation of a worker; the bits follow it", least=1)
    dtype: str = _field("float32", "Arithmetic", "Keras's dtype policy", DTYPES)
    jit_compile: bool = _field(False, "Arithmetic", "compile the passes with XLA")
    steps_per_execution: int = _field(1, "Execution", "steps in one call; callbacks see every so many", least=1, result=False)
    communication: str = _field("auto", "Execution", "hint for collectives; changes no bit", COMMUNICATIONS, result=False)
    run_dir: str = _field("", "Execution", "where the run is written; default: runs/ and a name of its own", result=False)

    @property
    def replica_batch_size(self) -> int:
        """b, the examples of a logical replica."""
        return self.global_batch_size // self.logical_replicas

    def result_fields(self) -> dict:
        """The fields that decide the result: equal here means equal runs."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["result"]}

    def to_flags(self) -> list[str]:
        """The flags that give this configuration."""
        return [f"--{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)]

    def prepared_path(self) -> str:
        """The folder of the prepared data."""
        if self.dataset == "imagenet":
            return os.path.join(self.prepared_dir, "imagenet")
        return manifest.prepared_path(self.dataset, self.prepared_dir, self.shards, self.prepare_seed)

    def default_run_dir(self) -> str:
        digest = hashlib.sha256(json.dumps(self.result_fields(), sort_keys=True).encode()).hexdigest()
        return f"runs/{re.sub('[^A-Za-z0-9_.]+', '-', self.dataset)}-{self.model}-{digest[:8]}"


def parse(arguments: list[str], extra: tuple[str, ...] = (), base: dict | None = None):
    """Reads flags, on top of the data set's recipe.

    Args:
      arguments: flags, without program and command.
      extra: names of further flags that take text, for commands that need more than a Config.
      base: values instead of the recipe's: the configuration of an earlier run.
    Returns:
      (the resolved Config, --workers or None, {extra flag: text or ""}).
    Raises:
      UsageError: with a line for each problem.
    """
    given = _parsed(arguments, extra)
    if base is None:
        recipe = RECIPES / f"{given.dataset}.flags"
        before = [f"--flagfile={recipe}"] if recipe.exists() else []
    else:
        before = [f"--{name}={value}" for name, value in base.items()]
    given = _parsed([*before, *arguments], extra)
    values = {f.name: getattr(given, f.name) for f in dataclasses.fields(Config)}
    problems = [problem for f in dataclasses.fields(Config) if (problem := _problem(f, values[f.name]))]
    if given.workers is not None and given.workers < 1:
        problems.append(f"--workers={given.workers}: at least 1")
    if not all(part.isdecimal() for part in values["eval_at_steps"].split(",") if values["eval_at_steps"]):
        problems.append(f"--eval_at_steps={values['eval_at_steps']}: numbers of steps, as 10,100,1000")
    if problems:
        raise UsageError("\n".join(problems))
    values["logical_replicas"] = values["logical_replicas"] or tree.default_logical_replicas(values["global_batch_size"])
    config = Config(**values)
    if problem := batch_problem(config.global_batch_size, config.logical_replicas, 1):
        raise UsageError(problem)
    config = dataclasses.replace(config, run_dir=config.run_dir or config.default_run_dir())
    return config, given.workers, {name: getattr(given, name) or "" for name in extra}


def batch_problem(batch: int, logical_replicas: int, replicas: int, what: str = "--workers={}") -> str | None:
    """What is wrong with B, K and N: K must divide B, and N must divide K. None if nothing is."""
    if batch % logical_replicas:
        near = batch // logical_replicas * logical_replicas
        return (
            f"--global_batch_size={batch} cannot be divided into {logical_replicas} logical replicas: use a batch of "
            f"{f'{near} or ' if near else ''}{near + logical_replicas}, or --logical_replicas out of "
            f"{', '.join(map(str, tree.divisors(batch)))}"
        )
    if logical_replicas % replicas:
        return (
            f"{what.format(replicas)} cannot share {logical_replicas} logical replicas evenly: use one of "
            f"{', '.join(map(str, tree.divisors(logical_replicas)))}, or --logical_replicas={replicas} or a multiple of it"
        )
    return None


def help_text() -> str:
    """The flags of `train` by group, each with its default."""
    groups: dict[str, list[str]] = {}
    for f in dataclasses.fields(Config):
        name = f"--[no]{f.name}" if f.type is bool else f"--{f.name}"
        choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        default = "" if f.default in ("", False) else f" [{str(f.default).lower()}]"
        groups.setdefault(f.metadata["group"], []).append(f"  {name:<24}{f.metadata['help']}{choices}{default}")
    groups["Execution"].insert(0, f"  {'--workers':<24}start so many worker processes on this machine; default: this process")
    groups["Execution"].append(f"  {'--flagfile':<24}read flags from a file, one a line")
    return "\n\n".join(f"{group}\n" + "\n".join(lines) for group, lines in groups.items())


def _parsed(arguments, extra=()):
    values = flags.FlagValues()
    define = {str: flags.DEFINE_string, int: flags.DEFINE_integer, float: flags.DEFINE_float, bool: flags.DEFINE_bool}
    types = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        define[types[f.name]](f.name, f.default, f.metadata["help"], flag_values=values)
    for name in extra:
        flags.DEFINE_string(name, None, "", flag_values=values)
    flags.DEFINE_integer("workers", None, "worker processes on this machine", flag_values=values)
    try:
        rest = values(["train", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(values), n=1)
        raise UsageError(f"--{error.flagname} is no flag{f'; did you mean --{near[0]}?' if near else ''}") from None
    except flags.Error as error:
        raise UsageError(str(error).removeprefix("ERROR:: ").replace("flag --", "--")) from None
    if rest:
        raise UsageError(f"{rest[0]!r} is not a flag; flags are written --name=value")
    return values


def _problem(field, value):
    choices, least = field.metadata["choices"], field.metadata["least"]
    named_by_user = field.metadata["open"] and ":" in value  # package.module:function, synthetic:32x32x3:10:1024
    if choices and value not in choices and not named_by_user:
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"--{field.name}={value} is unknown{f'; did you mean {near[0]}?' if near else ''} One of: {', '.join(choices)}"
    if least is not None and value < least:
        return f"--{field.name}={value}: at least {least}"
    if least is not None and value > field.metadata["most"]:
        return f"--{field.name}={value}: at most {field.metadata['most']}"
    if field.type is float and not 0 <= value < float("inf"):
        return f"--{field.name}={value}: a number, 0 or more"
    return None
