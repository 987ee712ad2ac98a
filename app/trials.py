"""Suspected faults put to the test: the first step that differs is made again from the state before it, in each way suspected.

A fault is named only if the step made so has the other run's numbers, within rounding, and the step made properly has not.
"""

import dataclasses
import math

from app import hypotheses
from app.hypotheses import Cause
from app.replay import NoState

FITS = 1e-4  # of a tensor's norm: rounding in float32 stays below, within a step
ROUNDING = 2e-5
# Runs that round otherwise do so in every sum, and Adam's first update divides each element by its own size (1.5e-4 seen).
UNLIKE_SUMS = 10


def causes(replay, run_a, run_b, step, a, b, notes):
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
        evidence = f"run B's step is the proper one within {nothing:.1e}; {remedy(run_a, run_b)}"
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


def ran_with(run_a, run_b) -> list[str]:
    """What differs in the versions, the processors and the settings that kernels are chosen by, as far as both are recorded."""
    found = []
    for kind in ("versions", "machine"):
        recorded = ((run.config or {}).get(kind) or run.lines[0].get(kind) for run in (run_a, run_b))
        a, b = (of if isinstance(of, dict) else {} for of in recorded)
        found += [f"{name} {_unlike(a[name], b[name])}" for name in a if name in b and a[name] != b[name]]
    return found


def _unlike(a, b):
    """Two values that differ, in words; of lists, what one alone has."""
    if isinstance(a, list) and isinstance(b, list):
        return " and ".join(f"{' '.join(sorted(set(of) - set(other))) or 'no more'}" for of, other in ((a, b), (b, a)))
    return f"{a or 'unset'} and {b or 'unset'}"


def remedy(run_a, run_b):
    """What would remove a difference by rounding."""
    if "global" in (run.lines[0].get("batch_norm") for run in (run_a, run_b)):
        return "--batch_norm=global adds in an order that follows the number of workers"
    if not all(run.lines[0].get("identical", True) for run in (run_a, run_b)):
        return "--identical (the default) adds in one order whatever the number of workers is"
    a, b = (run.config or {} for run in (run_a, run_b))
    if a.get("intra_op_threads") != b.get("intra_op_threads"):
        return f"--intra_op_threads is {a.get('intra_op_threads')} and {b.get('intra_op_threads')}; give both the same"
    if unlike := ran_with(run_a, run_b):
        return f"{'; '.join(unlike)}: use versions, processors and settings of one kind"
    return "the same processor, TensorFlow and --intra_op_threads, with --identical, would remove it"
