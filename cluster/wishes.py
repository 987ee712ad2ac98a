"""What a worker wishes and all decide together: to stop after this step, or to save a checkpoint.

A wish travels as a number in the packed reduction of the next step, so that all workers see it at the same step, and none
waits for another that has gone.
"""

import contextlib
import signal
import sys

RESUMABLE = 75  # exit status: stopped on request, to be started again (EX_TEMPFAIL of sysexits.h)
STOP, SAVE = 0, 1  # places in `mine` and in what the trainer finds: how many workers wish it

mine = [0, 0]  # this worker's

_attended = False


class Stopped(Exception):
    """The workers have agreed to stop after this step, or in this evaluation."""


class NonFinite(ArithmeticError):
    """A loss or a gradient that is no finite number: one line that says where."""


def stop(number: int) -> bool:
    """Takes signal `number` for a wish to stop, if somebody attends to wishes and it is the first. Returns whether it did."""
    if not _attended or mine[STOP]:
        return False
    mine[STOP] = 1
    name = signal.Signals(number).name
    print(f"{name}: stopping after this step, with a checkpoint; once more ends at once", file=sys.stderr, flush=True)
    return True


def attend() -> bool:
    """Whether somebody attends to wishes now."""
    return _attended


@contextlib.contextmanager
def attended():
    """Within the block a first SIGINT or SIGTERM is a wish: whoever trains in it ends by `Stopped`. A wish ends with it."""
    global _attended
    _attended, mine[:] = True, [0, 0]
    try:
        yield
    finally:
        _attended, mine[:] = False, [0, 0]  # or the next evaluation in this process would end at once
