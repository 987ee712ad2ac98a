"""Why two runs are not the same: the step and the stage at which they part, and the cause, if a replay shows it.

What the records tell is read off them; the rest is put to the test on the first step that differs (`trials`). A cause that
neither shows is unknown.
"""

import dataclasses
import json
import os

from app import by_worker, compare_data, differences, evaluation_causes, trials
from app.hypotheses import Cause
from app.replay import NoState

_LATER = {"batch_norm": "replica", "asynchronous": False}  # what runs recorded before a field was there did
_SHAPED = ("weights", "statistics", "optimizer")
_IGNORED = ("prepared_dir", "data_dir", "run_dir", "replicas", "cluster", "devices", "machine", "source_revision", "versions")
_IGNORED += ("workers",)


@dataclasses.dataclass(frozen=True)
class Run:
    """A recorded run: its name, lines of fingerprints, what config.json holds, or None, and the lines' file."""

    name: str
    lines: list[dict]
    config: dict | None = None
    file: str = ""

    @property
    def steps(self) -> dict[int, dict]:
        """The lines of steps, by number."""
        return {line["step"]: line for line in self.lines[1:] if "loss" in line}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What `compare` found.

    Attributes:
      step: the first that differs, from 1; 0: before the first; None: none differs.
      stage: one of STAGES; None: none differs.
      difference: the first difference in the numbers, or None.
      causes: those that fit, the best first; empty: unknown.
      notes: what else should be known, in lines.
      same: steps that both recorded, and that are the same up to there.
    """

    step: int | None
    stage: str | None
    difference: differences.Difference | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    same: int

    def __str__(self):
        if self.stage is None:
            return "\n".join([f"the same: {recorded_steps(self.same)}, to the last bit", *self.notes])
        where = f"at step {self.step}" if self.step else "before the first step"
        lines = [f"the runs part {where}, in the stage: {self.stage} (recorded steps before that are the same: {self.same})"]
        lines += [f"first difference: {self.difference}"] if self.difference else []
        lines += [f"{'would fit as well' if rank else 'cause'}: {cause}" for rank, cause in enumerate(self.causes)]
        if not self.causes:
            lines.append("cause: unknown")
        return "\n".join([*lines, *self.notes])


def recorded_steps(count: int) -> str:
    """How many, in words."""
    return f"{count} recorded step{'s' * (count != 1)}"


STAGES = (
    "configuration",
    "initial weights",
    "data",
    "pixels",
    "loss",
    "gradient",
    "reduction",
    "update",
    "statistics",
    "evaluation",
)
_STAGE = {  # of what `differences` tells
    "initial statistics": "initial weights",
    "initial optimizer": "initial weights",
    "data ids": "data",
    "labels": "data",
    "learning rate": "update",
    "optimizer": "update",
    "weights": "update",
    "workers": "statistics",
}


def compare(run_a: Run, run_b: Run, replay=None) -> Finding:
    """Compares two runs.

    Args:
      run_a, run_b: see `read`.
      replay: a `Replay` of run A, or a function that makes one; None: causes that need a replay stay unknown.
    """
    lines_a, lines_b = by_worker.shared(run_a.lines, run_b.lines)
    run_a, run_b = dataclasses.replace(run_a, lines=lines_a), dataclasses.replace(run_b, lines=lines_b)
    notes, other_config = [], _configuration(run_a, run_b)
    if any(of != by for of, by in zip(*(_shapes(run) for run in (run_a, run_b)), strict=True)):
        return Finding(
            0, "configuration", None, (Cause(11, "; ".join(other_config)),), ("their tensors cannot be compared",), 0
        )
    step, difference, same, lines = _first(run_a, run_b)
    if difference is None:
        causes, last = (Cause(11, "; ".join(other_config)),) if other_config else (), [run.lines[-1] for run in (run_a, run_b)]
        return Finding(0 if causes else None, "configuration" if causes else None, None, causes, tuple(_drift(*last)), same)
    stage = _stage(difference, *lines)
    if by := [name for name, run in (("A", run_a), ("B", run_b)) if (run.config or {}).get("asynchronous")]:
        evidence = f"run {' and run '.join(by)} applied gradients in the order in which they came (--asynchronous)"
        notes = [f"the configurations differ: {'; '.join(other_config)}"] if other_config else []
        notes.append("no two such runs are the same: leave --asynchronous out, or look at the spread over several")
        return Finding(step, "configuration" if other_config else stage, difference, (Cause(14, evidence),), tuple(notes), same)
    causes = list(_causes(run_a, run_b, step, stage, lines, replay, notes))
    notes += _drift(*lines)
    if (unlike := trials.ran_with(run_a, run_b)) and not any(cause.number == 13 for cause in causes):
        notes.append(
            f"they ran with {'; '.join(unlike)}: other kernels round otherwise, and rounding decides ties (max pooling)"
        )
    if other_config:
        notes = [f"the configurations differ: {'; '.join(other_config)}", f"the numbers part in the stage: {stage}", *notes]
        stage, causes = "configuration", causes or [Cause(11, "; ".join(other_config))]
    return Finding(step, stage, difference, tuple(causes), tuple(notes), same)


def read(path: str) -> Run:
    """The run in a run directory, or in a file of fingerprints. Raises ValueError, OSError."""
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    file = os.path.join(path, "fingerprints.jsonl") if os.path.isdir(path) else path
    configured = os.path.join(directory, "config.json")
    config = None
    if os.path.basename(file) == "fingerprints.jsonl" and os.path.exists(configured):
        with open(configured) as opened:
            try:
                config = dict(json.load(opened))
            except (ValueError, TypeError):
                raise ValueError(f"{configured} is damaged") from None
    return Run(path, by_worker.read(file), config, file)


def _configuration(run_a, run_b):
    """What differs in what decides the result: of config.json, or else of the records' headers."""
    if run_a.config and run_b.config:
        a, b = ({k: v for k, v in run.config.items() if k not in _IGNORED} for run in (run_a, run_b))
        from app.config import Config

        a, b = (_LATER | {k: v for k, v in c.items() if _decides(Config, k)} for c in (a, b))
    else:
        names = ("global_batch_size", "seed", "identical", "batch_norm")
        a, b = (_LATER | {k: run.lines[0][k] for k in names if k in run.lines[0]} for run in (run_a, run_b))
        a, b = ({**c, "logical_replicas": run.lines[0].get("logical_replicas")} for c, run in ((a, run_a), (b, run_b)))
        for i, kind in enumerate(_SHAPED):
            a[kind], b[kind] = (_shapes(run)[i] for run in (run_a, run_b))
        if "cluster.watch" in (run_a.lines[0]["made_by"], run_b.lines[0]["made_by"]):
            a, b = ({k: c[k] for k in _SHAPED} for c in (a, b))
    return [f"{k} is {a.get(k)!r} in run A and {b.get(k)!r} in run B" for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)]


