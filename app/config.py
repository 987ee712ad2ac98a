"""The configuration of a run: one frozen, validated object.

Names are checked against tables that need no imports, so that a mistake is answered before TensorFlow is loaded.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import re

from app import manifest, optimizers, schedules, sources
from cluster import tree
from models import NAMES as MODELS
from models import check_name

DATASETS = (*sources.NAMES, "imagenet")
DECAYS = ("decoupled", "l2")
DTYPES = ("float32", "mixed_bfloat16", "mixed_float16")
BATCH_NORMS = ("replica", "global")
COMMUNICATIONS = ("auto", "ring", "nccl")
_EACH_WORKERS_OWN = ("data_dir", "prepared_dir", "run_dir", "quiet", "verbose", "start_timeout_s", "verify_against")


class UsageError(ValueError):
    """A user's mistake; each line of the message says what is wrong, with which value, and what to do."""


def _field(default, group, text, choices=None, least=None, most=2**31 - 1, result=True, open=False):
    metadata = {"group": group, "help": text, "choices": choices, "result": result, "open": open}
    metadata |= {"least": 0 if least is None and isinstance(default, float) else least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """All that decides a run's result, and a few fields that do not (`result=False`: where and how it is computed)."""

    dataset: str = _field("digits", "Run", "data set", DATASETS, open=True)
    model: str = _field("small_cnn", "Run", "network; ./run.sh models lists them", tuple(MODELS), open=True)
    global_batch_size: int = _field(128, "Run", "B, examples a step over all workers", least=1)
    logical_replicas: int = _field(
        0, "Run", "K, what the batch is divided into; 0: the largest power of two that leaves 32 examples each", least=0
    )
    seed: int = _field(1, "Run", "of the initial weights, the order of examples, augmentation, dropout", least=0)
    epochs: int = _field(10, "Run", "passes over the training examples", least=1)
    steps: int = _field(0, "Run", "stop after exactly so many steps; 0: by --epochs", least=0)
    init_from: str = _field("", "Run", "begin with the weights of a .keras or .weights.h5 file; or imagenet, for keras:NAME")
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
    evaluator_timeout_min: float = _field(
        60.0, "Evaluation", "an `evaluator` task ends when no checkpoint has come for so long; 0: never", result=False
    )
    label_smoothing: float = _field(0.0, "Loss", "share of the label that all classes have evenly", most=0.999)
    weight_decay: float = _field(0.0, "Loss", "lambda; 0: none, ImageNet ResNets 1e-4")
    weight_decay_kind: str = _field(
        "decoupled", "Loss", "off the weights at each update, times the rate; or lambda / 2 x squares in the loss", DECAYS
    )
    decay_norm_and_bias: bool = _field(False, "Loss", "decay batch-norm parameters and biases as well")
    optimizer: str = _field("momentum", "Optimizer", "update rule", optimizers.OPTIMIZERS)
    momentum: float = _field(0.9, "Optimizer", "of momentum, nesterov and rmsprop", most=0.99999)
    beta_1: float = _field(0.9, "Optimizer", "decay of the mean of gradients (adam and its like)", most=0.99999)
    beta_2: float = _field(0.999, "Optimizer", "decay of the mean of their squares (adam and its like)", most=0.99999)
    rho: float = _field(0.9, "Optimizer", "decay of the mean of squares (rmsprop, adadelta)", most=0.99999)
    epsilon: float = _field(0.0, "Optimizer", "added to a denominator; 0: the optimizer's own")
    clip_norm: float = _field(0.0, "Optimizer", "greatest norm of the global gradient, all variables together; 0: any")
    clip_value: float = _field(0.0, "Optimizer", "greatest size of an element of the global gradient; 0: any")
    ema: float = _field(0.0, "Optimizer", "decay of an average of the weights, with which the run ends; 0: none", most=0.99999)
    learning_rate: float = _field(0.1, "Learning rate", "base rate of the schedule")
    learning_rate_for: int = _field(
        0, "Learning rate", "global batch that the rate is meant for: it is scaled by B / this; 0: not scaled", least=0
    )
    schedule: str = _field("constant", "Learning rate", "how the rate goes on after the warm-up", schedules.SCHEDULES)
    schedule_unit: str = _field(
        "epochs", "Learning rate", "unit of warmup, boundaries, decay_every, piecewise; steps are global", ("epochs", "steps")
    )
    warmup: float = _field(0.0, "Learning rate", "length of the linear rise from 0")
    boundaries: str = _field("", "Learning rate", "where `step` multiplies by the decay rate, as 30,60,80,90")
    decay_every: float = _field(0.0, "Learning rate", "how often `step` and `exponential` do so")
    decay_rate: float = _field(0.1, "Learning rate", "factor of `step` and `exponential`", most=1)
    piecewise: str = _field("", "Learning rate", "rates and the boundaries between them, as 0.1;82;0.01;123;0.001")
    min_learning_rate: float = _field(0.0, "Learning rate", "end of `cosine`, `polynomial`; least of `step`, `exponential`")
    power: float = _field(1.0, "Learning rate", "exponent of `polynomial`; 1: a straight line")
    identical: bool = _field(True, "Arithmetic", "the same bits on any number of workers; --noidentical: equal up to rounding")
    batch_norm: str = _field(
        "replica",
        "Arithmetic",
        "batch normalisation's statistics: of a logical replica's examples, or of the global batch, as one machine would take "
        "them (needs --noidentical and no dropout)",
        BATCH_NORMS,
    )
    intra_op_threads: int = _field(1, "Arithmetic", "threads in an operation of a worker; the bits follow it", least=1)
    dtype: str = _field("float32", "Arithmetic", "Keras's dtype policy", DTYPES)
    loss_scale: str = _field("", "Arithmetic", "for mixed_float16: dynamic, or a number as 128; empty: dynamic there")
    jit_compile: bool = _field(False, "Arithmetic", "compile the passes with XLA")
    asynchronous: bool = _field(
        False,
        "Execution",
        "with parameter servers: an update for each logical replica's batch when its gradient comes, round(n / b) an epoch; "
        "the result follows the order of arrival",
    )
    steps_per_execution: int = _field(1, "Execution", "steps in one call; callbacks see every so many", least=1, result=False)
    communication: str = _field("auto", "Execution", "hint for collectives; changes no bit", COMMUNICATIONS, result=False)
    start_timeout_s: int = _field(60, "Execution", "how long the workers wait for one another", least=1, result=False)
    checkpoint_every_steps: int = _field(
        0, "Checkpoints", "save every so many steps, besides each epoch's end; 0: by time alone", least=0, result=False
    )
    checkpoint_every_min: float = _field(10.0, "Checkpoints", "save every so many minutes; 0: not by time", result=False)
    keep_checkpoints: int = _field(
        2, "Checkpoints", "keep so many of the last, and the best by held-out top-1; 0: write none", least=0, result=False
    )
    max_skipped_steps: int = _field(
        50, "Checkpoints", "stop when a loss scale has skipped so many steps in a row", least=1, result=False
    )
    step_timeout_s: int = _field(
        600,
        "Execution",
        "end when a worker gives no sign of life for so long, in a step, tracing, evaluation",
        least=1,
        result=False,
    )
    run_dir: str = _field("", "Output", "where the run is written; default: runs/ and a name of its own", result=False)
    tensorboard: bool = _field(True, "Output", "write events for TensorBoard", result=False)
    log_every_steps: int = _field(1, "Output", "steps between two lines of metrics.jsonl and points", least=1, result=False)
    profile_steps: str = _field("", "Output", "trace these steps for TensorBoard's profiler, as 100:110", result=False)
    fingerprint_every: int = _field(
        100,
        "Output",
        "steps between two lines of fingerprints.jsonl, and two comparisons of the workers' weights; 0: none",
        least=0,
        result=False,
    )
    verify_against: str = _field(
        "", "Output", "run directory of the same run on one machine: end at the first difference from it", result=False
    )
    quiet: bool = _field(False, "Output", "print the summary alone", result=False)
    verbose: bool = _field(False, "Output", "show TensorFlow's own messages", result=False)

    @property
    def replica_batch_size(self) -> int:
        """b, the examples of a logical replica."""
        return self.global_batch_size // self.logical_replicas

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step to trace, counted from 1; None if there is none."""
        match = re.fullmatch(r"([1-9]\d{0,8}):([1-9]\d{0,8})", self.profile_steps)
        return (int(match[1]), int(match[2])) if match and int(match[1]) <= int(match[2]) else None

    def result_fields(self) -> dict:
        """The fields that decide the result: equal here means equal runs."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["result"]}

    def differs(self, recorded: dict) -> dict:
        """{field that decides the result: its value in a run's record}, where it is another; a lacking one has its default."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}  # of fields that a record is older than
        there = {name: recorded.get(name, defaults[name]) for name in self.result_fields()}
        return {name: value for name, value in there.items() if value != getattr(self, name)}

    def shared_fields(self) -> dict:
        """The fields that have to be the same on all workers of a run."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _EACH_WORKERS_OWN}

    def to_flags(self) -> list[str]:
        """The flags that give this configuration."""
        return [f"--{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)]

    def prepared_path(self) -> str:
        """The folder of the prepared data."""
        if self.dataset == "imagenet":
            return os.path.join(self.prepared_dir, "imagenet")
        return manifest.prepared_path(self.dataset, self.prepared_dir, self.shards, self.prepare_seed)

    def default_run_dir(self) -> str:
        fields = {name: value for name, value in self.result_fields().items() if name != "init_from" or value}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        return f"runs/{re.sub('[^A-Za-z0-9_.]+', '-', f'{self.dataset}-{self.model}')}-{digest[:8]}"


def resolved(values: dict) -> Config:
    """The Config of these values of its fields, checked, with K and the run directory filled in.

    Raises:
      UsageError: with a line for each problem.
    """
    problems = [problem for f in dataclasses.fields(Config) if (problem := _problem(f, values[f.name]))]
    if not problems:  # the rest looks at several fields at once
        config = Config(**values)
        config = dataclasses.replace(
            config, logical_replicas=config.logical_replicas or tree.default_logical_replicas(config.global_batch_size)
        )
        problems = [*_contradictions(config), *optimizers.problems(config), *schedules.problems(config)]
    if problems:
        raise UsageError("\n".join(problems))
    return dataclasses.replace(config, run_dir=config.run_dir or config.default_run_dir())


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


def _contradictions(config):
    if problem := batch_problem(config.global_batch_size, config.logical_replicas, 1):
        yield problem
    elif config.dataset != "imagenet" and config.shards % config.logical_replicas:
        yield (
            f"--shards={config.shards} cannot be shared by {config.logical_replicas} logical replicas: use "
            f"--shards={-(-config.shards // config.logical_replicas) * config.logical_replicas}, or --logical_replicas out of "
            f"{', '.join(map(str, tree.divisors(config.shards)))}"
        )
    name, colon, _ = config.dataset.partition(":")
    if colon and name in DATASETS and name != "synthetic":
        yield f"--dataset={config.dataset}: {name} takes nothing after its name; one of your own is package.module:function"
    elif colon and name == "synthetic" and not re.fullmatch(r"synthetic:\d+x\d+x\d+:\d+:\d+", config.dataset):
        yield f"--dataset={config.dataset}: expected synthetic:HxWxC:classes:examples, as synthetic:32x32x3:10:1024"
    if problem := check_name(config.model):
        yield f"--model={config.model}: {problem}"
    of_keras = MODELS[config.model].builder if config.model in MODELS else config.model
    if config.init_from == "imagenet" and not of_keras.startswith("keras:"):
        yield f"--init_from=imagenet is for --model=keras:NAME; for {config.model} name a file that Keras has saved"
    elif config.init_from not in ("", "imagenet") and not config.init_from.endswith((".keras", ".h5", ".hdf5")):
        yield f"--init_from={config.init_from}: a file named .keras, .weights.h5 or .h5, or imagenet"
    if not all(part.isdecimal() for part in config.eval_at_steps.split(",") if config.eval_at_steps):
        yield f"--eval_at_steps={config.eval_at_steps}: numbers of steps, as 10,100,1000"
    if config.profile_steps and not config.profiled:
        yield f"--profile_steps={config.profile_steps}: the first and the last step, counted from 1, as 100:110"
    if config.verify_against and not config.identical:
        yield f"--verify_against={config.verify_against} compares bits, which --noidentical gives away: leave out one of them"
    if config.asynchronous:
        for name in ("verify_against",) if config.batch_norm == "replica" else ("batch_norm", "verify_against"):
            if value := getattr(config, name):
                yield f"--{name}={value} does not go with --asynchronous, where no two runs are the same: leave out one of them"
    if config.batch_norm == "global" and config.identical:
        yield (
            "--batch_norm=global adds statistics over the workers within the passes, in an order that follows their number: "
            "give --noidentical as well, or --batch_norm=replica"
        )
    if config.batch_norm == "global" and config.jit_compile:
        yield "--batch_norm=global adds over the workers within the passes, which XLA cannot compile: leave out --jit_compile"
    if config.loss_scale and config.dtype != "mixed_float16":
        yield f"--loss_scale={config.loss_scale} is for --dtype=mixed_float16; --dtype={config.dtype} needs none: leave it out"


def _problem(field, value):
    choices, least = field.metadata["choices"], field.metadata["least"]
    named_by_user = field.metadata["open"] and ":" in value  # package.module:function, synthetic:32x32x3:10:1024
    if choices and value not in choices and not named_by_user:
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"--{field.name}={value} is unknown{f'; did you mean {near[0]}?' if near else '.'} One of: {', '.join(choices)}"
    if field.type is float and not 0 <= value < float("inf"):
        return f"--{field.name}={value}: a number, 0 or more"
    if least is not None and value < least:
        return f"--{field.name}={value}: at least {least}"
    if least is not None and value > field.metadata["most"]:
        return f"--{field.name}={value}: at most {field.metadata['most']}"
    return None
