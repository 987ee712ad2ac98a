"""What the time from a command's start to its first step went to: marks, each of which names what lay before it.

    startup.mark("imports")    # everything since the mark before, or since the start of the process

The clock is the machine's, not the process's: workers that a command starts on its own machine count from the command's start.
"""

import os
import time

_BEGAN = "LOCKSTEP_BEGAN"  # in the environment of a local cluster's workers: when the command began
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_marks: list[tuple[str, float]] = []


def mark(name: str):
    """Ends the part `name` of the start."""
    _marks.append((name, now()))


def parts() -> dict[str, float]:
    """Seconds by part, in order; "launcher" is what came before this process, where a command has started it."""
    began = process_began()
    found, before = {}, began
    if _BEGAN in os.environ:
        found["launcher"] = began - float(os.environ[_BEGAN])
    for name, when in _marks:
        found[name] = found.get(name, 0.0) + when - before
        before = when
    return found


def pass_on(began: float):
    """Tells the processes that will be started when the command began."""
    os.environ[_BEGAN] = repr(began)


def process_began() -> float:
    """When this process was started (Linux), to a hundredth of a second; elsewhere when this module was imported."""
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since the machine's start
    except (OSError, ValueError, IndexError):
        return _IMPORTED


def now() -> float:
    return time.clock_gettime(_CLOCK)


_IMPORTED = now()
