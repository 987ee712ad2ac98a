"""The reduction in tree order against a ring all-reduce on W worker processes: time, bandwidth, memory; in one line of JSON.

    python -m benchmarks.allreduce --workers=2 --megabytes=1,10,100

Each form reduces the same list of tensors, as gradients are; the two take turns. Peak memory is that of runs of one form alone.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile

from benchmarks import work
from cluster import launcher

FORMS = ("ordered", "ring")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes on 127.0.0.1")
    parser.add_argument("--megabytes", default="1,10,100", help="sizes of what is reduced, float32")
    parser.add_argument("--rounds", type=int, default=20, help="timed reductions of each form and size")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a process")
    parser.add_argument("--communication", choices=("auto", "ring", "nccl"), default="auto", help="hint for collectives")
    parser.add_argument("--forms", default=",".join(FORMS), help="for the script itself: what a worker measures")
    parser.add_argument("--child", default="", help="for the script itself: be a worker, and write to files of this name")
    options = parser.parse_args()
    if options.child:
        as_worker(options)
    sizes = [float(size) for size in options.megabytes.split(",")]
    largest = max(sizes)
    workers = run(options)
    alone = {form: run(options, f"--forms={form}", f"--megabytes={largest}", "--rounds=5") for form in FORMS}
    print(json.dumps(report(options, sizes, workers, alone)))
    return 0


def run(options, *flags) -> list[dict]:
    """What each worker of a cluster reports. `flags` come after, and so win over, those that were given."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, f"worker-{index}") for index in range(options.workers)]
        child = f"--child={folder}/worker-"
        command = [sys.executable, "-m", "benchmarks.allreduce", *sys.argv[1:], *flags, child]
        with contextlib.redirect_stdout(sys.stderr):  # the workers' output
            status = launcher.run(command, options.workers)
        if status:
            sys.exit(status)
        return [json.loads(file.read_text()) for file in files]


def report(options, sizes, workers, alone):
    """The results of all runs, put together."""
    results, ratios = [], {}
    for size in sizes:
        row = {"megabytes": size}
        for form in FORMS:
            # A reduction has ended when the last worker has it.
            times = [max(each) for each in zip(*(w["seconds"][f"{form} {size}"] for w in workers), strict=True)]
            seconds = statistics.median(times)
            moved = 2 * (options.workers - 1) / options.workers * size
            row[form] = {"median_s": seconds, "megabytes_per_s_sent_by_each_worker": moved / seconds, "seconds": times}
        pairs = [a / b for a, b in zip(row["ordered"]["seconds"], row["ring"]["seconds"], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        ratio = row["ordered"]["median_s"] / row["ring"]["median_s"]
        ratios[f"time, ordered / ring, {size:g} MB, {options.workers} workers"] = {"ratio": ratio, "low": low, "high": high}
        results.append(row)
    memory = {form: {key: max(w[key] for w in alone[form]) for key in ("memory_before", "peak_memory")} for form in FORMS}
    held = [memory[form]["peak_memory"] - memory[form]["memory_before"] for form in FORMS]
    label = f"peak memory of a worker above its start, ordered / ring, {max(sizes):g} MB, {options.workers} workers"
    ratios[label] = dict.fromkeys(("ratio", "low", "high"), held[0] / held[1])
    return {
        "workers": options.workers,
        "threads": options.threads,
        "ratios": ratios,
        "results": results,
        "memory_bytes": memory,
        "load_average": os.getloadavg()[0],
    }


def as_worker(options):
    """Measures as this process's part in the cluster; does not return."""
    import cluster

    cluster.run(lambda strategy: measure(options, strategy), intra_op_threads=options.threads)


def measure(options, strategy):
    from cluster import allreduce

    forms, sizes = tuple(options.forms.split(",")), [float(size) for size in options.megabytes.split(",")]
    before = work.peak_memory_bytes()
    swept = allreduce.sweep(strategy, [round(m * 1e6) for m in sizes], lambda _: options.rounds, forms, options.communication)
    seconds = {f"{form} {size}": swept[round(size * 1e6)][form] for size in sizes for form in forms}
    found = {"seconds": seconds, "memory_before": before, "peak_memory": work.peak_memory_bytes()}
    pathlib.Path(f"{options.child}{strategy.cluster_resolver.task_id}").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
