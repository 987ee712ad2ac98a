"""Workers that hold other weights than the rest: found at recorded steps, named, and the end of the run for all.

Every worker makes the same update, so that all hold the same weights for good; what changes them outside the step, or a faulty
memory or network, would go unseen. A recorded step tells each worker's hash to all (`fingerprint.py`).
"""

import collections
import time

from cluster import agreement, digest, spec

_NAMES = {"weights": "weights", "statistics": "moving statistics"}
_OTHERS_HEAR_S = 2


class Drift(Exception):
    """The workers of a run do not hold the same weights: one line that names the worker and the first variable."""


def check(trainer, line: dict):
    """Compares the workers' hashes in a step's line. Every worker calls it after that step, and before the next.

    Raises:
      Drift: on every worker, if they differ.
      cluster.spec.ClusterError: if a worker is lost before it has told which variable it is.
    """
    unlike = [kind for kind, hashes in line["workers"].items() if len(set(hashes)) > 1]
    if not unlike:
        return
    me, variables = spec.from_environment(), trainer._step.variables[unlike[0]]
    of_workers = agreement.gather(me, _hashes_by_device(trainer.distribute_strategy, variables))
    verdict = of_workers and _verdict(line, unlike[0], of_workers, [variable.path for variable in variables])
    verdict = agreement.from_chief(me, verdict)
    if me and me.workers > 1 and me.is_chief:
        time.sleep(_OTHERS_HEAR_S)  # the chief holds what they ask
    raise Drift(verdict)


def _hashes_by_device(strategy, variables):
    """[[hash of each variable] by device of this process]."""
    by_variable = [strategy.experimental_local_results(variable.value) for variable in variables]
    return [digest.of([v.read_value() for v in copies]).json()["hash"] for copies in zip(*by_variable, strict=True)]


def _verdict(line, kind, of_workers, paths):
    hashes, devices = line["workers"][kind], [device for worker in of_workers for device in worker]
    usual = collections.Counter(hashes).most_common(1)[0][0]  # of two, the chief's
    odd, sound = next(i for i, h in enumerate(hashes) if h != usual), hashes.index(usual)
    first = next((p for p, a, b in zip(paths, devices[odd], devices[sound], strict=True) if a != b), "which is not known")
    each = len(of_workers[0])
    name = f"worker {odd // each}" if each == 1 else f"device {odd % each} of worker {odd // each}"
    rest = "the chief" if len(hashes) == 2 else f"{hashes.count(usual)} of {len(hashes)}"
    return (
        f"step {line['step']}: {name} holds other {_NAMES[kind]} than {rest}, first {first}: {hashes[odd]} against {usual}. "
        "Something changes them outside the step, or its memory or network is faulty"
    )
