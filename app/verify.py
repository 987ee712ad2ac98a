"""Runs one configuration on several numbers of workers as real processes here, and compares what every step of each did.

With --identical (the default) everything has to agree to the last bit, line by line of fingerprints.jsonl, and so has the
sha256 of each run's end. With --noidentical data, pixels and rates have to agree, and everything else as far as rounding
explains: see `app/verify_rounding.py`.

    DIR/w1, DIR/w2, ...   the run directories       DIR/w1.log, ...   what the processes printed
    DIR/verify.json       all that was found        DIR/verify.html   the same for people

Imports nothing of TensorFlow: each run is a cluster of processes of its own.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from app import differences, early, local_runs, verify_page, verify_rounding
from app.config import Config, UsageError
from app.terminal import listed, workers
from app.verify_flags import VerifyFlags

_OWN = r"w\d+(\.log)?|rounding(\.log)?|verify\.(json|html)"
_SAY_EVERY_S = 10


class Failed(Exception):
    """A run that did not finish: what it said."""


def run(config: Config, flags: VerifyFlags) -> int:
    """Runs and compares. Returns 0 if all runs are one, 1 if they are not or one failed.

    Raises:
      UsageError: if the directory is not verify's own, or the data cannot be used.
      SystemExit: with 128 + n, after signal n.
    """
    early.check(config)
    directory = fresh(flags.verify_dir)
    found = {"format": 1, "verdict": "RUNNING", "workers": flags.widths, "configuration": dataclasses.asdict(config)}
    _write(directory, found)
    names = [workers(width) for width in flags.widths]
    print(
        f"verifying {config.model} on {config.dataset}: {config.steps} steps on {listed(names)}, one after the other; global "
        f"batch {config.global_batch_size} = {config.logical_replicas} logical replicas x {config.replica_batch_size}",
        flush=True,
    )
    if status := local_runs.prepare(config):
        return status
    runs = []
    try:
        for width in flags.widths:
            runs.append(_one_run(config, directory, f"w{width}", width, runs))
        reference = None
        if not config.identical:
            reference = _one_run(config, directory, "rounding", 1, [], "rounding")
    except Failed as error:
        found |= {"verdict": "FAILED", "line": f"FAILED: {error}", "runs": _without_lines(runs)}
    else:
        found |= judged(config, runs, reference)
    if found.get("difference"):
        found["compare"] = _cause(directory, flags.widths, found["difference"]["run"])
    return _told(directory, found)


def judged(config: Config, runs: list[dict], reference: dict | None) -> dict:
    """What verify.json holds of finished runs: verdict, line, first difference, and a row for each step.

    Args:
      runs: {"workers", "sha256", "lines", ...} of each, the first is what the others are compared with.
      reference: of the run that is disturbed by rounding, where the runs need not be identical.
    """
    first, names = runs[0], [workers(one["workers"]) for one in runs]
    rows = [_row(lines) for lines in zip(*(_steps(one["lines"]) for one in runs), strict=False)]
    found = {"runs": _without_lines(runs), "by_step": rows}
    found["evaluations"] = [[line for line in one["lines"] if "evaluation_after" in line] for one in runs]
    if reference:
        return found | verify_rounding.judged(runs, reference, names, rows)
    for one, name in zip(runs[1:], names[1:], strict=True):
        difference = differences.first(first["lines"], one["lines"])
        if difference is None and one["sha256"] != first["sha256"]:
            difference = differences.Difference(config.steps, "result", "sha256", f"{first['sha256']} against {one['sha256']}")
        if difference:
            line = f"DIFFERENT: {names[0]} against {name}: {difference}"
            told = {**dataclasses.asdict(difference), "explanation": difference.explanation, "run": one["workers"]}
            return found | {"verdict": "DIFFERENT", "line": line, "difference": told}
    line = f"IDENTICAL: {config.steps} steps on {listed(names)}, sha256 {first['sha256']}"
    return found | {"verdict": "IDENTICAL", "line": line, "sha256": first["sha256"]}


def _without_lines(runs):
    return [{name: value for name, value in one.items() if name != "lines"} for one in runs]


def fresh(directory: str) -> str:
    """The directory, without what an earlier verify has left in it.

    Raises:
      UsageError: if it holds anything else.
    """
    path = pathlib.Path(directory)
    there = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    others = [name for name in there if not re.fullmatch(_OWN, name)]
    if others or (there and "verify.json" not in there) or (path.exists() and not path.is_dir()):
        shown = ", ".join(others or there)[:60]
        raise UsageError(f"--verify_dir={directory} holds something else ({shown}): name a new directory")
    for name in there:
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--verify_dir={directory} cannot be made: {error.strerror}") from None
    return directory


def _one_run(config, directory, name, width, before, command="train"):
    """Runs the configuration on `width` workers. Returns what is to be known of it. Raises Failed."""
    own = dataclasses.replace(config, run_dir=os.path.join(directory, name))
    log, began, title = os.path.join(directory, f"{name}.log"), time.monotonic(), workers(width)
    if name == "rounding":
        title = "1 worker, disturbed by rounding"
    progress = _Progress(own, title, before[0]["lines"] if before and config.identical else None)
    with open(log, "w", buffering=1) as file, progress, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        status = local_runs.run(own, width, command)
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise SystemExit(status)
    if status:
        raise Failed(f"the run on {title} ended with status {status}: {_said(log)} (all of it in {log})")
    summary = json.loads(pathlib.Path(own.run_dir, "summary.json").read_text())
    seconds, sha256, lines = time.monotonic() - began, summary["sha256"], progress.lines
    print(f"{title}: {summary['steps']} steps in {seconds:.1f} s{progress.verdict}, sha256 {sha256[:12]}", flush=True)
    return {"workers": width, "run_dir": own.run_dir, "sha256": sha256, "seconds": seconds, "summary": summary, "lines": lines}


class _Progress(contextlib.AbstractContextManager):
    """Says every few seconds how far a run is, and whether it has been that of `recorded` so far; keeps its lines."""

    def __init__(self, config, title, recorded):
        self._path, self._steps, self._title = os.path.join(config.run_dir, "fingerprints.jsonl"), config.steps, title
        self._recorded = recorded and differences.keyed(recorded)
        self._keys, self._stop, self._read, self._out = differences.Keys(), threading.Event(), 0, sys.stdout
        self.lines, self._difference = [], None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        print(f"{self._title}: starting", file=self._out, flush=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self):
        said = 0
        while not self._stop.wait(_SAY_EVERY_S if said else 1):
            self._look()
            step = max((line["step"] for line in self.lines if "loss" in line), default=0)
            if step > said:
                said = step
                print(f"{self._title}: step {step} of {self._steps}{self.verdict}", file=self._out, flush=True)

    def _look(self):
        """Reads the whole lines that have been written since."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._read)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read += len(text)
            for line in map(json.loads, text.splitlines()):
                self.lines.append(line)
                other = self._recorded and self._recorded.get(self._keys.of(line))
                if other and not self._difference:
                    self._difference = differences.of_line(self.lines[0], other, line)

    @property
    def verdict(self):
        if self._recorded is None:
            return ""
        return f", another since step {self._difference.step}" if self._difference else ", identical"


