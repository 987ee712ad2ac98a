"""A training by `train`, with all that it writes and tells: the time of a step, evaluations and checkpoints included, in JSON.

    python -m benchmarks.whole_run --block=22 -- --dataset=digits --steps=220

What follows -- are train's flags. A time, of the clock or of the processors, is the mean over a block of steps, so that what
comes once an epoch is in it; the first block, in which the step is traced, is left out.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block", type=int, default=22, help="steps in one time (default 22)")
    parser.add_argument("flags", nargs="*", help="of train")
    options = parser.parse_args()

    import cluster
    from app import command_line

    with tempfile.TemporaryDirectory() as folder:
        config, _ = command_line.parse([*options.flags, f"--run_dir={folder}/run"])

        def work(strategy):
            out = os.dup(1)
            with contextlib.redirect_stdout(sys.stderr):  # the training's own lines
                found = measure(config, strategy, options.block)
            os.write(out, (json.dumps(found) + "\n").encode())

        cluster.run(work, config.identical, config.intra_op_threads, config.seed)


def measure(config, strategy, block):
    import keras

    from app.train import train

    ends = []
    now = lambda batch, logs: ends.append((time.perf_counter(), time.process_time()))  # noqa: E731
    train(config, strategy, [keras.callbacks.LambdaCallback(on_train_batch_end=now)])
    wall, processor = zip(*ends[block - 1 :: block], strict=True)
    per_step = lambda marks: [(b - a) / block for a, b in zip(marks, marks[1:], strict=False)]  # noqa: E731
    return {
        "step_time_s": per_step(wall),
        "processor_time_s": per_step(processor),
        "images_per_sec": config.global_batch_size / statistics.mean(per_step(wall)),
        "cpu_s_per_step": statistics.mean(per_step(processor)),
        "batch": config.global_batch_size,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
