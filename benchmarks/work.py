"""The work that all sides of a comparison share: network, loss, optimizer and batch; and the report on one line of JSON."""

import argparse
import json
import os
import resource
import statistics
import time

from models import NAMES

WEIGHT_DECAY = 1e-4  # of the He et al. 2016 recipe for CIFAR, as L2 in the loss


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags of every side that trains in TensorFlow; `doc` is its module's."""
    made = argparse.ArgumentParser(description=doc.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--model", choices=NAMES, default="resnet20", help="network, at its own size of images")
    made.add_argument("--batch", type=int, default=128, help="B, examples of a step over all workers")
    made.add_argument("--logical_replicas", type=int, default=0, help="K; 0: what B gives by default")
    made.add_argument("--threads", type=int, default=1, help="intra-op threads of a process")
    made.add_argument("--inter_op_threads", type=int, default=0, help="operations at a time; 0: as many as there are cores")
    made.add_argument("--identical", action="store_true", default=True, help="the same bits for any number of workers")
    made.add_argument("--noidentical", dest="identical", action="store_false", help="equal up to rounding")
    made.add_argument("--jit_compile", action="store_true", help="compile the passes with XLA")
    made.add_argument("--bucket_kb", type=int, default=0, help="size of a pack of Lockstep's reduction; 0: the program's own")
    made.add_argument("--steps", type=int, default=30, help="steps that are timed")
    made.add_argument("--warmup", type=int, default=5, help="steps before them, at least 1")
    return made


def set_inter_op_threads(count: int):
    """To be called before TensorFlow starts."""
    import tensorflow as tf

    if count:
        tf.config.threading.set_inter_op_parallelism_threads(count)


def network(name: str):
    """A network of the table, with L2 on its kernels."""
    import keras

    from models import build

    model = build(name, NAMES[name].input_shape, NAMES[name].classes)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.regularizer = keras.regularizers.L2(WEIGHT_DECAY / 2)
    return model


def optimizer():
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def batch(name: str, size: int):
    """Random images float32 [size, height, width, channels] and labels int32 [size], the same in every process."""
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.standard_normal((size, *NAMES[name].input_shape), dtype=np.float32)
    return images, rng.integers(0, NAMES[name].classes, size, dtype=np.int32)


class Clock:
    """Takes the time at the end of each execution of a side."""

    def __init__(self):
        self._ends = []

    def tick(self):
        self._ends.append((time.perf_counter(), time.process_time()))

    def report(self, options, warmup: int, steps_per_tick: int = 1, **facts) -> str:
        """One line of JSON.

        In it: images a second at the median step; the time of every step after `warmup` ticks; this process's processor time
        of a step, which other programs disturb less; what was run; this process's peak memory.
        """
        walls, cpus = zip(*self._ends[warmup - 1 :], strict=True)
        times = [(after - before) / steps_per_tick for before, after in zip(walls, walls[1:], strict=False)]
        asked = ("model", "batch", "threads", "inter_op_threads", "jit_compile", "identical")
        found = {
            "images_per_sec": options.batch / statistics.median(times),
            "step_time_s": times,
            "cpu_s_per_step": (cpus[-1] - cpus[0]) / steps_per_tick / len(times),
            **{name: getattr(options, name) for name in asked},
            **facts,
            "peak_memory_bytes": peak_memory_bytes(),
            "load_average": os.getloadavg()[0],
        }
        return json.dumps(found)


def peak_memory_bytes() -> int:
    """The most that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
