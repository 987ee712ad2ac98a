"""`./run.sh compare RUN_A RUN_B`: what `compare` finds, printed; exit status 0 if the runs are the same, else 1."""

import os

from app.config import UsageError
from cluster import quiet


def run(arguments: list[str]) -> int:
    """Compares two run directories, or files of fingerprints.

    Raises:
      UsageError: in one line, if one of them is no recorded run.
    """
    if len(arguments) != 2 or any(argument.startswith("-") for argument in arguments):
        raise UsageError(f"compare takes two runs, as compare runs/A runs/B; got {' '.join(arguments) or 'none'}")
    os.environ.pop("TF_CONFIG", None)  # a replay is this process's alone
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet.hushed():
        import tensorflow as tf

        from app import compare

        try:
            run_a, run_b = (compare.read(path) for path in arguments)
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise UsageError(f"{' '.join(str(error).split())}. Train with --fingerprint_every=1 to record a run") from None
        finding = compare.compare(run_a, run_b, lambda: _replay(run_a))
    for name, recorded in (("A", run_a), ("B", run_b)):
        print(f"run {name}: {recorded.name}, {len(recorded.steps)} recorded steps")
    print(finding)
    return 0 if finding.stage is None else 1


def _replay(run):
    from app import rebuild
    from cluster import runtime

    config = run.config or {}
    runtime.configure(config.get("identical", True), config.get("intra_op_threads", 1), config.get("seed", 0))
    return rebuild.replay(run, runtime.make_strategy())
