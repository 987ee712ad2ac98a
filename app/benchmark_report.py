"""What a benchmark says: the lines of tf_cnn_benchmarks, tables, a JSON and a CSV file. Pure functions of what was measured."""

import csv
import json
import statistics

import numpy as np

from app.report import renamed

# The parts of a step's time, in order; "graph" is passes, reduction, update and rest where they were not measured apart.
PARTS = ("input wait", "graph", "passes", "reduction", "update", "rest", "host")
_METRICS = {"loss": ("total_loss", ".3f"), "top_1": ("top-1", ".4f"), "top_5": ("top-5", ".4f")}
_WORKERS = 4  # columns of a table


def speed(images, seconds) -> tuple[float, float, float]:
    """Images a second, its uncertainty, and the jitter of n steps.

    The uncertainty is the standard deviation of the steps' speeds over sqrt(n); the jitter is 1.4826 times the median absolute
    deviation of the speeds from their median, which for normally distributed speeds is their standard deviation.

    Args:
      images: [n] examples of each step.
      seconds: [n].
    """
    images, seconds = np.asarray(images, float), np.asarray(seconds, float)
    speeds = images / seconds
    jitter = 1.4826 * np.median(np.abs(speeds - np.median(speeds)))
    return float(images.sum() / seconds.sum()), float(speeds.std() / np.sqrt(len(speeds))), float(jitter)


def header(row: dict) -> str:
    """The names over the lines of steps; which metrics there are, a row tells."""
    return "  ".join(["Step", "Img/sec", *(title for name, (title, _) in _METRICS.items() if name in row)])


def step_line(rows: list[dict]) -> str:
    """The line of the last of these steps: speed over all of them, its own metrics."""
    mean, uncertainty, jitter = speed([row["images"] for row in rows], [row["seconds"] for row in rows])
    metrics = [f"{rows[-1][name]:{form}}" for name, (_, form) in _METRICS.items() if name in rows[-1]]
    figures = f"images/sec: {mean:.1f} +/- {uncertainty:.1f} (jitter = {jitter:.1f})"
    return "  ".join([str(rows[-1]["step"]), figures, *metrics])


def total_line(images_per_sec: float) -> str:
    return f"total images/sec: {images_per_sec:.2f}"


def breakdown(rows: list[dict], parts: dict[str, list[float]]) -> dict[str, float]:
    """Where the time of a median step of one worker goes, in seconds by the names of PARTS; they add up to the step.

    Args:
      rows: of the steps: seconds; in_graph_s, how long the call of TensorFlow's function took; input_wait_s, where it is known.
      parts: seconds of each part alone, as `cluster.step_parts` measures them, each with a call; {}: not measured.
    """
    step, inside = (statistics.median(row[name] for row in rows) for name in ("seconds", "in_graph_s"))
    found = {}
    if "input_wait_s" in rows[0]:
        found["input wait"] = statistics.median(row["input_wait_s"] for row in rows)
    medians = {name: statistics.median(seconds) for name, seconds in parts.items()}
    call = medians.pop("call", 0.0)
    found |= {name: max(0.0, seconds - call) for name, seconds in medians.items()}
    found["rest" if parts else "graph"] = inside - sum(found.values())
    return found | {"host": step - inside}


def breakdown_lines(workers: list[dict[str, float]]):
    """A table of `breakdown`s, a column for each worker, or their median, least and largest if there are many."""
    shown = {f"worker {number}": found for number, found in enumerate(workers)}
    if len(workers) > _WORKERS:
        names = {"median": statistics.median, "least": min, "largest": max}
        shown = {title: {k: of(w[k] for w in workers) for k in workers[0]} for title, of in names.items()}
    yield "".join([f"{'time of a step, ms':20}", *(f"{title:>18}" for title in shown)])
    for part in [name for name in PARTS if name in workers[0]]:
        cells = (f"{1e3 * found[part]:>10.2f}{found[part] / sum(found.values()):>8.1%}" for found in shown.values())
        yield "".join([f"  {part:18}", *cells])
    yield "".join([f"  {'step':18}", *(f"{1e3 * sum(found.values()):>10.2f}{'':8}" for found in shown.values())]).rstrip()


def startup_line(parts: dict[str, float]) -> str:
    return f"first step {sum(parts.values()):.1f} s after the start: " + ", ".join(f"{k} {v:.1f}" for k, v in parts.items())


