"""What all workers have to agree on, told between them through the key-value store of TensorFlow's coordination service."""

import itertools
import json
import time

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from cluster.spec import ClusterError, Member

_ASK_EVERY_MS = 1000  # a question holds Python's lock until it is answered, so it is asked again and again
_questions = itertools.count()
_PIECE = 32 << 20  # bytes in one broadcast
_BROADCAST_GROUP = 999_999  # see cluster/reduction.py for group keys
_broadcasts = itertools.count()


class Lost(ClusterError):
    """The coordination service says that the cluster has come apart."""


def agree(me: Member | None, facts: dict[str, object], timeout_s: float = 600) -> None:
    """Returns if all workers have the same facts; the strategy has to exist. Every worker calls it.

    Args:
      me: this process, None without a cluster.
      facts: by name; JSON values.
      timeout_s: how long to wait for the others, who may be preparing data.
    Raises:
      ClusterError: on every worker, with the worker and the fact that differ from the chief's.
    """
    if me is None or me.trainers == 1:
        return
    question = next(_questions)
    _tell(f"facts/{question}/{me.number}", json.dumps(facts))
    if me.is_chief:
        differences = []
        for number in range(1, me.workers):
            theirs = json.loads(_ask(f"facts/{question}/{number}", f"worker number {number}", timeout_s))
            differences += [
                f"worker number {number} has another {name}: {theirs.get(name)!r}; the chief has {facts[name]!r}"
                for name in facts
                if theirs.get(name) != json.loads(json.dumps(facts[name]))
            ]
        _tell(f"verdict/{question}", "; ".join(differences))
    verdict = _ask(f"verdict/{question}", "the chief", timeout_s)
    if verdict:
        if me.is_chief:
            time.sleep(2 * _ASK_EVERY_MS / 1000)  # the service is here: the others are still to hear
        raise ClusterError(verdict)


def gather(me: Member | None, fact: object, timeout_s: float = 600) -> list | None:
    """What every worker has to tell, by number, on the chief; None on the others. Every worker calls it.

    Args:
      me, timeout_s: as for `agree`.
      fact: a JSON value; it comes out as JSON reads it, with keys that are text.
    Raises:
      ClusterError: on the chief, if a worker is silent or lost.
    """
    told = [json.dumps(fact)]
    if me is not None and me.trainers > 1:
        question = next(_questions)
        if not me.is_chief:
            _tell(f"told/{question}/{me.number}", told[0])
            return None
        told += [_ask(f"told/{question}/{n}", f"worker number {n}", timeout_s) for n in range(1, me.workers)]
    return [json.loads(text) for text in told]


def from_chief(me: Member | None, value: object, timeout_s: float = 600) -> object:
    """The chief's JSON value, on every worker; what the others give is not looked at. Every worker calls it.

    Args:
      me, timeout_s: as for `agree`.
    Raises:
      ClusterError: if the chief is silent or lost.
    """
    if me is None or me.trainers == 1:
        return value
    question = next(_questions)
    if me.is_chief:
        _tell(f"from_chief/{question}", json.dumps(value))
        return value
    return json.loads(_ask(f"from_chief/{question}", "the chief", timeout_s))


def bytes_from_chief(me: Member | None, content: bytes | None) -> bytes | None:
    """The chief's bytes, of any length, on every worker; None if it has none. Every worker calls it.

    They go by the collective broadcast of TensorFlow, one device a worker, in pieces: the key-value store is for small values.
    """
    if me is None or me.trainers == 1:
        return content
    size = from_chief(me, None if content is None else len(content))
    if size is None:
        return None
    pieces = []
    with tf.device("CPU:0"):
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            keys = {"group_size": me.workers, "group_key": _BROADCAST_GROUP, "instance_key": next(_broadcasts)}
            if me.is_chief:
                piece = np.frombuffer(content[start : start + length].ljust(-(-length // 4) * 4, b"\0"), np.int32)
                tf.raw_ops.CollectiveBcastSendV2(input=tf.constant(piece), **keys)
            else:
                piece = tf.raw_ops.CollectiveBcastRecvV2(T=tf.int32, shape=[-(-length // 4)], **keys).numpy()
                pieces.append(piece.tobytes()[:length])
    return content if me.is_chief else b"".join(pieces)


def leave_together(me: Member | None, timeout_s: float = 86400) -> None:
    """Nobody leaves before all have finished, and the chief, which holds the service, leaves last. Every worker calls it last.

    Symptoms without: a worker whose last collective is done leaves, and one that still fetches data from it hangs; the chief
    leaves, and the others print "Failed to send RPC to coordination service ... preempted/died" (tensorflow#58434). So all
    report that they have finished (the chief may write for long; a worker that is lost ends the wait at once), then every
    worker reports that it leaves and is gone at once, and the chief follows.
    """
    if me is None or me.trainers == 1:
        return
    others = range(1, me.workers)
    if me.is_chief:
        for stage in ("finished", "leaving"):
            for number in others:
                _ask(f"{stage}/{number}", f"worker number {number}", timeout_s)
            if stage == "finished":
                _tell("all_finished", "yes")
        time.sleep(0.2)  # between a worker's report and its end lie microseconds
    else:
        _tell(f"finished/{me.number}", "yes")
        _ask("all_finished", "the chief", timeout_s)
        _tell(f"leaving/{me.number}", "yes")


def _tell(key, value):
    context.context().set_config_key_value(f"lockstep/{key}", value)


def _ask(key, whom, timeout_s):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return context.context().get_config_key_value(f"lockstep/{key}", _ASK_EVERY_MS)
        except tf.errors.DeadlineExceededError:
            if time.monotonic() > deadline:
                raise ClusterError(f"no word from {whom} for {timeout_s:.0f} s ({key})") from None
        except tf.errors.OpError as error:
            raise Lost(f"lost the cluster while waiting for {whom}: {error.message.splitlines()[0]}") from None