def _steps(lines):
    return [line for line in lines if "loss" in line]


def _row(lines):
    """What is told of one step of all runs: losses, and hashes and distances from the first run by stage."""
    distances = {kind: [differences.distance(lines[0][kind], line[kind]) for line in lines[1:]] for kind in differences.TENSORS}
    return {
        "step": lines[0]["step"],
        "loss": [float.fromhex(line["loss"]) for line in lines],
        "hashes": {stage: [differences.stage_hash(line, stage) for line in lines] for stage in differences.HASHED},
        "distances": {"loss": [differences.loss_distance(lines[0], line) for line in lines[1:]], **distances},
    }


def _said(log):
    """Why a run failed, as its log has it."""
    lines = [re.sub(r"^\[\d+\] ", "", line) for line in pathlib.Path(log).read_text(errors="replace").splitlines()]
    errors = dict.fromkeys(line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return "; ".join(errors) or "\n".join(lines[-5:])


def _cause(directory, widths, other):
    """What `compare` says of the two runs, where there is one."""
    if importlib.util.find_spec("app.compare") is None:
        return ""
    runs = [os.path.join(directory, f"w{width}") for width in (widths[0], other)]
    done = subprocess.run([sys.executable, "-m", "app", "compare", *runs], capture_output=True, text=True)
    return done.stdout if done.returncode in (0, 1) else ""


def _told(directory, found):
    """Writes the files, prints the verdict. Returns the exit status."""
    path = _write(directory, found)
    page = os.path.join(directory, "verify.html")
    pathlib.Path(page).write_text(verify_page.page(found), encoding="utf-8")
    for line in filter(None, (found["line"], found.get("difference", {}).get("explanation"), found.get("compare"))):
        print(line)
    print(f"saved   {page}, {path}", flush=True)
    return 0 if found["verdict"] in ("IDENTICAL", "EQUAL") else 1


def _write(directory, found):
    path = os.path.join(directory, "verify.json")
    pathlib.Path(path + ".tmp").write_text(json.dumps(_finite(found), indent=1, allow_nan=False) + "\n")
    os.replace(path + ".tmp", path)
    return path


def _finite(value):
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
