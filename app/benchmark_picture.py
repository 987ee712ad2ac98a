"""A benchmark as a PNG file: the steps' speeds and where their time goes; or speed by workers; or reductions by size."""

from matplotlib.figure import Figure  # draws with Agg, whatever display there is, and leaves pyplot's state alone
from matplotlib.ticker import PercentFormatter

from app.benchmark_report import PARTS


def draw(found: dict, path: str):
    """Draws what `app.benchmark_report.write` writes as JSON. Raises OSError."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if "allreduce" in found:
        _reductions(found["allreduce"], left, right)
    elif "scaling" in found:
        _scaling(found["scaling"], left, right)
    else:
        _steps(found, left)
        _breakdown(found["workers"], right)
    figure.suptitle(found["title"], parse_math=False)
    figure.savefig(path, format="png", dpi=120)


def _steps(found, axes):
    rows = found["steps"]
    axes.plot([row["step"] for row in rows], [row["images_per_sec"] for row in rows], ".-", linewidth=0.8)
    axes.axhline(found["images_per_sec"], color="black", linewidth=0.8, label=f"{found['images_per_sec']:,.1f} over all")
    axes.set(xlabel="step after the warm-up", ylabel="images/s", ylim=(0, None))
    axes.legend()


def _breakdown(workers, axes):
    """A bar a worker; what overlaps (a negative rest) lies left of 0."""
    for number, worker in enumerate(workers):
        at = 0.0
        for colour, part in enumerate(PARTS):
            milliseconds = 1e3 * worker["breakdown_s"].get(part, 0.0)
            left = at if milliseconds >= 0 else 0
            label = part if number == 0 and part in worker["breakdown_s"] else None
            axes.barh(number, milliseconds, left=left, color=f"C{colour}", label=label)
            at += max(milliseconds, 0)
    axes.set(xlabel="ms of a median step", yticks=range(len(workers)), yticklabels=[f"worker {n}" for n in range(len(workers))])
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)


def _scaling(rows, left, right):
    for kind, label in (("global", "same global batch"), ("worker", "same batch on each worker")):
        mine = [row for row in rows if row["batch"] == kind]
        widths = [row["workers"] for row in mine]
        left.plot(widths, [row["images_per_sec"] for row in mine], "o-", label=label)
        right.plot(widths, [row["efficiency"] for row in mine], "o-", label=label)
    first = rows[0]["images_per_sec"] / rows[0]["workers"]
    widths = sorted({row["workers"] for row in rows})
    left.plot(widths, [first * width for width in widths], "k:", label="in proportion")
    left.set(xlabel="workers", ylabel="images/s", ylim=(0, None), xticks=widths)
    right.set(xlabel="workers", ylabel="efficiency", ylim=(0, None), xticks=widths)
    right.yaxis.set_major_formatter(PercentFormatter(1))
    left.legend()


def _reductions(rows, left, right):
    for form in dict.fromkeys(row["form"] for row in rows):
        mine = [row for row in rows if row["form"] == form]
        sizes = [row["bytes"] for row in mine]
        left.loglog(sizes, [1e3 * row["median_s"] for row in mine], "o-", label=form)
        right.loglog(sizes, [row["bytes_per_s"] / 1e6 for row in mine], "o-", label=form)
    left.set(xlabel="bytes", ylabel="median ms")
    right.set(xlabel="bytes", ylabel="MB/s that each replica sends")
    left.legend()