def _shapes(run):
    """Shapes and types of weights, statistics and the optimizer's variables."""
    return [[shape_and_type for _, *shape_and_type in run.lines[0][kind]] for kind in _SHAPED]


def _decides(config_class, name):
    field = config_class.__dataclass_fields__.get(name)
    return name == "data_manifest" or (field is not None and field.metadata["result"])


def _first(run_a, run_b):
    """(step, difference, recorded steps that are the same, the two lines) of the first lines that differ."""
    of_b, same = differences.keyed(run_b.lines), 0
    for key, line in differences.keyed(run_a.lines).items():
        if key[0] < 0 or key not in of_b:
            continue
        found = differences.of_line(run_a.lines[0], line, of_b[key])
        if found and not (found.stage == "initial optimizer" and found.what.endswith("learning_rate")):  # a step tells better
            return key[0], found, same, (line, of_b[key])
        same += "loss" in line
    return None, None, same, None


def _drift(a, b):
    """Lines that tell whose workers hold different values."""
    for name, line in (("A", a), ("B", b)):
        if drift := differences.drift(line):
            yield f"run {name}'s workers hold different values: {drift}"


def _stage(difference, a, b):
    if difference.stage == "pixels" and "ids" not in a and a["y"] != b["y"]:
        return "data"  # other examples, as far as one can see
    if difference.stage == "pixels" and sorted(a["x"]) == sorted(b["x"]):
        return "data"
    if difference.stage == "gradient" and "replicas" not in a:
        return "gradient"
    return _STAGE.get(difference.stage, difference.stage)


def _causes(run_a, run_b, step, stage, lines, replay, notes):
    a, b = lines
    if stage == "initial weights":
        yield Cause(11, "the runs start from other numbers")
        return
    try:
        replay, reason = replay() if callable(replay) else replay, "there is no replay"
    except NoState as error:
        replay, reason = None, str(error)
    workers = sorted({*(run.lines[0].get("replicas", 1) for run in (run_a, run_b)), 2, 3, 4, 8})
    if stage == "data":
        found = list(compare_data.explained(run_a.steps, run_b.steps, step, workers, replay))
        yield from (Cause(number, evidence) for number, evidence in found)
        if not found:
            yield from (Cause(2, text, run="A") for text in compare_data.repeated(run_b.steps, run_a.steps, step, workers, "B"))
        return
    if stage == "pixels":
        if replay is not None and replay.repainted:
            for text, hashes in replay.repainted(step):
                yield from (Cause(4, text, run=name) for name, line in (("B", b), ("A", a)) if hashes == line["x"])
        return
    if stage == "evaluation":
        found = evaluation_causes.explained(replay, a, b, run_a.lines[0])
        yield from (Cause(12, text, run=odd) for odd, text in found)
        return
    before = max((t for t in run_a.steps if t < step and t in run_b.steps), default=0)
    if step - 1 > max(before, run_a.lines[1]["step"]):
        notes.append(
            f"steps {before + 1} to {step - 1} were not recorded, so the runs may have parted there, and step {step} cannot be "
            "replayed from a state that both had. Record every step: --fingerprint_every=1"
        )
        return
    if replay is None:
        notes.append(f"the state before this step cannot be had: {reason}")
        return
    yield from trials.causes(replay, run_a, run_b, step, a, b, notes)
