"""A run that is killed, stopped and signalled again and again, on changing numbers of workers, is the undisturbed run."""

import csv
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import processes_left, run_program, sha256

from cluster import checkpoint, spec
from cluster.launcher import free_addresses

ENDED_S = 15  # all others, when one has died
STOPPED_S = 10  # all, when one was asked to stop
HUNG_S = 20  # --step_timeout_s: more than the tracing of the first step takes on two busy cores
FLAGS = [
    *("--dataset=digits", "--global_batch_size=64", "--logical_replicas=4", "--checkpoint_every_steps=2"),
    *("--eval_every_steps=7", "--log_every_steps=1", "--fingerprint_every=5", f"--step_timeout_s={HUNG_S}"),
]


class Start:
    """One start of the run on so many workers, without anybody who restarts it."""

    def __init__(self, directory, workers, *flags):
        self.directory, self._workers = directory, workers
        self._log = (directory.parent / f"{directory.name}.log").open("a+")
        command = [sys.executable, "-m", "app", "train", f"--workers={workers}", f"--run_dir={directory}", *FLAGS, *flags]
        self._first = self._log.tell()
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def reach(self, step):
        """Waits until the step's line is in metrics.jsonl, or the start has ended."""
        deadline = time.monotonic() + 120
        while self._process.poll() is None and time.monotonic() < deadline and steps_of(self.directory)[-1:] < [step]:
            time.sleep(0.02)

    def reach_a_write(self):
        """Waits until a checkpoint is being written."""
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            if any(name.endswith(".tmp") for name in os.listdir(self.directory / "checkpoints")):
                return

    def worker(self, index):
        """The process id of a worker; the launcher's is -1."""
        if index < 0:
            return self._process.pid
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                mine = f'"index": {index}'.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if int(parent) == self._process.pid and mine:
                return int(entry.name)
        raise AssertionError(f"no worker {index}: {self.output()}")

    def end(self, within):
        try:
            return self._process.wait(timeout=within)
        finally:
            self._process.kill()

    def output(self):
        self._log.seek(self._first)
        return self._log.read()


