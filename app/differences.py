"""Where two records of fingerprints part first: step, stage and tensor. Pure functions of the lines; imports no TensorFlow.

`cluster/fingerprint.py` says what the lines hold. A step's stages are compared in the order in which the step computes them,
so that the first one that differs is the one that made the others differ.
"""

import dataclasses
import hashlib
import json
import math

STATES = ("weights", "statistics", "optimizer")
TENSORS = ("gradient", "update", *STATES)
_HEADER = ("global_batch_size", "logical_replicas", "seed", "identical", *STATES, "gradients", "metrics")

EXPLANATIONS = {
    "configuration": "two different runs: train with the same flags",
    "initial weights": "the weights differ before the first step: another seed, another network, or a start from other files",
    "initial statistics": "the moving statistics differ before the first step",
    "initial optimizer": "the optimizer's variables differ before the first step",
    "data ids": "other examples, or the same in another order, were put into the batch",
    "pixels": "the same examples were chosen, but the pixels differ: another augmentation, decoder or file",
    "labels": "examples and pixels are the same, the labels or sample weights are not",
    "loss": "batch and weights are the same, the forward pass is not: random numbers, the group of batch normalisation, or "
    "the rounding of another processor, library or number of threads",
    "gradient": "the losses are the same, the backward passes of single logical replicas are not",
    "reduction": "every logical replica's gradient is the same, their combination is not: summed for averaged, clipped before, "
    "some left out, or added in another order",
    "learning rate": "the gradient is the same, the learning rate or the loss scale is not",
    "update": "gradient and rate are the same, what was added to the weights is not: another optimizer state, clipping, decay",
    "optimizer": "the update is the same, the optimizer's variables after it are not",
    "statistics": "the moving statistics were combined in another way over the logical replicas",
    "weights": "the update is the same, the weights after it are not",
    "workers": "the workers of one run hold different values: something is not reduced",
    "evaluation": "the weights are the same, the evaluation is not: examples counted twice, left out or weighted otherwise",
    "length": "one run ended before the other",
    "result": "all steps are the same, weights, optimizer or history at the end are not",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first difference of two records.

    Attributes:
      step: number of the step, from 1; 0 before the first.
      stage: a key of EXPLANATIONS.
      what: the tensor's path, the example, the field, or "".
      detail: both values, or how far apart they are.
    """

    step: int
    stage: str
    what: str
    detail: str

    def __str__(self):
        where = f"step {self.step}" if self.step else "before the first step"
        return f"{where}, {self.stage}{f', {self.what}' if self.what else ''}: {self.detail}"

    @property
    def explanation(self) -> str:
        """What the stage tells about the cause."""
        return EXPLANATIONS[self.stage]


class Keys:
    """Keys of lines in the order of a record: equal for lines that may be compared, ascending as the run goes on.

    (-1, 0, 0) is the header; (0, 0, 0) the state before the first step; (t, 0, 0) step t; (t, 1, i) an evaluation after it.
    """

    def __init__(self):
        self._evaluations = {}

    def of(self, line) -> tuple[int, int, int]:
        if "format" in line:
            return -1, 0, 0
        if "evaluation_after" not in line:
            return line["step"], 0, 0
        step = line["evaluation_after"]
        self._evaluations[step] = self._evaluations.get(step, -1) + 1
        return step, 1, self._evaluations[step]


def keyed(lines) -> dict[tuple[int, int, int], dict]:
    """Lines by key."""
    keys = Keys()
    return {keys.of(line): line for line in lines}


def first(a, b) -> Difference | None:
    """The first difference of two whole records, lists of lines. Steps that only one of them recorded are passed over."""
    of_a, of_b = keyed(a), keyed(b)
    for key, line in of_a.items():
        if key in of_b and (found := of_line(a[0], line, of_b[key])):
            return found
    last_a, last_b = max(of_a)[0], max(of_b)[0]
    if last_a != last_b:
        return Difference(min(last_a, last_b) + 1, "length", "", f"the records end with step {last_a} and step {last_b}")
    return None


def of_line(header, a, b) -> Difference | None:
    """The first difference of two lines with the same key; `header` is that of either."""
    if "format" in a:
        return next((Difference(0, "configuration", n, _both(a.get(n), b.get(n))) for n in _HEADER if not _same(a, b, n)), None)
    if "evaluation_after" in a:
        return _of_evaluation(a, b)
    if "loss" not in a:
        return next((d for kind in STATES if (d := _of_tensors(header, 0, f"initial {kind}", kind, a, b))), None)
    return _of_step(header, a, b)


def drift(line) -> Difference | None:
    """Whether the workers of one run hold different values after a step."""
    for kind, hashes in line.get("workers", {}).items():
        for number, value in enumerate(hashes):
            if value != hashes[0]:
                return Difference(line["step"], "workers", kind, f"replica {number} has {value}, replica 0 {hashes[0]}")
    return None


def _of_step(header, a, b):
    step, share = a["step"], max(1, header["global_batch_size"] // header["logical_replicas"])
    for name, stage in (("ids", "data ids"), ("x", "pixels"), ("y", "labels")):
        if name in a and name in b and a[name] != b[name]:
            return _of_examples(step, stage, a[name], b[name], share)
    by_replica = [line.get("replicas", {}) if "replicas" in a and "replicas" in b else {} for line in (a, b)]
    for name in ("loss", "metric_sums", "metrics"):
        if not _same(a, b, name):
            k = _first_unlike(*(r.get("metric_sums", []) for r in by_replica))
            where = "" if k is None else f"of logical replica {k}"
            values = [float.fromhex(line["loss"]) for line in (a, b)] if name == "loss" else [line[name] for line in (a, b)]
            return Difference(step, "loss", where, _both(*values))
    k = _first_unlike(*(r.get("gradient_projections", []) for r in by_replica))
    single = all("gradient_projections" in r for r in by_replica)
    if k is not None:
        norms = [r["gradient_norm"][k] for r in by_replica]
        found = _of_tensors(header, step, "gradient", "gradient", a, b)
        what = f"{found.what}, of logical replica {k}" if found else f"of logical replica {k}"
        return Difference(step, "gradient", what, f"norm of its gradient {_both(*norms)}")
    if found := _of_tensors(header, step, "reduction" if single else "gradient", "gradient", a, b):
        return found
    for name in ("learning_rate", "loss_scale"):
        if not _same(a, b, name):
            return Difference(step, "learning rate", name, _both(a.get(name), b.get(name)))
    for kind in ("update", "optimizer", "statistics", "weights"):
        if found := _of_tensors(header, step, kind, kind, a, b):
            return found
    if a.get("workers") != b.get("workers"):
        return drift(a) or drift(b)
    return None  # where workers differ, they do so in both runs in the same way


def _of_examples(step, stage, a, b, share):
    at = _first_unlike(a, b)
    unlike = sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    ordered = [sorted(map(str, values)) for values in (a, b)]
    twice = [len(values) - len(set(values)) for values in ordered]
    note = "the same ones in another order" if ordered[0] == ordered[1] else f"{unlike} of {len(a)} differ"
    if stage == "data ids" and twice[0] != twice[1]:
        note += f"; {twice[0]} and {twice[1]} of them are there more than once"
    values = _both(a[at : at + 1], b[at : at + 1])
    return Difference(step, stage, f"example {at}, of logical replica {at // share}", f"{values}; {note}")


def _of_tensors(header, step, stage, kind, a, b):
    if kind not in a or kind not in b or a[kind]["hash"] == b[kind]["hash"]:
        return None
    at = _first_unlike(a[kind]["hash"], b[kind]["hash"])
    unlike = sum(x != y for x, y in zip(a[kind]["hash"], b[kind]["hash"], strict=False))
    norms = [line[kind]["norm"][at] for line in (a, b)]
    detail = f"norm {_both(*norms)}, relative distance about {tensor_distance(a[kind], b[kind], at):.3g}"
    if norms[0] and abs(norms[1] / norms[0] - 1) > 0.01:
        detail += f", {norms[1] / norms[0]:.4g} times as large"
    return Difference(step, stage, path(header, kind, at), f"{detail}; {unlike} of {len(a[kind]['hash'])} tensors differ")


def _of_evaluation(a, b):
    for name in ("examples", "metric_sums", "metrics"):
        if not _same(a, b, name):
            if name != "metrics" and _same(a, b, "examples"):
                names = [n for n in a["metrics"] if a["metrics"][n] != b["metrics"].get(n)]
                values = [[line["metrics"].get(n) for n in names] for line in (a, b)]
                return Difference(a["evaluation_after"], "evaluation", ", ".join(names), _both(*values))
            return Difference(a["evaluation_after"], "evaluation", name, _both(a.get(name), b.get(name)))
    return None


def path(header, kind, at) -> str:
    """The path of a line's tensor number `at` of a kind."""
    if kind == "gradient":
        at = header["gradients"][at]
    of = header[kind if kind in STATES else "weights"]
    return of[at][0]


HASHED = {
    "data ids": lambda line: line.get("ids"),
    "pixels": lambda line: line["x"],
    "labels": lambda line: line["y"],
    "loss": lambda line: [line["loss"], line["metric_sums"]],
    "learning rate": lambda line: [line.get("learning_rate"), line.get("loss_scale")],
    **{kind: (lambda line, kind=kind: line[kind]["hash"]) for kind in TENSORS},
}


def stage_hash(line, stage) -> str:
    """Eight hexadecimal digits for what a step's line holds of a stage, a key of HASHED."""
    return hashlib.sha256(json.dumps(HASHED[stage](line)).encode()).hexdigest()[:8]


# ---- how far apart -------------------------------------------------------------------------------------------------------


def tensor_distance(a, b, at) -> float:
    """||a - b|| / ||a|| of tensor `at` of two digests, estimated: see `distance`."""
    return _ratio(_squared(a["projections"][at], b["projections"][at]), a["norm"][at] ** 2)


def distance(a, b) -> float:
    """||a - b|| / ||a|| of all tensors of two digests together, estimated from projections; exactly 0 if all hashes agree.

    A projection is the sum of a tensor's elements with fixed signs, linear: that of a - b is the difference of the two, and the
    mean of the squares of eight of them estimates ||a - b||^2 without bias (Achlioptas 2003), with a relative standard
    deviation of at most sqrt(2 / 8): the distance is known to about a quarter, and better if several tensors differ. The
    norms are exact.
    """
    if a["hash"] == b["hash"]:
        return 0.0
    squares = sum(_squared(p, q) for p, q in zip(a["projections"], b["projections"], strict=True))
    return _ratio(squares, sum(norm**2 for norm in a["norm"]))


def _squared(p, q):
    return sum((x - y) ** 2 for x, y in zip(p, q, strict=True)) / len(p)


def _ratio(squares, of):
    if math.isnan(squares) or math.isnan(of) or math.isinf(of):
        return math.inf
    return math.sqrt(squares / of) if of else (math.inf if squares else 0.0)


def loss_distance(a, b) -> float:
    """|a - b| / |a| of two steps' losses."""
    x, y = (float.fromhex(line["loss"]) for line in (a, b))
    return 0.0 if a["loss"] == b["loss"] else _ratio((x - y) ** 2, x**2)


# ---- small things --------------------------------------------------------------------------------------------------------


def _first_unlike(a, b):
    """The first place where two lists differ, NaN being NaN; None if they do not."""
    if a == b or json.dumps(a) == json.dumps(b):
        return None
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if json.dumps(a[i]) != json.dumps(b[i])), shorter)


def _same(a, b, name):
    return a.get(name) == b.get(name) or json.dumps(a.get(name)) == json.dumps(b.get(name))


def _both(a, b):
    texts = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in (a, b)]
    return " against ".join(text if len(text) <= 60 else text[:57] + "..." for text in texts)
