"""verify.html: one file that loads nothing from elsewhere: verdict, curves, distances, a table of steps, configuration."""

import html
import io
import math

import matplotlib
from matplotlib.figure import Figure  # draws with Agg, whatever display there is, and leaves pyplot's state alone

from app.terminal import duration, listed, workers

_COLOURS = {"IDENTICAL": "#137333", "EQUAL": "#137333", "DIFFERENT": "#b3261e", "FAILED": "#b3261e"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #1f1f1f }
h1 { font-size: 1.3rem; margin: 0 0 .6rem } h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem }
.verdict { color: #fff; padding: .8rem 1rem; border-radius: 6px; overflow-wrap: anywhere }
.verdict b { font-size: 1.15rem } .note { color: #555 }
table { border-collapse: collapse; font-size: 13px } th { text-align: left; font-weight: 600 }
td, th { padding: 2px 10px 2px 0; border-bottom: 1px solid #e6e6e6; vertical-align: top }
td:first-child { white-space: nowrap }
.table { max-height: 26rem; overflow: auto; border: 1px solid #e6e6e6; padding: 0 .6rem }
.table th { position: sticky; top: 0; background: #fff }
code, .table td, pre { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px }
.same { color: #5f6368 } .other { background: #fce8e6; color: #b3261e } svg { max-width: 100%; height: auto }
.configuration { columns: 3; font-size: 12px } .configuration div { break-inside: avoid; overflow-wrap: anywhere }
"""


def page(found: dict) -> str:
    """The page of what verify.json holds."""
    config, verdict = found["configuration"], found["verdict"]
    names = [workers(width) for width in found["workers"]]
    rows, parts = found.get("by_step", []), []
    explanation = found.get("difference", {}).get("explanation", "")
    parts.append(
        f'<div class="verdict" style="background:{_COLOURS[verdict]}"><b>{verdict}</b>'
        f"{html.escape(found['line'].removeprefix(verdict))}<br>{html.escape(explanation)}</div>"
    )
    if found.get("compare"):
        parts.append(f"<h2>What compare says</h2><pre>{html.escape(found['compare'])}</pre>")
    if found.get("runs"):
        parts += ["<h2>Runs</h2>", _runs(found["runs"])]
    if rows:
        parts += ["<h2>Curves over each other</h2>", _curves(found, names), _distances(found, names)]
        parts += ["<h2>What every step did</h2>", _steps(rows, names)]
    shown = "".join(f"<div>{html.escape(name)} = {html.escape(str(value))}</div>" for name, value in config.items())
    parts += ["<h2>Configuration</h2>", f'<div class="configuration"><code>{shown}</code></div>']
    title = f"verify: {config['model']} on {config['dataset']}, {listed(names)}"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _runs(runs):
    cells = [
        f"<tr><td>{workers(one['workers'])}</td><td>{one['summary']['steps']}</td><td>{duration(one['seconds'])}</td>"
        f"<td>{_final(one['summary'])}</td><td><code>{one['sha256']}</code></td></tr>"
        for one in runs
    ]
    head = "<tr><th></th><th>steps</th><th>time, start included</th><th>at the end</th><th>sha256</th></tr>"
    return f"<table>{head}{''.join(cells)}</table>"


def _final(summary):
    names = ("loss", "val_loss", "val_top_1", "val_top_5")
    return ", ".join(f"{name} {summary[name]:.6g}" for name in names if name in summary)


def _curves(found, names):
    """The loss of each step and of each evaluation; the first run thick, so that the others show on it."""
    rows, figure = found["by_step"], _figure()
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    for i, name in enumerate(names):
        style = {"linewidth": 5, "alpha": 0.35} if i == 0 else {"linewidth": 1.2, "linestyle": _dashes(i)}
        line = axes.plot(steps, [row["loss"][i] for row in rows], label=f"{name}", **style)[0]
        held_out = [(e["evaluation_after"], e["metrics"]["loss"]) for e in found["evaluations"][i]]
        marker = {"markersize": 9, "alpha": 0.35} if i == 0 else {"markersize": 4}
        label = "held out" if i == len(names) - 1 and held_out else None
        axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), label=label, **marker) if held_out else None
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    return _svg(figure)


def _dashes(number):
    return (0, (4, 2 + number)) if number > 1 else "solid"


def _distances(found, names):
    """Distances from the first run on a log scale; or, where all are 0, that they are."""
    rows = found["by_step"]
    kinds = list(rows[0]["distances"])
    if not any(value for row in rows for values in row["distances"].values() for value in values):
        stages = ", ".join(kinds)
        return (
            f'<p class="note">The distance of {listed(names[1:])} from {names[0]} is exactly 0 at every one of {len(rows)} '
            f"steps, in {stages}: there is nothing to draw on a log scale.</p>"
        )
    figure = _figure(4.2)
    axes = figure.subplots()
    for colour, kind in enumerate(kinds):
        points = [(row["step"], max(row["distances"][kind])) for row in rows]
        points = [(step, value) for step, value in points if value and math.isfinite(value)]
        if points:
            axes.semilogy(*zip(*points, strict=True), ".-", linewidth=0.9, color=f"C{colour}", label=kind)
        if "rounding" in rows[0]:
            moved = [(row["step"], row["rounding"][kind]) for row in rows if row["rounding"][kind]]
            if moved:
                axes.semilogy(*zip(*moved, strict=True), ":", linewidth=1.2, color=f"C{colour}")
    dotted = "; dotted: a run disturbed by rounding" if "rounding" in rows[0] else ""
    axes.set(xlabel="step", ylabel="relative distance", title=f"largest distance from {names[0]}{dotted}")
    if axes.get_legend_handles_labels()[0]:  # what is not finite cannot be drawn
        axes.legend(ncols=2, fontsize="small")
    return "<h2>Distance</h2>" + _svg(figure)


def _steps(rows, names):
    """A row a step: the hash of each stage, once where all runs agree, else that of each run."""
    stages = list(rows[0]["hashes"])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", "loss value", *stages))
    body = []
    for row in rows:
        cells = [f"<td>{row['step']}</td>", _cell([f"{loss:.6f}" for loss in row["loss"]])]
        cells += [_cell(row["hashes"][stage]) for stage in stages]
        body.append(f"<tr>{''.join(cells)}</tr>")
    note = f"One hash where {listed(names)} agree to the last bit; otherwise that of each, in this order."
    return f'<p class="note">{note}</p><div class="table"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _cell(values):
    if len(set(values)) == 1:
        return f'<td class="same">{values[0]}</td>'
    return f'<td class="other">{"<br>".join(values)}</td>'


def _figure(height=3.6):
    return Figure(figsize=(11, height), layout="constrained")


def _svg(figure):
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "verify", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
