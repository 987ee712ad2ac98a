"""A sum over all workers through TensorFlow, checked element by element, and how fast it is."""

import os
import statistics
import sys
import threading
import time

import numpy as np
import tensorflow as tf

from cluster.reduction import Reduction, replica_id
from cluster.spec import ClusterError

_ROUNDS = 5


def check(strategy, megabytes: int = 32, timeout_s: float = 60, communication: str = "auto") -> dict[str, float]:
    """Adds up float32 vectors of whole numbers, in tree order, as a training step does. Every worker calls it.

    Args:
      strategy: the tf.distribute strategy, of N replicas.
      megabytes: of each replica's vector.
      timeout_s: the process ends with status 2 and one line if it takes longer.
      communication: TensorFlow's hint for collectives.
    Returns:
      {"seconds": of a sum, the median; "bytes_per_second": what each replica sends meanwhile, 2 (N-1)/N of its vector}.
    Raises:
      ClusterError: if the sum is wrong; the message names the first element.
    """
    replicas, length = strategy.num_replicas_in_sync, megabytes * 250_000

    def late():
        text = f"error: a sum of {megabytes} MB over {replicas} workers through TensorFlow took more than {timeout_s:g} s: are"
        sys.stderr.write(f"{text} the ports between all workers open, and does another program need the network?\n")
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(timeout_s, late)
    timer.daemon = True
    timer.start()
    try:
        total, seconds = _timed(strategy, Reduction(strategy, replicas, True, communication), length)
    finally:
        timer.cancel()
    expected = sum(_numbers(replica, np.arange(length, dtype=np.int64)) for replica in range(replicas))
    wrong = np.flatnonzero(total != expected)
    if len(wrong):
        first = wrong[0]
        raise ClusterError(
            f"a sum over {replicas} workers through TensorFlow is wrong in {len(wrong):,} of {length:,} elements, first in "
            f"number {first}: {total[first]}, and right is {expected[first]}. A machine's memory or network is faulty: leave "
            "the workers out one by one"
        )
    return {"seconds": seconds, "bytes_per_second": 2 * (replicas - 1) / replicas * length * 4 / seconds}


def _numbers(replica, places):
    """Small whole numbers, others for each replica: their sums are exact in float32."""
    return (places * 7 + replica * 13) % 1009


def _timed(strategy, reduction, length):
    @tf.function
    def add():
        def one():
            replica = replica_id()
            return reduction(replica, [[tf.cast(_numbers(replica, tf.range(length, dtype=tf.int64)), tf.float32)]])[0]

        return strategy.experimental_local_results(strategy.run(one))[0]

    total, seconds = add().numpy(), []  # the first call traces, and connects the workers
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        total = add().numpy()
        seconds.append(time.perf_counter() - began)
    return total.astype(np.int64), statistics.median(seconds)
