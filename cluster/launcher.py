"""Starts a cluster of W worker processes on this machine, and ends all of them when one fails.

    python -m cluster.launcher --workers=2 my_training.py --its=flags

Each process gets a TF_CONFIG with W addresses on 127.0.0.1, its share of the GPUs, and its output prefixed by its number. With
parameter servers there are a coordinator, number 0, and the ps beside them, and a worker that dies ends nobody else.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from cluster import spec, wishes

_GRACE_S = 10  # for the others to finish, after the first worker has ended well


def run(command: list[str], workers: int, restarts: int = 0, fewer=None, progress=None, ps: int = 0) -> int:
    """Runs `command` as each of `workers` processes on 127.0.0.1, until all have ended.

    Args:
      command: program and arguments, the same for all.
      workers: how many; one is a cluster too.
      restarts: start the cluster again so often when a worker has died or failed; not for a mistake of the user's (status 2),
        after a signal to this process, or when two starts in a row have ended without progress.
      fewer: maps how many workers are left to how many a restart has, 0 for none; None: as many as before.
      ps: so many parameter servers, and a coordinator, beside the workers, each of which is started again by itself up to
        `restarts` times when it dies; the rest is as above.
      progress: what has been reached, a function of no arguments whose value changes with it; None, or its None: not known.
    Returns:
      0 if all ended well; 75 if they have stopped to be resumed; else the status of the first that failed (128 + n if signal n
      ended it), or 128 + n if signal n ended the launcher. No process is left in any case.
    """
    wanted = []  # the signals that ask us to end
    previous = {s: signal.signal(s, lambda number, _: wanted.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        fruitless, reached = 0, progress and progress()
        for left in range(restarts, -1, -1):
            status, lost = _run_once(command, workers, wanted, ps, restarts)
            asked = status == wishes.RESUMABLE and not lost  # somebody asked a worker to stop
            if status in (0, 2) or asked or wanted or not left:
                return status
            now = progress and progress()
            fruitless = fruitless + 1 if now is not None and now == reached else 0
            reached = now
            if fruitless == 2:
                _say("two starts in a row have ended without progress: not starting again")
                return status
            workers = fewer(workers - lost) if fewer else workers
            if not workers:
                _say("too few workers are left: not starting again")
                return status
            _say(
                f"starting again with {workers} {'worker' if workers == 1 else 'workers'} ({left} of {restarts} restarts left)"
            )
        return status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_once(command, workers, wanted, ps=0, replacements=0):
    """One cluster, from start to end: (status, how many workers have died or failed by themselves)."""
    processes, readers = [], []
    try:
        gpus = visible_gpus()
        each = len(gpus) // workers
        if gpus and not each:
            print(f"{len(gpus)} GPUs for {workers} workers: all use the CPU", file=sys.stderr, flush=True)
        tf_configs = spec.local_cluster(free_addresses(workers + ps + bool(ps)), ps)
        computing = range(bool(ps), bool(ps) + workers)

        def start(number):
            environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "TF_CONFIG": tf_configs[number], "PYTHONUNBUFFERED": "1"}
            if sys.stdout.isatty():  # a line that begins with CR is shown as a bar
                environment["LOCKSTEP_BAR"] = str(shutil.get_terminal_size().columns - len("[0] "))
            if gpus:
                place = number - computing[0]
                mine = gpus[place * each : (place + 1) * each] if number in computing else []  # as many: one kind of replica
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine) or "-1"
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
                preexec_fn=_die_with_parent,
            )
            relay = (process.stdout, f"[{number}] ", wanted)
            readers.append(threading.Thread(target=_relay, args=relay, daemon=True))
            readers[-1].start()
            return process

        for number in range(len(tf_configs)):
            processes.append(start(number))
        called = spec.parse(tf_configs[0]).called if ps else "worker {}".format
        spare = _Spare(computing if ps else (), start, replacements, called)
        status, hanging = _wait(processes, wanted, spare)
        return status, hanging + sum(p.poll() not in (None, 0, wishes.RESUMABLE) for p in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # TensorFlow ignores SIGTERM while it waits
        for process, reader in zip(processes, readers, strict=False):
            process.wait()
            reader.join(timeout=2)


def _wait(processes, wanted, spare) -> tuple[int, int]:
    """Until all have ended, one has failed, or a second signal came: the exit status, and how many stayed after the others.

    A first signal is passed on: a worker that trains stops after its step, with a checkpoint; another ends at once.
    """
    deadline, told = None, 0
    while True:
        if len(wanted) > told:
            told += 1
            name = signal.Signals(wanted[-1]).name
            if told > 1 or wanted[-1] == signal.SIGPIPE:
                print(f"\n{name}: ending {len(processes)} workers", file=sys.stderr, flush=True)
                return 128 + wanted[-1], 0
            for process in processes:
                if process.poll() is None:
                    process.send_signal(wanted[-1])
        spare.look(processes, wanted)
        statuses = [0 if number in spare.gone else process.poll() for number, process in enumerate(processes)]
        for number, status in enumerate(statuses):
            if status and status != wishes.RESUMABLE:
                if wanted:
                    return 128 + wanted[0], 0
                if len(processes) > 1:
                    _say(f"{spare.called(number)} {_ended(status)}; ending the others")
                return 128 - status if status < 0 else status, 0
        if None not in statuses:
            return statuses[0] if spare.is_needed else max(statuses), 0
        if any(status is not None for number, status in enumerate(statuses) if number not in spare.gone) and deadline is None:
            deadline = time.monotonic() + _GRACE_S
        if deadline and time.monotonic() > deadline:
            still = [number for number, status in enumerate(statuses) if status is None]
            _say(f"workers {still} did not end with the others; ending them")
            if spare.is_needed and statuses[0] is not None:
                return statuses[0], 0
            return max([status for status in statuses if status] or [1]), len(still)
        time.sleep(0.05)


def _ended(status):
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"


class _Spare:
    """The workers of a coordinator, which goes on without one that dies; it is started again, so often as is wanted.

    Attributes:
      is_needed: whether there is a coordinator, whose status is then the cluster's.
      gone: the numbers of those that have died and are not started again.
      called: what a process of this number is called.
    """

    def __init__(self, numbers, start, replacements, called):
        self._start, self._left, self.gone, self.called = start, dict.fromkeys(numbers, replacements), set(), called
        self.is_needed = bool(self._left)

    def look(self, processes, wanted):
        """Replaces those that have died."""
        for number, left in self._left.items():
            status = processes[number].poll()
            if number in self.gone or status in (None, 0, 2, wishes.RESUMABLE):
                continue
            if left and not wanted:
                self._left[number] = left - 1
                _say(f"{self.called(number)} {_ended(status)}; starting it again ({left - 1} times more)")
                processes[number] = self._start(number)
            else:
                self.gone.add(number)
                _say(f"{self.called(number)} {_ended(status)}; going on without it")


def free_addresses(count: int) -> list[str]:
    """`count` different addresses on 127.0.0.1 whose ports were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _relay(stream, prefix, wanted):
    clear = "\r\x1b[K" if sys.stdout.isatty() else ""
    for line in stream:
        text = line.decode(errors="replace")
        bar = bool(clear) and text.startswith("\r")
        try:
            sys.stdout.write(clear + prefix + (text.strip() if bar else text))
            sys.stdout.flush()
        except OSError:  # nobody reads us any more: end, and take what still comes, so that no worker waits for us
            wanted.append(signal.SIGPIPE)


def _say(text):
    print(("\r\x1b[K" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)  # in the place of a bar


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
        return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
    return []


def _die_with_parent():
    """In the child: SIGKILL when the launcher is gone, however that came about (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.launcher", description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="worker processes on 127.0.0.1 (default 2)")
    parser.add_argument("program", help="Python file to run in each of them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers={options.workers}: at least 1")
    if spec.environment_names_a_cluster():
        origin = "TF_CONFIG" if "TF_CONFIG" in os.environ else "Slurm"
        parser.error(f"{origin} says that this process is a worker of a cluster already: run the program itself")
    return run([sys.executable, options.program, *options.arguments], options.workers)


if __name__ == "__main__":
    sys.exit(main())
