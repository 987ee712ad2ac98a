"""Why two runs are not the same: the step and the stage at which they part, and the cause, if a replay shows it.

The first step that differs is made again from the state before it, in each way that is suspected. A fault is named only if the
step made so has the other run's numbers, within rounding, and the step made properly has not. Otherwise the cause is unknown.
"""

import dataclasses
import json
import math
import os

from app import by_worker, compare_data, differences, evaluation_causes, hypotheses
from app.hypotheses import CAUSES
from app.replay import NoState

FITS = 1e-4  # of a tensor's norm: rounding in float32 stays below, within a step
ROUNDING = 2e-5
# Runs that round otherwise do so in every sum, and Adam's first update divides each element by its own size (1.5e-4 seen).
UNLIKE_SUMS = 10
_LATER = {"batch_norm": "replica", "asynchronous": False}  # what runs recorded before a field was there did
_SHAPED = ("weights", "statistics", "optimizer")
_IGNORED = ("prepared_dir", "data_dir", "run_dir", "replicas", "cluster", "devices", "source_revision", "versions", "workers")


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
class Cause:
    """A cause that reproduces the other run.

    Attributes:
      number: in hypotheses.CAUSES.
      evidence: what was done, and the numbers that show it.
      distance: of the replayed step from the recorded one, the largest over its tensors, relative; 0 for what needs no replay.
      run: the one that is odd, 'B' as a rule; 'A' if run B's step is the proper one.
      recorded: whether the records tell it as well.
    """

    number: int
    evidence: str
    distance: float = 0.0
    run: str = "B"
    recorded: bool = False

    def __str__(self):
        shown = f" (replayed: within {self.distance:.1e} of run {self.run})" if self.distance else ""
        return f"{CAUSES[self.number]}: {'in run A, ' if self.run == 'A' else ''}{self.evidence}{shown}"


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
            return "\n".join([f"the same: {self.same} recorded steps, to the last bit", *self.notes])
        where = f"at step {self.step}" if self.step else "before the first step"
        lines = [f"the runs part {where}, in the stage: {self.stage} (recorded steps before that are the same: {self.same})"]
        lines += [f"first difference: {self.difference}"] if self.difference else []
        lines += [f"{'would fit as well' if rank else 'cause'}: {cause}" for rank, cause in enumerate(self.causes)]
        if not self.causes:
            lines.append("cause: unknown")
        return "\n".join([*lines, *self.notes])


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
    yield from replayed(replay, run_a, run_b, step, a, b, notes)


def replayed(replay, run_a, run_b, step, a, b, notes):
    """The causes of which the replayed step has the odd run's numbers, the best first: run B's, if the proper step has A's."""
    try:
        replay.go_to(step)
    except NoState as error:
        notes.append(f"the state before this step cannot be had: {error}")
        return
    rate = [i for i, (path, *_) in enumerate(run_a.lines[0]["optimizer"]) if path.endswith("learning_rate")]
    a, b = (_without(line, rate) for line in (a, b))  # the update shows which rate was used
    sums = 1 if all(run.lines[0].get("identical", True) for run in (run_a, run_b)) else UNLIKE_SUMS
    fits, rounding = sums * FITS, sums * ROUNDING
    from_a, from_b = (_distance(replay, replay.proper, line, math.inf, rate) for line in (a, b))
    if min(from_a, from_b) > fits:
        apart = f"differs from run A's own record by {from_a:.1e}, and from run B's by {from_b:.1e}"
        notes.append(f"the step made again {apart}, so nothing can be concluded from it")
        return
    sound, odd = ("A", "B") if from_a <= fits else ("B", "A")
    headers, lines, distances = [run_a.lines[0], run_b.lines[0]], [a, b], [from_a, from_b]
    if odd == "A":
        headers, lines, distances = headers[::-1], lines[::-1], distances[::-1]
    proper, nothing = distances
    found = []
    for suspect in hypotheses.table(replay, *headers, *lines):
        if suspect.cause == 10 and found:
            break  # many, and the least likely
        distance = _distance(replay, _with(suspect.change, replay.proper), lines[1], fits, rate)
        if distance <= fits and distance < nothing / 10:
            found.append(Cause(suspect.cause, suspect.text, max(distance, 1e-300), odd, suspect.recorded))
    if nothing <= rounding:
        evidence = f"run B's step is the proper one within {nothing:.1e}; {_setting(run_a, run_b)}"
        found.append(Cause(13, evidence, max(nothing, 1e-300)))
    notes.append(f"the step made properly has run {sound}'s numbers (within {proper:.1e}); run {odd}'s are {nothing:.1e} away")
    yield from sorted(found, key=lambda cause: (not cause.recorded, cause.distance))


