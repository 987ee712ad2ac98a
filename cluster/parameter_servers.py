"""ParameterServerStrategy: variables on ps tasks, passes by whichever worker is free, everything else on the coordinator.

The coordinator (the chief) alone runs the program. Workers and ps only serve: each starts a tf.distribute.Server and waits
until the coordinator tells it how to end. `remote_steps.py` has the steps.
"""

import contextlib
import logging
import threading

import tensorflow as tf
from tensorflow.python.framework import ops

from cluster import latecomer, wishes
from cluster.spec import Member

_servers = []  # a Server ends with its object
_here = False


def start(me: Member, identical: bool, intra_op_threads: int, verbose: bool):
    """This process's part: the strategy on the coordinator; None elsewhere, where the server has been started."""
    if not verbose:  # it tells a worker's death in six lines for each unit that has to be computed again
        tf.get_logger().setLevel(logging.CRITICAL)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if me.is_chief:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        _spread_by_size(strategy)
        return strategy
    # Symptom without `config`: equal for two steps, then other last bits. A Server takes threads and rewriting of sums from
    # here, not from tf.config (tests/test_parameter_servers.py tells if that should change).
    options = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=intra_op_threads)
    if identical:
        options.graph_options.rewrite_options.arithmetic_optimization = 2  # RewriterConfig.OFF
    spec = resolver.cluster_spec()
    _servers.append(tf.distribute.Server(spec, resolver.task_type, resolver.task_id, protocol="grpc", config=options))
    return None


def serve(me: Member, late: bool) -> int:
    """Waits while TensorFlow's threads work for the coordinator; the lifeline ends the process when that ends.

    Args:
      late: see `latecomer.py`: there is no lifeline.
    Returns:
      The exit status when the coordinator has gone, in that case.
    """
    print(f"{role(me)}{', in a run that has begun' if late else ''}", flush=True)
    with wishes.attended():
        if not late:
            threading.Event().wait()
        latecomer.stay(me)
    print(f"{me.called(me.number)}: the coordinator has ended", flush=True)
    return wishes.RESUMABLE


def workers_of(me: Member | None) -> int:
    """How many workers compute for a coordinator; 0 without parameter servers."""
    return me.workers - me.ps - 1 if me and me.ps else 0


def role(me: Member) -> str:
    """What this process does, in a line."""
    workers = workers_of(me)
    if me.is_chief:
        return f"coordinator at {me.addresses[0]}: variables on {me.ps} ps, passes on {workers} worker{'s' * (workers > 1)}"
    does = "computes what the coordinator asks for" if me.is_worker(me.number) else "holds variables, and updates them"
    return f"{me.called(me.number)} at {me.addresses[me.number]}: {does}"


def _spread_by_size(strategy):
    """Each variable goes, whole, to the ps that holds the fewest bytes so far, and an optimizer's slots beside it.

    (TensorFlow deals them in turn, whatever their size. Its partitioners, which cut variables, fail in Keras 3: a
    ShardedVariable has no `handle`.)
    """
    extended = strategy.extended
    held = [0] * extended._num_ps

    def create(next_creator, **kwargs):
        lightest = held.index(min(held))
        device = "/job:chief/task:0/device:CPU:0" if _here else f"/job:ps/task:{lightest}/device:CPU:0"
        with ops.colocate_with(None, ignore_existing=True), tf.device(device):
            variable = next_creator(**kwargs)
        if not _here:
            held[lightest] += variable.shape.num_elements() * variable.dtype.size
        return variable

    extended._create_variable_round_robin = create


@contextlib.contextmanager
def on_coordinator():
    """Within the block, variables that are made under the strategy's scope are the coordinator's own."""
    global _here
    _here = True
    try:
        yield
    finally:
        _here = False
