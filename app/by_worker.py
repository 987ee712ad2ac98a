"""One record of those that the workers of a watched script wrote, each of what it held itself; and what two records share."""

import itertools
import os

from cluster import fingerprint


def read(file: str) -> list[dict]:
    """The lines of a file of fingerprints; of a cluster's chief, with those of the other workers, which lie beside it.

    Raises:
      ValueError: if another worker's file is not there; what `fingerprint.read` raises.
    """
    lines = fingerprint.read(file)
    if len(lines) < 2:
        raise ValueError(f"{file} ends before the first step")
    workers = lines[0].get("workers", 1)
    if workers == 1:
        return lines
    if lines[0]["worker"]:
        raise ValueError(f"{file} is worker {lines[0]['worker']}'s; name the chief's, which lies beside it without .worker-")
    files = [f"{file}.worker-{i}" for i in range(1, workers)]
    if missing := [name for name in files if not os.path.exists(name)]:
        raise ValueError(f"{missing[0]} is missing: {workers} workers trained, and each wrote a file; put them side by side")
    return merged([lines, *map(fingerprint.read, files)])


def merged(by_worker: list[list[dict]]) -> list[dict]:
    """The workers' lines in one: sums added, of each the examples it trained, hashes by replica; the rest is the chief's."""
    header, start = by_worker[0][:2]
    of_steps = [{line["step"]: line for line in lines[2:]} for lines in by_worker]
    steps = [_step([of[t] for of in of_steps]) for t in of_steps[0] if all(t in of for of in of_steps)]
    if "kept" in header:
        header = {**header, "kept_by_workers": [lines[0]["kept"] for lines in by_worker]}
    return [header, start, *steps]


def _step(lines):
    """A step of all workers. Every worker reads a whole batch, the same as a rule, and trains its own part of it."""
    chief = lines[0]
    sums = [
        [sum(values) for values in zip(*parts, strict=True)] for parts in zip(*(x["metric_sums"] for x in lines), strict=True)
    ]
    metrics = {}
    for i, (name, value) in enumerate(chief["metrics"].items()):
        total, count = chief["metric_sums"][2 * i][0], chief["metric_sums"][2 * i + 1][0]
        if abs(value * count - total) <= 1e-5 * abs(total):  # it is their ratio, and not, say, the root of that
            metrics[name] = sums[2 * i][0] / sums[2 * i + 1][0] if count else 0.0
    loss = metrics.get("loss", float.fromhex(chief["loss"]))
    line = {**chief, "metrics": metrics, "loss": loss.hex(), "metric_sums": sums}
    parts = [[of_worker[name][part(len(of_worker[name]), i, len(lines))] for i, of_worker in enumerate(lines)] for name in "xy"]
    line["x"], line["y"] = (list(itertools.chain(*of_workers)) for of_workers in parts)
    line["workers"] = {kind: [h for of_worker in lines for h in of_worker["workers"][kind]] for kind in chief["workers"]}
    return line


def part(examples: int, worker: int, workers: int) -> slice:
    """Which examples of a batch a worker trains, sharded by AutoShardPolicy.DATA."""
    share = -(-examples // workers)
    return slice(worker * share, (worker + 1) * share)


def shared(lines_a: list[dict], lines_b: list[dict]) -> tuple[list[dict], list[dict]]:
    """Both records with only those metrics that both have: Keras makes some of them earlier under a strategy."""
    paths = [[path for path, *_ in lines[0].get("metrics", [])] for lines in (lines_a, lines_b)]
    if paths[0] == paths[1]:
        return lines_a, lines_b
    names = [next((line["metrics"] for line in lines if "loss" in line), {}) for lines in (lines_a, lines_b)]
    return tuple(_with(lines, set(paths[0]) & set(paths[1]), set(names[0]) & set(names[1])) for lines in (lines_a, lines_b))


def _with(lines, paths, names):
    places = [i for i, (path, *_) in enumerate(lines[0]["metrics"]) if path in paths]
    found = [{**lines[0], "metrics": [lines[0]["metrics"][i] for i in places]}]
    for line in lines[1:]:
        if "loss" in line:
            line = {**line, "metrics": {name: value for name, value in line["metrics"].items() if name in names}}
            line["metric_sums"] = [line["metric_sums"][i] for i in places]
        found.append(line)
    return found
