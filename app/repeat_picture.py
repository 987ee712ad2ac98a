"""repeat.json as a PNG file: the final numbers by seed with mean and spread, and the curves of all seeds."""

from matplotlib.figure import Figure  # draws with Agg, whatever display there is, and leaves pyplot's state alone
from matplotlib.ticker import MaxNLocator


def draw(found: dict, path: str):
    """Draws what `app.repeat.summarised` returns. Raises OSError."""
    wanted = [name for name in ("val_top_1", "val_loss", "top_1", "loss") if name in found["numbers"]][:2]
    figure = Figure(figsize=(11, 3.6 * len(wanted)), layout="constrained")
    grid = figure.subplots(len(wanted), 2, squeeze=False)
    for (left, right), name in zip(grid, wanted, strict=True):
        _final(found, name, left)
        _curves(found, name, right)
    config = found["configuration"]
    figure.suptitle(f"{config['model']} on {config['dataset']}, {len(found['runs'])} seeds", parse_math=False)
    figure.savefig(path, format="png", dpi=110)


def _final(found, name, axes):
    seeds, n = [one["seed"] for one in found["runs"]], found["numbers"][name]
    axes.plot(seeds, [one["final"][name] for one in found["runs"]], "o")
    axes.axhline(n["mean"], color="black", linewidth=0.8, label=f"mean {n['mean']:.4f} ± {n['error']:.4f}")
    low, high = n["mean"] - n["spread"], n["mean"] + n["spread"]
    axes.axhspan(low, high, color="C0", alpha=0.15, label=f"spread {n['spread']:.4f}")
    axes.set(xlabel="seed", ylabel=f"{name} at the end", xticks=seeds)
    axes.legend(fontsize="small")


def _curves(found, name, axes):
    for one in found["runs"]:
        points = [(epoch["epoch"], epoch[name]) for epoch in one["epochs"] if name in epoch]
        axes.plot(*zip(*points, strict=True), ".-", linewidth=0.9, label=f"seed {one['seed']}")
    axes.set(xlabel="epoch", ylabel=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(found["runs"]) <= 10:
        axes.legend(fontsize="small", ncols=2)
