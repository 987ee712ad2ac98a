"""Whether the reduction begins before the backward pass ends: a trace of some steps on W workers, in one line of JSON.

    python -m benchmarks.overlap --workers=2 --logical_replicas=2 --model=resnet56 --bucket_kb=256

The chief's profiler tells when each operation ran. Of every step: how long before the end of its last convolution's gradient
the first and the last collective of the reduction began (milliseconds, quartiles over the steps; negative: after it), and how
long the step took.
"""

import json
import pathlib
import statistics
import sys

from benchmarks import lockstep_step, work


def main() -> int:
    return lockstep_step.on_workers("benchmarks.overlap", work.parser(__doc__), as_worker, workers=2)


def as_worker(options):
    """Trains and traces as this process's part in the cluster; does not return."""
    import tensorflow as tf

    import cluster

    work.set_inter_op_threads(options.inter_op_threads)

    def main(strategy):
        traced = pathlib.Path(options.child).with_name("trace")

        def tick(count=[0]):  # noqa: B006
            count[0] += 1
            if strategy.extended.should_checkpoint and count[0] == options.warmup:
                tf.profiler.experimental.start(str(traced))

        lockstep_step.train(options, strategy, tick)
        if strategy.extended.should_checkpoint:
            tf.profiler.experimental.stop()
            timed = json.loads(pathlib.Path(options.child).read_text())
            found = {
                "bucket_kb": options.bucket_kb,
                **seen_in(traced, options.steps),
                "step_time_s": statistics.median(timed["step_time_s"]),
            }
            facts = ("model", "workers", "logical_replicas", "identical")
            pathlib.Path(options.child).write_text(json.dumps({**{name: timed[name] for name in facts}, **found}))

    cluster.run(main, options.identical, options.threads)


def seen_in(folder: pathlib.Path, steps: int) -> dict:
    """Medians over the steps of the trace."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(next(folder.rglob("*.xplane.pb")).read_bytes())
    gradients, collectives = [], []  # (begin, end) in milliseconds
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                name = names[event.metadata_id]
                begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                span = begin, begin + event.duration_ps / 1e9
                if "Conv2DBackpropFilter" in name:
                    gradients.append(span)
                elif "CollectiveAllToAll" in name or "CollectiveReduce" in name:
                    collectives.append(span)
    each, more = divmod(len(gradients), steps)
    if more or not each or not collectives:
        raise SystemExit(f"{len(gradients)} gradients and {len(collectives)} collectives in the trace of {steps} steps")
    gradients.sort()
    begins = [gradients[i][0] for i in range(0, len(gradients), each)]
    firsts, lasts = [], []
    for step, (begin, following) in enumerate(zip(begins, [*begins[1:], float("inf")], strict=True)):
        end = max(e for _, e in gradients[step * each : (step + 1) * each])
        began = [b for b, _ in collectives if begin < b < following]
        firsts.append(end - min(began))
        lasts.append(end - max(began))
    return {
        "steps": steps,
        "first_begins_before_the_end_ms": [round(t, 1) for t in statistics.quantiles(firsts)],
        "last_begins_before_the_end_ms": [round(t, 1) for t in statistics.quantiles(lasts)],
    }


if __name__ == "__main__":
    sys.exit(main())
