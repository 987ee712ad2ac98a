"""TensorFlow's start comes to an end: a process beside it watches and says who is missing, for nothing in this one could.

All workers have met before, so that this is for the one that dies in the moment between. Symptom without: the others wait for
it for ever, and silently. Cause: the server's start waits for all tasks in C++, with Python's lock held: no thread of ours
runs, and SIGTERM is ignored. (tensorflow#39922; tests/test_preflight.py holds that lock in C.)
"""

import contextlib
import faulthandler
import os
import subprocess
import sys

_LEAST_S = 60  # a GPU's driver, or a busy machine, may take long without anybody being missing
_WATCHER = """
import select, socket, sys
seconds, *addresses = sys.argv[1:]
if not select.select([sys.stdin], [], [], float(seconds))[0]:  # readable when the process has let go of it, or has ended
    silent = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError:
            silent.append(address)
    who = f"nobody answers at {', '.join(silent)}" if silent else "all addresses answer"
    sys.stderr.write(f"error: the workers had met, but TensorFlow did not start within {seconds} s: {who}; look at the "
        "output of all workers, and start them again\\n")
"""


@contextlib.contextmanager
def watched(me, timeout_s: float):
    """Within the block a deadline runs; when it has passed, one line is printed and the process ends with status 1.

    Args:
      me: this process in its cluster; nothing is watched if it is alone.
      timeout_s: the deadline, a minute at least.
    """
    if me is None or me.workers == 1:
        yield
        return
    seconds = max(_LEAST_S, timeout_s)
    command = [sys.executable, "-I", "-S", "-c", _WATCHER, f"{seconds:g}", *me.addresses]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds + min(10, 2 + me.workers), exit=True, file=nowhere)  # needs no lock
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            watcher.kill()
            watcher.wait()
            watcher.stdin.close()
