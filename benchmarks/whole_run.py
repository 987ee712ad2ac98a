"""A training by `train`, with all that it writes and tells: the time of a step, evaluations and checkpoints included, in JSON.

    python -m benchmarks.whole_run --block=22 -- --dataset=digits --steps=220

What follows -- are train's flags. A time is the mean over a block of steps, so that what comes once an epoch is in it; the
first block, in which the step is traced, is left out.
"""

import argparse
import contextlib
import json
import os
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
    tick = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    cpu = time.process_time()
    train(config, strategy, [tick])
    marks = ends[block - 1 :: block]
    return {
        "step_time_s": [(after - before) / block for before, after in zip(marks, marks[1:], strict=False)],
        "images_per_sec": config.global_batch_size * (len(ends) - block) / (ends[-1] - ends[block - 1]),
        "cpu_s_per_step": (time.process_time() - cpu) / len(ends),
        "batch": config.global_batch_size,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
