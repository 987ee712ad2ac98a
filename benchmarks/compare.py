"""Measures a target: its sides take turns (A B A B ...), and the ratio of their median steps is told with its spread.

    python -m benchmarks.compare 1 --rounds=5 --torch_python=benchmarks/peers/.venv/bin/python

Each turn is a program of its own, with a deadline. What it starts is ended with it, also after Ctrl-C and SIGTERM.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
_LOCKSTEP, _BARE = "benchmarks.lockstep_step", "benchmarks.bare_tensorflow"
_ONE_CORE = ["--inter_op_threads=1"]  # else TensorFlow runs operations that are independent side by side, on all cores


@dataclasses.dataclass(frozen=True)
class Target:
    """A question, the sides (name: arguments of Python), and the ratios (quantity, side above, side below) that answer it."""

    question: str
    sides: dict[str, list[str]]
    ratios: tuple[tuple[str, str, str], ...] = ()  # none: the only side compares by itself


def lockstep(*flags):
    return ["-m", _LOCKSTEP, *flags]


def pytorch(processes):
    return ["peers/pytorch_ddp.py", f"--processes={processes}"]


def whole_run(*flags):
    """The digits, without what is not asked for."""
    nothing = ("--keep_checkpoints=0", "--fingerprint_every=0", "--notensorboard", "--quiet", "--log_every_steps=1000000")
    return ["-m", "benchmarks.whole_run", "--", "--dataset=digits", "--model=resnet20", "--steps=154", *nothing, *flags]


_RESNET50 = ("--workers=2", "--model=resnet50", "--batch=16", "--logical_replicas=2", "--steps=15", "--warmup=3")


def _widths(*widths):
    """Identical and not, for each number of workers."""
    forms = ("identical", "noidentical")
    return {f"{form} {n}": lockstep(f"--workers={n}", f"--{form}") for n in widths for form in forms}


TARGETS = {
    1: Target(
        "Lockstep on 2 workers of one thread against PyTorch DDP on 2 processes of one thread",
        {
            "lockstep 2": lockstep("--workers=2"),
            "pytorch 2": pytorch(2),
            "lockstep 2, one core": lockstep("--workers=2", *_ONE_CORE),
        },
        (("images_per_sec", "lockstep 2", "pytorch 2"), ("images_per_sec", "lockstep 2, one core", "pytorch 2")),
    ),
    2: Target(
        "2 workers of one thread against 1; the same for PyTorch DDP",
        {f"lockstep {n}": lockstep(f"--workers={n}", *_ONE_CORE) for n in (1, 2)}
        | {f"pytorch {n}": pytorch(n) for n in (1, 2)},
        (("images_per_sec", "lockstep 2", "lockstep 1"), ("images_per_sec", "pytorch 2", "pytorch 1")),
    ),
    3: Target(
        "Lockstep's step on 1 worker against a bare tf.function of the same work; 10 steps per execution against 1",
        {"bare": ["-m", _BARE], "lockstep": lockstep(), "lockstep 10 steps": lockstep("--steps_per_execution=10")},
        (("step_time_s", "lockstep", "bare"), ("step_time_s", "lockstep 10 steps", "lockstep")),
    ),
    4: Target(
        "what the same bits cost: --identical against --noidentical on 1, 2 and 4 workers",
        _widths(1, 2, 4),
        tuple(("step_time_s", f"identical {n}", f"noidentical {n}") for n in (1, 2, 4)),
    ),
    5: Target(
        "what logical replicas cost on 1 worker: the default K against K = 1",
        {"default K": lockstep(), "K = 1": lockstep("--logical_replicas=1")},
        (("step_time_s", "default K", "K = 1"),),
    ),
    9: Target(
        "what metrics files, TensorBoard and progress cost, checkpoints each epoch (11 steps), fingerprints every 11 steps",
        {
            "nothing": whole_run(),
            "told": whole_run("--tensorboard", "--noquiet", "--log_every_steps=1"),
            "checkpoints": whole_run("--keep_checkpoints=2"),
            "fingerprints": whole_run("--fingerprint_every=11"),
        },
        tuple(
            (t, side, "nothing")
            for side in ("told", "checkpoints", "fingerprints")
            for t in ("step_time_s", "processor_time_s")
        ),
    ),
    8: Target(
        "packs of 1, 8 and 32 MB against one of all gradients: ResNet-50 (102 MB), 2 workers, one pass each, 8 images a worker",
        {f"{kb >> 10} MB": lockstep(*_RESNET50, f"--bucket_kb={kb}") for kb in (1 << 10, 8 << 10, 32 << 10, 1 << 20)},
        tuple(("step_time_s", f"{mb} MB", "1024 MB") for mb in (1, 8, 32)),
    ),
    6: Target("the reduction in tree order against a ring all-reduce", {"allreduce": ["-m", "benchmarks.allreduce"]}),
    7: Target("the ImageNet pipeline against bare decoding", {"input": ["-m", "benchmarks.input"]}),
}


class Failed(Exception):
    """A side that did not give its line: one line that says which and why, and the end of what it said."""


def main() -> int:
    what = "; ".join(f"{number}: {target.question}" for number, target in TARGETS.items())
    parser = argparse.ArgumentParser(description=f"{__doc__.splitlines()[0]} Targets: {what}.")
    parser.add_argument("target", type=int, choices=TARGETS)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default 5)")
    parser.add_argument("--deadline_s", type=float, default=300, help="for each turn (default 300)")
    parser.add_argument("--output", default="", help="file for all that was measured (default runs/benchmarks/target-N.json)")
    default = str(ROOT / "benchmarks/peers/.venv/bin/python")
    parser.add_argument("--torch_python", default=default, help="Python with peers/requirements.txt (default %(default)s)")
    parser.add_argument("--one_pass", action="store_true", help="K = N: a worker of TensorFlow takes its batch in one pass")
    parser.add_argument("--flags", type=shlex.split, default=[], help="for every side, as --flags='--batch=256 --steps=50'")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    target = TARGETS[options.target]
    print(f"target {options.target}: {target.question}", flush=True)
    try:
        turns = interleave(target, options)
    except (Failed, KeyboardInterrupt) as problem:
        print(f"error: {problem}" if isinstance(problem, Failed) else "interrupted", file=sys.stderr)
        return 1 if isinstance(problem, Failed) else 128 + signal.SIGINT
    ratios = dict(compare(turns, *ratio) for ratio in target.ratios) or turns[next(iter(turns))][0]["ratios"]
    for label, found in ratios.items():
        print(f"{label}: {found['ratio']:.3f} (rounds: {found['low']:.3f} to {found['high']:.3f})")
    busiest = max(run["load_average"] for runs in turns.values() for run in runs)
    print(f"load average: {busiest:.1f} at most, on {os.cpu_count()} cores; what a side itself needs is in it")
    output = pathlib.Path(options.output or ROOT / f"runs/benchmarks/target-{options.target}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"target": options.target, "question": target.question, "ratios": ratios, "turns": turns}))
    print(f"wrote {output}")
    return 0


def interleave(target, options) -> dict[str, list[dict]]:
    """What each side said in each of its turns."""
    turns = {name: [] for name in target.sides}
    for turn in range(options.rounds if target.ratios else 1):
        for name, arguments in target.sides.items():
            if arguments[0] == "-m":
                command = [sys.executable, *arguments]
            else:
                command = [options.torch_python, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:]]
            more = options.flags if target.ratios else [*options.flags, f"--rounds={options.rounds}"]
            if options.one_pass and arguments[1] in (_LOCKSTEP, _BARE):
                more = [*more, f"--logical_replicas={_workers(arguments)}"]
            found = run(name, [*command, *more], options.deadline_s)
            turns[name].append(found)
            if "step_time_s" in found:
                median = statistics.median(found["step_time_s"])
                speed = f"{found['images_per_sec']:,.1f} images/s, median step {1e3 * median:,.1f} ms"
                processor = f"{1e3 * found['cpu_s_per_step']:,.0f} ms of processor time in the first process"
                print(f"round {turn + 1}  {name:20} {speed}, {processor}", flush=True)
    return turns


def _workers(arguments) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_known_args(arguments)[0].workers


def run(name: str, command: list[str], deadline_s: float) -> dict:
    """Runs a program to its end; returns its line of JSON. Leaves no process in any case. Raises Failed."""
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1"}  # the second as the program has it
    environment = {**defaults, **os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # its own group, to be ended as one
                preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: we may be killed (Linux)
            )
        except OSError as error:
            raise Failed(f"{name}: {command[0]} cannot be started: {error.strerror}") from None
        try:
            said, _ = process.communicate(timeout=deadline_s)
            problem = f"failed with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"had not ended after {deadline_s:g} s (--deadline_s)"
        finally:
            end(process)
        if not problem:
            try:
                return json.loads(said.splitlines()[-1])
            except (ValueError, IndexError):
                problem = "did not end with a line of JSON"
        log.seek(0)
        raise Failed(f"{name} {problem}\n{log.read().decode(errors='replace')[-2000:]}")


def end(process):
    """Ends a program and its group. SIGTERM first: the launcher's workers are in groups of their own, and it ends them."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def compare(turns, quantity, above, below):
    """(label, the ratio of the medians over all steps of all rounds, and the lowest and highest ratio of a round)."""

    def value(runs):
        times = "step_time_s" if quantity == "images_per_sec" else quantity
        step = statistics.median(time for run in runs for time in run[times])
        return runs[0]["batch"] / step if quantity == "images_per_sec" else step

    rounds = [value([a]) / value([b]) for a, b in zip(turns[above], turns[below], strict=True)]
    found = {"ratio": value(turns[above]) / value(turns[below]), "low": min(rounds), "high": max(rounds)}
    return f"{quantity}, {above} / {below}", found


if __name__ == "__main__":
    sys.exit(main())