def _with(change, proper):
    """The change of a step that otherwise keeps its moving statistics as the run did."""
    if not proper.own_statistics or change.groups or change.workers not in (1, proper.workers):
        return change
    return dataclasses.replace(change, workers=proper.workers, own_statistics=True)


def _distance(replay, change, line, enough, rate=()):
    """How far a step made with `change` is from a recorded one: the largest of its tensors' relative distances.

    Ends at the first stage that is further away than `enough`.
    """
    worst = 0.0
    for kind, predicted in replay.predicted(change):
        if kind not in line:
            continue
        if kind == "metric_sums":
            pairs = [(x, y) for p, q in zip(predicted, line[kind], strict=False) for x, y in zip(p, q, strict=True)]
            found = max((abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in pairs), default=0.0)
        else:
            predicted = _without({kind: predicted}, rate)[kind] if kind == "optimizer" else predicted
            # Weights are rounded: an update, their difference, is known no better than they are.
            slack = [1.2e-7 * norm for norm in line["weights"]["norm"]] if kind == "update" else None
            found = _apart(predicted, line[kind], slack)
        worst = max(worst, found if not math.isnan(found) else math.inf)
        if worst > enough:
            break
    return worst


def _without(line, places):
    """The line without these of the optimizer's variables."""
    kept = {name: [v for i, v in enumerate(values) if i not in places] for name, values in line["optimizer"].items()}
    return {**line, "optimizer": kept}


def _apart(a, b, slack=None):
    """The largest distance of two lists' tensors, relative to the tensor, or to a thirtieth of the list if that is more.

    A distance of `slack`, a tensor, is none.
    """
    if a["hash"] == b["hash"]:
        return 0.0
    floor = 0.03 * math.sqrt(sum(norm**2 for norm in a["norm"]) / max(1, len(a["norm"])))
    worst = 0.0
    for i, (p, q) in enumerate(zip(a["projections"], b["projections"], strict=True)):
        square = sum((x - y) ** 2 for x, y in zip(p, q, strict=True)) / len(p)
        distance = max(0.0, math.sqrt(square) - (slack[i] if slack else 0.0))
        worst = max(worst, distance / max(a["norm"][i], b["norm"][i], floor, 1e-30))
    return worst


def _setting(run_a, run_b):
    """What would remove a difference by rounding."""
    if "global" in (run.lines[0].get("batch_norm") for run in (run_a, run_b)):
        return "--batch_norm=global adds in an order that follows the number of workers"
    if not all(run.lines[0].get("identical", True) for run in (run_a, run_b)):
        return "--identical (the default) adds in one order whatever the number of workers is"
    configs = [run.config or {} for run in (run_a, run_b)]
    for name, advice in (("intra_op_threads", "give both the same --intra_op_threads"), ("versions", "use the same versions")):
        if configs[0].get(name) != configs[1].get(name):
            return f"{name}: {configs[0].get(name)} and {configs[1].get(name)}; {advice}"
    return "the same processor, TensorFlow and --intra_op_threads, with --identical, would remove it"
