"""`./run.sh compare RUN_A RUN_B`: what `compare` finds, printed; exit status 0 if the runs are the same, else 1."""

import json
import os
import pathlib

from app import repeat
from app.config import UsageError
from cluster import preflight, quiet


def run(arguments: list[str]) -> int:
    """Compares two run directories, or files of fingerprints; with --spread=DIR of a `repeat`, final numbers in its units.

    Raises:
      UsageError: in one line, if one of them is no recorded run.
    """
    given, names = [a for a in arguments if a.startswith("-")], [a for a in arguments if not a.startswith("-")]
    if len(names) != 2 or any(not flag.startswith("--spread=") or flag == "--spread=" for flag in given):
        got = " ".join(arguments) or "none"
        raise UsageError(f"compare takes two runs, as compare runs/A runs/B, and --spread=DIR of a repeat; got {got}")
    try:
        spreads = repeat.spread(given[-1].partition("=")[2]) if given else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{given[-1]}: {error}; make one with ./run.sh repeat") from None
    for name in names:
        if "://" not in name and not os.path.exists(name):
            raise UsageError(f"{name} does not exist: compare takes two run directories, or files of fingerprints")
    os.environ.pop("TF_CONFIG", None)  # a replay is this process's alone
    _compute_as(names[0])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet.hushed():
        import tensorflow as tf

        from app import compare

        tf.get_logger().setLevel("ERROR")  # it finds a strategy used eagerly slow
    try:
        run_a, run_b = (compare.read(path) for path in names)
    except (OSError, ValueError, tf.errors.OpError) as error:
        missing = isinstance(error, FileNotFoundError | tf.errors.NotFoundError)
        advice = ". Train with --fingerprint_every=1 to record a run" if missing else ""
        raise UsageError(" ".join(str(error).split()) + advice) from None
    wrong = None
    with quiet.hushed():
        try:
            finding = compare.compare(run_a, run_b, lambda: _replay(run_a, run_b))
        except UsageError as error:  # told without what TensorFlow has printed
            wrong = error
    if wrong:
        raise wrong
    if finding.stage is None and not finding.same:
        recorded = " and ".join(f"{len(run.steps)} of {run.name}" for run in (run_a, run_b))
        raise UsageError(
            f"nothing to compare: no step is recorded in both runs ({recorded}); use --fingerprint_every=1 for both"
        )
    for name, recorded in (("A", run_a), ("B", run_b)):
        print(f"run {name}: {recorded.name}, {compare.recorded_steps(len(recorded.steps))}")
    print(finding)
    for line in (*_ends(names), *_in_spreads(names, spreads)):
        print(line)
    return 0 if finding.stage is None else 1


def _compute_as(name):
    """Takes the settings that kernels are chosen by from a run's record; TensorFlow reads them when it is imported."""
    file = os.path.join(name, "config.json") if os.path.isdir(name) else name
    if os.path.isdir(name) and not os.path.exists(file):
        file = os.path.join(name, "fingerprints.jsonl")
    try:
        text = pathlib.Path(file).read_text()
        machine = json.loads(text if file.endswith("config.json") else text.partition("\n")[0])["machine"]
        settings = {variable: str(machine[variable]) for variable in preflight.VARIABLES}
    except (OSError, ValueError, LookupError, TypeError):
        return  # a run from before it was recorded, or no run, which will be told
    for variable, value in settings.items():
        os.environ.pop(variable, None)
        if value:
            os.environ[variable] = value


def _ends(names):
    """Whether the finished runs ended with the same sha256: what was not recorded is in it too."""
    a, b = (_summary(name).get("sha256") for name in names)
    if a and b:
        yield f"the runs ended with {'the same sha256' if a == b else 'different sha256s'}: {a[:12]} and {b[:12]}"


def _summary(name):
    try:
        return json.loads(pathlib.Path(name, "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def _in_spreads(names, spreads):
    """The runs' final numbers, in units of their spread over seeds, as far as the runs have finished."""
    a, b = map(_summary, names)
    for name in spreads:
        if name in a and name in b and (line := repeat.in_spreads(name, a[name], b[name], spreads)):
            yield line


def _replay(run_a, run_b):
    """The replay of run A; or of run B, a watched script, if A's model cannot be had: up to the step they are the same."""
    from app import rebuild
    from app.replay import NoState
    from cluster import runtime

    config = run_a.config or {}
    runtime.configure(config.get("identical", True), config.get("intra_op_threads", 1), config.get("seed", 0))
    strategy = runtime.make_strategy()
    try:
        return rebuild.replay(run_a, strategy)
    except NoState:
        if not run_b.lines[0].get("kept"):
            raise
        return rebuild.replay(run_b, strategy)
