"""The same training with several seeds: how far its final numbers scatter, so that a difference of two runs can be judged.

    DIR/seed-1, DIR/seed-2, ...   the run directories; a run that has finished there is not made again
    DIR/repeat.json               every run's final numbers; mean, spread and range of each
    DIR/repeat.png                final numbers by seed, and curves

The spread is the sample's standard deviation (divided by n - 1), the error that of the mean (spread / sqrt(n)). Imports
nothing of TensorFlow: each run is processes of its own.
"""

import dataclasses
import json
import math
import os
import pathlib
import statistics

from app import early, local_runs, run_dir
from app.config import Config, UsageError, batch_problem
from app.verify_flags import RepeatFlags

_FIRST = ("val_top_1", "val_top_5", "val_loss", "top_1", "top_5", "loss")  # in this order; others are no results


def run(config: Config, flags: RepeatFlags, options) -> int:
    """Trains what is missing, prints the table and writes the files. Returns 0, or the status of a run that failed.

    Raises:
      UsageError: if K does not fit the workers, or the directory holds other runs.
    """
    workers = options.workers or 1
    if problem := batch_problem(config.global_batch_size, config.logical_replicas, workers):
        raise UsageError(problem)
    runs = [_of_seed(config, flags, config.seed + i) for i in range(flags.seeds)]
    ended = [run_dir.finished(each) for each in runs]  # all of them first: what is wrong is said before an hour is spent
    if not all(ended):
        early.check(config)
    for number, each in enumerate(runs):
        print(
            f"seed {each.seed} ({number + 1} of {flags.seeds}): {'finished before' if ended[number] else 'training'}",
            flush=True,
        )
        if not ended[number] and (status := local_runs.prepare(each) or local_runs.run(each, workers)):
            return status
    found = summarised([read(each) for each in runs], dataclasses.asdict(config))
    for line in table(found):
        print(line)
    path, picture = (os.path.join(flags.repeat_dir, name) for name in ("repeat.json", "repeat.png"))
    pathlib.Path(path + ".tmp").write_text(json.dumps(found, indent=1) + "\n")
    os.replace(path + ".tmp", path)
    from app import repeat_picture

    repeat_picture.draw(found, picture)
    print(f"saved   {path}, {picture}")
    return 0


def _of_seed(config, flags, seed):
    return dataclasses.replace(config, seed=seed, run_dir=os.path.join(flags.repeat_dir, f"seed-{seed}"))


def read(config: Config) -> dict:
    """What a finished run has to tell: {"seed", "sha256", "final": {name: value}, "epochs": [metrics.jsonl's]}."""
    directory = pathlib.Path(config.run_dir)
    summary = json.loads((directory / "summary.json").read_text())
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {
        "seed": config.seed,
        "sha256": summary["sha256"],
        "final": {name: summary[name] for name in _FIRST if name in summary},
        "epochs": [{k: line[k] for k in ("epoch", *_FIRST) if k in line} for line in lines if line["event"] == "epoch"],
    }


def summarised(runs: list[dict], configuration: dict) -> dict:
    """What repeat.json holds.

    Returns:
      {"format", "runs", "configuration", "numbers": {name: {"mean", "spread", "error", "least", "most", "n"}}}.
    """
    numbers = {}
    for name in runs[0]["final"]:
        values = [one["final"][name] for one in runs]
        spread = statistics.stdev(values)
        numbers[name] = {"mean": statistics.fmean(values), "spread": spread, "error": spread / math.sqrt(len(values))}
        numbers[name] |= {"least": min(values), "most": max(values), "n": len(values)}
    return {"format": 1, "numbers": numbers, "runs": runs, "configuration": configuration}


def table(found: dict):
    """The lines of the table."""
    seeds = [one["seed"] for one in found["runs"]]
    yield f"{len(seeds)} seeds, {seeds[0]} to {seeds[-1]}; spread: standard deviation of a run; error: of the mean"
    yield f"{'':12}{'mean':>10}{'spread':>10}{'error':>10}{'least':>10}{'most':>10}"
    for name, n in found["numbers"].items():
        cells = "".join(f"{n[column]:>10.4f}" for column in ("mean", "spread", "error", "least", "most"))
        yield f"{name:12}{cells}"


def spread(path: str) -> dict[str, float]:
    """The spread of each final number over seeds, from a repeat.json or the directory that holds it.

    Raises:
      OSError, ValueError: if it cannot be read, or is no repeat.json.
    """
    path = os.path.join(path, "repeat.json") if os.path.isdir(path) else path
    found = json.loads(pathlib.Path(path).read_text())
    if not isinstance(found, dict) or found.get("format") != 1 or "numbers" not in found:
        raise ValueError(f"{path} is no repeat.json")
    return {name: each["spread"] for name, each in found["numbers"].items()}


def in_spreads(name: str, a: float, b: float, spreads: dict[str, float]) -> str:
    """A difference of two runs' final numbers in units of the spread, in words; "" if the spread is not known.

    Two runs that differ by their seeds alone are sqrt(2) spreads apart in the root mean square.
    """
    if not spreads.get(name):
        return ""
    times = abs(a - b) / spreads[name]
    verdict = "seeds alone do as much" if times < 2 * math.sqrt(2) else "more than seeds do"
    return f"{name} {a:.4f} against {b:.4f}: {times:.1f} times the spread over seeds, {spreads[name]:.4f}; {verdict}"
