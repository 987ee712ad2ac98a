"""Whether runs that need not be identical differ by more than rounding explains.

The yardstick is measured, not assumed: the same run on one worker, every weight of which is moved by sixteen units in the last
place at every step (`app/rounding.py`), many times what the rounding of reordered sums does. Its distance from the undisturbed
run says how far network, data and rate carry such a disturbance. A run may be `ALLOWED` times as far away as the disturbed run
is at any step up to `AHEAD` steps later (at the first step: at that step), plus `FLOOR`, a unit in the last place of float32.
What no rounding touches, data, pixels, labels and rates, has to agree exactly.

A fault shows at the first step. Loss and moving statistics are continuous: there rounding explains about 1e-6, and another
group of batch normalisation or another dropout mask is far more. Gradients jump where a ReLU tips over, by 1e-3; a gradient
that is summed where it should be averaged is at a distance of 1. Some ten steps later the disturbed run has gone its own way,
and nothing can be told any more by distances.
"""

import dataclasses

from app import differences
from app.terminal import listed, workers

ALLOWED, AHEAD, FLOOR = 4.0, 2, 2.0**-23
KINDS = ("loss", *differences.TENSORS)
_EXACT = ("data ids", "pixels", "labels", "learning rate")


def judged(runs: list[dict], reference: dict, names: list[str], rows: list[dict]) -> dict:
    """What verify.json holds of runs that need not be identical. Arguments as `verify.judged` has them; rows: its by_step."""
    steps = [[line for line in one["lines"] if "loss" in line] for one in (runs[0], reference)]
    envelope, far = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, (0.0, 0, 0.0))
    difference = differences.of_line(runs[0]["lines"][0], runs[0]["lines"][0], runs[1]["lines"][0])
    difference, run = (difference, runs[1]["workers"]) if difference else (None, 0)
    for row, plain, disturbed in zip(rows, *steps, strict=False):
        row["rounding"] = {kind: _distance(kind, plain, disturbed) for kind in KINDS}
    for number, row in enumerate(rows):
        coming = rows[number : number + 1 + (AHEAD if number else 0)]
        envelope = {kind: max(envelope[kind], *(each["rounding"][kind] for each in coming)) for kind in KINDS}
        for kind in KINDS:
            far[kind] = max(far[kind], (max(row["distances"][kind]), row["step"], envelope[kind]))
        if difference is None:
            difference, run = _beyond(runs, row, envelope)
    if difference is None:
        difference, run = _of_evaluations(runs)
    found = {"largest": {k: dict(zip(("distance", "step", "rounding"), values, strict=True)) for k, values in far.items()}}
    if difference:
        line = f"DIFFERENT: {names[0]} against {workers(run)}: {difference}"
        told = {**dataclasses.asdict(difference), "explanation": difference.explanation, "run": run}
        return found | {"verdict": "DIFFERENT", "line": line, "difference": told}
    at_first = ", ".join(f"{kind} {max(rows[0]['distances'][kind]):.2g}" for kind in KINDS)
    largest = ", ".join(f"{k} {v:.2g} at step {t} ({upto:.2g})" for k, (v, t, upto) in far.items() if v)
    shown = f"relative distances at step {rows[0]['step']}: {at_first}; largest, and of the disturbed run: {largest}"
    line = f"EQUAL up to rounding: {rows[-1]['step']} steps on {listed(names)}; {shown if largest else 'every bit agrees'}"
    return found | {"verdict": "EQUAL", "line": line}


def _distance(kind, a, b):
    return differences.loss_distance(a, b) if kind == "loss" else differences.distance(a[kind], b[kind])


def _beyond(runs, row, envelope):
    """The first difference of a step that rounding does not explain, and the run that has it; or (None, 0)."""
    for stage in _EXACT:
        hashes = row["hashes"][stage]
        for one, value in zip(runs[1:], hashes[1:], strict=True):
            if value != hashes[0]:
                return differences.Difference(row["step"], stage, "", f"hash {hashes[0]} against {value}"), one["workers"]
    for kind in KINDS:
        limit = ALLOWED * envelope[kind] + FLOOR
        for one, value in zip(runs[1:], row["distances"][kind], strict=True):
            if not value <= limit:
                detail = f"relative distance {value:.3g}, and rounding explains {limit:.3g}"
                return differences.Difference(row["step"], kind, "all tensors", detail), one["workers"]
    return None, 0


def _of_evaluations(runs):
    """Evaluations have to count the same number of examples."""
    for one in runs[1:]:
        pairs = zip(*([line for line in r["lines"] if "evaluation_after" in line] for r in (runs[0], one)), strict=False)
        for a, b in pairs:
            if a["examples"] != b["examples"]:
                detail = f"{a['examples']} against {b['examples']}"
                return differences.Difference(a["evaluation_after"], "evaluation", "examples", detail), one["workers"]
    return None, 0
