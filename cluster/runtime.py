"""A process's part in the cluster: deterministic TensorFlow, the strategy, and an ending that leaves nobody waiting.

    cluster.run(main)    # main(strategy) trains; TF_CONFIG says which worker this process is

TensorFlow by itself waits forever for a missing worker, ignores SIGTERM, and reports an error on every worker that is
still there when the chief leaves. `run` answers those.
"""

import ctypes
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from cluster import agreement, latecomer, lifeline, parameter_servers, preflight, quiet, spec, start_deadline, wishes


def configure(identical=True, intra_op_threads=1, seed=0):
    """Sets up TensorFlow before it starts: what the bits of a run depend on.

    Args:
      identical: deterministic operations, and no rewriting of sums (Grappler's arithmetic optimizer turns a tree of
        additions into one AddN, and the passes of one worker are then added in another order than those of two).
      intra_op_threads: threads within an operation. oneDNN's results follow their number, so it is part of the run.
      seed: for Python, NumPy, TensorFlow and Keras: the initial weights.

    Raises:
      RuntimeError: if TensorFlow has started already.
    """
    if context.context()._initialized:
        raise RuntimeError("configure() comes too late: TensorFlow has started. Call it before any tensor is made.")
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    if identical:
        tf.config.experimental.enable_op_determinism()
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    keras.utils.set_random_seed(seed % 2**32)


def make_strategy(communication="auto"):
    """MultiWorkerMirroredStrategy for the cluster in TF_CONFIG, or for this process alone: the same path."""
    implementation = tf.distribute.experimental.CommunicationImplementation(communication.upper())
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def run(
    main,
    identical=True,
    intra_op_threads=1,
    seed=0,
    communication="auto",
    verbose=False,
    instead=None,
    start_timeout_s=60,
    card=None,
    step_timeout_s=600,
):
    """Runs `main(strategy)` as this process's part in the cluster, and ends the process when all have finished.

    Does not return: a worker may neither leave before the others have finished nor stay when they have failed. The exit
    status is what `main` returns (None is 0; 75, stopped to be resumed, is an end together too), 1 after an exception, 2 if the
    cluster does not come about (one line says why), 128 + n after signal n, unless `wishes` attend to it.

    Args:
      main: called with the strategy, outside its scope.
      identical, intra_op_threads, seed: see `configure`.
      communication: see `make_strategy`.
      verbose: show TensorFlow's start-up messages.
      instead: (exit status, text) to end with instead of starting, on every worker; the chief's decides.
      start_timeout_s: how long to wait for the other workers.
      card: a `preflight.Card`, what else all workers must have in common to start.
      step_timeout_s: the longest time that a step, its tracing or an evaluation step may take: see `lifeline.py`.
    """
    line = None
    # AutoGraph leaves a file a function, and removes them when the interpreter ends, which it does not do here.
    tempfile.tempdir = tempfile.mkdtemp(prefix="lockstep-")
    try:
        me = spec.from_environment()
        if me:
            os.environ["TF_CONFIG"] = me.tf_config  # where TensorFlow looks, also if Slurm told us
        signals, place = _Signals(), None
        late = bool(me) and latecomer.is_one(me)
        if me and me.workers > 1 and not late:
            if me.ps and me.is_chief:
                place = lifeline.listener(me)
            with quiet.hushed(not verbose):
                facts = _facts(identical, intra_op_threads, seed, communication)
                if me.ps:  # only workers compute on GPUs
                    facts["devices"] = facts["machine"] = {}
                card = (card or preflight.Card()).add(facts)
            word = json.dumps([instead, lifeline.port_of(place) if place else None])
            instead, port = json.loads(preflight.check(me, card, start_timeout_s, word, identical))
            place = place or port
        if instead:
            status, text = instead
            print(text, file=sys.stderr if status else sys.stdout)
            _end(status)
        with start_deadline.watched(me, start_timeout_s), quiet.hushed(not verbose):
            configure(identical, intra_op_threads, seed)
            if me and me.ps:
                strategy = parameter_servers.start(me, identical, intra_op_threads, verbose)
            else:
                strategy = make_strategy(communication)
        signals.started()
        line = lifeline.Lifeline(None if late else me, step_timeout_s, _end, place)
        line.start()
        signals.line = line
        status = parameter_servers.serve(me, late) if strategy is None else main(strategy) or 0
        if status in (0, wishes.RESUMABLE):
            line.leave(status)
            agreement.leave_together(me)
    except spec.ClusterError as error:
        if line and isinstance(error, agreement.Lost):
            line.explains()
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # nobody reads the output any more
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        status = 128 + signal.SIGPIPE
    except BaseException as error:
        if line and isinstance(error, tf.errors.OpError):
            line.explains()  # an error of a collective, if another worker is gone
        traceback.print_exc()
        if line:
            line.failed(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}")
        status = 1
    if line and status not in (0, wishes.RESUMABLE):
        line.failed(f"it ended with status {status}, see its output")
    _end(status)


def _facts(identical, intra_op_threads, seed, communication):
    """What all workers must have in common to start, as far as it is known here."""
    gpus = tf.config.list_physical_devices("GPU")
    kinds = sorted({tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus})
    names = {"seed": seed, "intra_op_threads": intra_op_threads, "identical": identical, "communication": communication}
    return {"configuration": names, "devices": {"number of GPUs": len(gpus)}, "machine": {"kind of GPU": kinds}}


def _end(status):
    if tempfile.tempdir and os.path.basename(tempfile.tempdir).startswith("lockstep-"):
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the interpreter's own ending would wait for TensorFlow's threads


class _Signals:
    """Ends the process on SIGINT and SIGTERM, also while Python waits inside TensorFlow, unless `wishes.py` takes it.

    Python runs signal handlers between two instructions of the main thread, which may be waiting in a collective forever.
    Python's C handler writes to a wake-up pipe in any case, and a thread of ours reads it. TensorFlow's preemption notifier
    takes SIGTERM over while the strategy starts, and then does nothing: the thread puts the handler back.
    """

    def __init__(self):
        self._starting, self.line = True, None
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        python = ctypes.pythonapi
        python.PyOS_getsig.restype = ctypes.c_void_p
        python.PyOS_setsig.restype = ctypes.c_void_p
        python.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._handler = python.PyOS_getsig(signal.SIGTERM)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def started(self):
        """To be called when the strategy exists: the handler is put back a last time."""
        self._starting = False
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, self._handler)

    def _watch(self):
        while True:
            ready, _, _ = select.select([self._reader], [], [], 0.2 if self._starting else None)
            if ready:
                number = os.read(self._reader, 1)[0]
                if number in (signal.SIGINT, signal.SIGTERM) and not wishes.stop(number):  # others may be the user's
                    if self.line:
                        self.line.failed(f"it was ended by {signal.Signals(number).name}")
                    _end(128 + number)
            ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, self._handler)