def coordinator_line(waiting_s: float, update_s: float, came: float) -> str:
    """With parameter servers: medians over the steps of what the coordinator did in one."""
    return (
        f"coordinator, of a step: {waiting_s * 1000:.1f} ms waiting for results, {update_s * 1000:.1f} ms update on the ps; "
        f"{came / 1e6:.2f} MB came to it"
    )


def memory_line(workers: list[dict]) -> str:
    """The most that a worker has held, of memory and of its GPUs' memory."""
    text = f"memory of a worker at most: {max(w['resident_peak_bytes'] for w in workers) / 1e6:,.0f} MB resident"
    gpu = max(w["gpu_peak_bytes"] for w in workers)
    return text + (f", {gpu / 1e6:,.0f} MB on its GPUs" if gpu else "")


def bandwidth(size: int, replicas: int, seconds: float) -> float:
    """Bytes a second that a replica sends, and receives, if N replicas reduce `size` bytes by ring all-reduce."""
    return 2 * (replicas - 1) / replicas * size / seconds


def reductions(workers: list[dict[int, dict[str, list[float]]]], replicas: int) -> list[dict]:
    """Rows of `allreduce_lines`, a size and form each, from what `cluster.allreduce.sweep` found on each worker.

    A reduction has ended when the last worker has it; a worker's own bandwidth goes by its own times.
    """
    rows = []
    for size, forms in workers[0].items():
        for form in forms:
            times = [found[size][form] for found in workers]
            median = statistics.median(max(each) for each in zip(*times, strict=True))
            own = [bandwidth(int(size), replicas, statistics.median(seconds)) for seconds in times]
            row = {"bytes": int(size), "form": form, "median_s": median, "bytes_per_s": bandwidth(int(size), replicas, median)}
            rows.append({**row, "bytes_per_s_by_worker": own, "rounds": len(times[0])})
    return rows


def allreduce_lines(rows: list[dict]):
    """A table of `reductions`."""
    workers = len(rows[0]["bytes_per_s_by_worker"])
    columns = [f"worker {n}" for n in range(workers)] if workers <= _WORKERS else ["slowest worker", "fastest worker"]
    yield f"{'bytes':>12}  {'form':8}{'median ms':>10}  " + "".join(f"{title + ', MB/s':>22}" for title in columns)
    for row in rows:
        speeds = row["bytes_per_s_by_worker"]
        speeds = speeds if workers <= _WORKERS else [min(speeds), max(speeds)]
        cells = "".join(f"{each / 1e6:>22,.1f}" for each in speeds)
        yield f"{row['bytes']:>12,}  {row['form']:8}{1e3 * row['median_s']:>10.3f}  {cells}"


def scaling(runs: list[dict]) -> list[dict]:
    """Adds to each run its speed-up and efficiency against the fewest workers with the same "batch", "global" or "worker"."""
    rows = []
    for run in runs:
        first = min((other for other in runs if other["batch"] == run["batch"]), key=lambda other: other["workers"])
        up = run["images_per_sec"] / first["images_per_sec"]
        rows.append({**run, "speed_up": up, "efficiency": up * first["workers"] / run["workers"]})
    return rows


def scaling_lines(rows: list[dict]):
    """Two tables of `scaling`."""
    for kind, title in (("global", "the same global batch"), ("worker", "the same batch on each worker")):
        yield f"{title:30}{'batch':>8}{'K':>6}{'images/s':>12}{'step ms':>10}{'speed-up':>10}{'efficiency':>12}"
        for row in [row for row in rows if row["batch"] == kind]:
            name = f"  {row['workers']} {'worker' if row['workers'] == 1 else 'workers'}"
            yield (
                f"{name:30}{row['global_batch_size']:>8,}{row['logical_replicas']:>6}{row['images_per_sec']:>12,.1f}"
                f"{1e3 * row['median_step_s']:>10.1f}{row['speed_up']:>10.2f}{row['efficiency']:>12.1%}"
            )


def table(found: dict) -> list[dict]:
    """The rows of the CSV file: of reductions, of scaling, or of steps."""
    rows = next(found[name] for name in ("allreduce", "scaling", "steps") if name in found)
    return [{k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in rows]


def write(found: dict, flags) -> list[str]:
    """Writes the files that the flags ask for, each whole or not at all. Returns their names. Raises OSError."""
    written = []
    if flags.json:
        with renamed(flags.json) as temporary, open(temporary, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
        written.append(flags.json)
    if flags.csv:
        rows = table(found)
        with renamed(flags.csv) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        written.append(flags.csv)
    if flags.picture:
        from app import benchmark_picture

        with renamed(flags.picture) as temporary:
            benchmark_picture.draw(found, temporary)
        written.append(flags.picture)
    return written