def steps_of(directory):
    """The steps with a whole line in metrics.jsonl."""
    try:
        text = (directory / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [int(step) for step in re.findall(r'^\{"event": "step", "step": (\d+),.*\}$', text, re.MULTILINE)]


def disturb(directory, kind, target, workers, step, *flags):
    """One start that does not reach its end: what is done to it, to whom, and at which step. Returns what it printed."""
    start = Start(directory, workers, *flags)
    start.reach(step)
    if kind == "write":
        start.reach_a_write()
    number = {"kill": signal.SIGKILL, "write": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[kind]
    os.kill(start.worker(target), number)
    status = start.end({"stop": 2 * HUNG_S, "term": STOPPED_S}.get(kind, ENDED_S))
    output = start.output()
    assert status == {"term": 75, "stop": 75}.get(kind, -9 if target < 0 else 137), output
    deadline = time.monotonic() + ENDED_S
    while processes_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_left() == []
    for path in (directory / "checkpoints").glob("step-*.npz"):
        checkpoint.from_bytes(path.read_bytes())  # raises if it is not whole
    assert "Traceback" not in output
    if kind == "stop":
        name = f"worker {target}" if target else "the chief"
        assert re.search(rf"error: {name} .*no sign of life.*goes on from {directory}/checkpoints/step-", output), output
    return output


def numbers(directory):
    """All that the files of a run say, but times."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader((directory / "metrics.csv").open()))
    for record in [*lines, *rows]:
        for name in ("step_time_s", "images_per_sec", "input_wait_s", "seconds"):
            record.pop(name, None)
    fingerprints = [json.loads(line) for line in (directory / "fingerprints.jsonl").read_text().splitlines()]
    for line in fingerprints:
        line.pop("workers", None)
    fingerprints[0].pop("replicas")
    return lines, rows, fingerprints


def undisturbed(directory, *flags):
    return sha256(run_program("train", f"--run_dir={directory}", *FLAGS, *flags))


def finished(directory, *flags):
    return sha256(run_program("train", f"--run_dir={directory}", *FLAGS, *flags, "--workers=2"))


def test_a_run_stopped_on_four_workers_killed_on_two_and_finished_on_one_shows_no_seam(tmp_path):
    steps = "--steps=60"
    expected = undisturbed(tmp_path / "whole", steps)
    run = tmp_path / "run"
    assert "the same command goes on from" in disturb(run, "term", 3, 4, 13, steps)
    disturb(run, "kill", 1, 2, 24, steps)
    disturb(run, "stop", 1, 2, 42, steps)
    assert undisturbed(run, steps) == expected
    assert numbers(run) == numbers(tmp_path / "whole")
    assert steps_of(run) == list(range(1, 61))


def worker(addresses, index, directory, *flags):
    """A worker started by hand, on a disk of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", "train", f"--run_dir={directory}", *FLAGS, "--steps=30", *flags],
        env={**os.environ, "TF_CONFIG": spec.local_cluster(addresses)[index]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_worker_restarted_alone_ends_in_time_and_only_the_chief_needs_the_run_directory(tmp_path):
    chiefs, others = tmp_path / "chief", tmp_path / "other"
    addresses = free_addresses(2)
    first = [worker(addresses, 0, chiefs), worker(addresses, 1, others)]
    deadline = time.monotonic() + 120
    while steps_of(chiefs)[-1:] < [6] and time.monotonic() < deadline:
        time.sleep(0.02)
    first[1].kill()
    said = first[0].communicate(timeout=ENDED_S)[0]
    assert first[0].returncode == 75
    assert re.search(
        rf"error: worker 1 \({addresses[1]}\) has ended without a word; .* goes on from {chiefs}/checkpoints/", said
    )
    assert "Traceback" not in said
    first[1].communicate()
    alone = worker(addresses, 1, others, "--start_timeout_s=3")
    assert f"no answer from the chief at {addresses[0]}" in alone.communicate(timeout=60)[0]
    assert alone.returncode == 2
    again = [worker(addresses, 0, chiefs), worker(addresses, 1, others)]
    outputs = [process.communicate(timeout=200)[0] for process in again]
    assert [process.returncode for process in again] == [0, 0], outputs
    assert "resuming after step" in outputs[0]
    assert sha256(outputs[0]) == undisturbed(tmp_path / "whole", "--steps=30")
    assert not (others / "checkpoints").exists()
    assert numbers(chiefs) == numbers(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_survives_more_than_twenty_kills_and_signals_at_random_moments(tmp_path):
    """Counts are written to soak.json in the folder that LOCKSTEP_SOAK names, for docs/reliability.md."""
    random_number, steps = random.Random(7), "--steps=400"
    expected = undisturbed(tmp_path / "whole", steps)
    run, counts, step = tmp_path / "run", {}, 4
    for number in range(26):
        kind = ("kill", "term", "write", "kill", "kill", "term", "stop" if number % 2 else "write")[number % 7]
        workers = random_number.choice([1, 2, 2, 4])
        target = random_number.randrange(-1 if kind in ("kill", "term") else 0, 1 if kind == "write" else workers)
        target = 0 if workers == 1 and kind == "stop" else target
        if kind == "stop" and workers == 1:
            workers, target = 2, random_number.randrange(2)
        disturb(run, kind, target, workers, step, steps)
        name = f"{kind} {('launcher', 'chief')[target + 1] if target < 1 else 'worker'}"
        counts[name] = counts.get(name, 0) + 1
        step = max(steps_of(run)[-1:] + [step]) + random_number.randint(2, 12)
    assert finished(run, steps) == expected
    assert numbers(run)[:2] == numbers(tmp_path / "whole")[:2]
    if folder := os.environ.get("LOCKSTEP_SOAK"):
        pathlib.Path(folder, "soak.json").write_text(json.dumps(counts, indent=2))
    assert sum(counts.values()) >= 20
