"""Why are two machines worse than one? The same training on one worker and on two, properly and with two well-known faults.

    .venv/bin/python studies/two_workers.py [train flags] [--out=DIR]

One worker with a global batch of 2b against two workers with b each, at an equal learning rate:

    one     one worker, batch 2b: what the others should give
    both    two workers as tf_cnn_benchmarks' `distributed_replicated` does it on tf.data: each worker's gradient is the mean
            over its b examples, the workers' gradients are summed, and both workers read the same examples
    sum     that sum alone: the workers read their own examples
    same    the same examples alone: the workers' gradients are averaged
    two     Lockstep

The faults live here: in the processes of a faulty variant, two functions of the program are replaced. All else is the product.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from app import command_line, local_runs, run_dir  # noqa: E402
from app.sources.mnist import DEBIAN  # noqa: E402
from cluster import launcher, quiet  # noqa: E402

VARIANTS = {
    "one": "one worker",
    "both": "two, summed, same data",
    "sum": "two, summed",
    "same": "two, same data",
    "two": "two, Lockstep",
}
FAULTS = {"both": ("sum", "same"), "sum": ("sum",), "same": ("same",)}
INTERVALS = 4
DEFAULTS = ["--model=small_cnn", "--global_batch_size=128", "--logical_replicas=2", "--optimizer=momentum", "--momentum=0.9"]
DEFAULTS += ["--learning_rate=0.1", "--schedule=constant", "--fingerprint_every=1", "--notensorboard", "--flagfile="]


def main(arguments: list[str]) -> int:
    """Trains the five variants one after the other, prints the tables and writes them. Returns the exit status."""
    data = ["--dataset=fashion_mnist", "--steps=400"] if DEBIAN.exists() else ["--dataset=digits", "--steps=120"]
    settings, options = command_line.parse([*DEFAULTS, *data, *arguments], ("out",))
    marks = [settings.steps * (i + 1) // INTERVALS for i in range(INTERVALS)]
    settings = dataclasses.replace(settings, eval_at_steps=",".join(map(str, marks[:-1])))
    directory = options.extra["out"] or f"runs/study-{settings.dataset}-{settings.model}"
    if status := local_runs.prepare(settings):
        return status
    for variant, title in VARIANTS.items():
        one = dataclasses.replace(settings, run_dir=os.path.join(directory, variant))
        if run_dir.finished(one):
            print(f"{title}: finished before", flush=True)
            continue
        print(f"{title}: {settings.steps} steps", flush=True)
        width = 1 if variant == "one" else 2
        command = [sys.executable, str(ROOT / "studies/two_workers.py"), f"--variant={variant}", *one.to_flags()]
        if status := launcher.run(command, width):
            return status
    found = {"configuration": dataclasses.asdict(settings), "marks": marks, "variants": {}}
    for variant in VARIANTS:
        found["variants"][variant] = measured(os.path.join(directory, variant), marks)
    found["compare"] = {variant: compared(directory, variant) for variant in ("both", "sum", "same", "two")}
    text = "\n".join(report(found))
    print(text)
    path = pathlib.Path(directory)
    (path / "study.json").write_text(json.dumps(found, indent=1) + "\n")
    (path / "study.md").write_text(text + "\n")
    draw(found, str(path / "study.png"))
    print(f"saved   {path}/study.md, study.json, study.png")
    return 0


def measured(directory: str, marks: list[int]) -> dict:
    """Top-1 and top-5 of the held-out examples after each of the steps, and the sha256 of the run's end."""
    lines = [json.loads(line) for line in pathlib.Path(directory, "fingerprints.jsonl").read_text().splitlines()]
    evaluations = {line["evaluation_after"]: line["metrics"] for line in lines if "evaluation_after" in line}
    summary = json.loads(pathlib.Path(directory, "summary.json").read_text())
    losses = [float.fromhex(line["loss"]) for line in lines if "loss" in line]
    return {
        "sha256": summary["sha256"],
        "top_1": [evaluations[step]["top_1"] for step in marks],
        "top_5": [evaluations[step].get("top_5") for step in marks],
        "loss": losses,
    }


def compared(directory: str, variant: str) -> str:
    """What `compare` says of one worker against a variant."""
    runs = [os.path.join(directory, name) for name in ("one", variant)]
    done = subprocess.run([sys.executable, "-m", "app", "compare", *runs], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode in (0, 1) else f"compare failed: {done.stderr.strip()[-300:]}"


def report(found: dict):
    """The tables in Markdown, and what compare says."""
    config, marks = found["configuration"], found["marks"]
    yield (
        f"`{config['model']}` on {config['dataset']}, one worker with a batch of {config['global_batch_size']} against two "
        f"with {config['global_batch_size'] // 2} each, {config['optimizer']} at a rate of {config['learning_rate']:g}, after "
        f"{', '.join(map(str, marks))} steps; in brackets the difference from one worker."
    )
    reference = found["variants"]["one"]
    for name in ("top_1", "top_5"):
        yield ""
        yield f"| {name.replace('_', '-')} | " + " | ".join(f"step {step}" for step in marks) + " | sha256 |"
        yield "|---|" + "---|" * (len(marks) + 1)
        for variant, numbers in found["variants"].items():
            cells = []
            for value, of_one in zip(numbers[name], reference[name], strict=True):
                off = "" if variant == "one" else " (0)" if value == of_one else f" ({value - of_one:+.4f})"
                cells.append(f"{value:.4f}{off}")
            yield f"| {VARIANTS[variant]} | {' | '.join(cells)} | `{numbers['sha256'][:12]}` |"
    for variant, text in found["compare"].items():
        yield ""
        yield f"`compare` of one worker against *{VARIANTS[variant]}*:"
        yield ""
        yield from (f"    {line}" for line in text.splitlines())


def draw(found: dict, path: str):
    """Curves of the five variants: top-1 at the intervals, and the smoothed loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (variant, numbers) in enumerate(found["variants"].items()):
        style = {"linewidth": 6, "alpha": 0.3} if variant == "one" else {"linewidth": 1.3}
        left.plot(found["marks"], numbers["top_1"], "o-", color=f"C{number}", label=VARIANTS[variant], **style)
        width = max(1, len(numbers["loss"]) // 40)
        smooth = [sum(numbers["loss"][i : i + width]) / width for i in range(len(numbers["loss"]) - width + 1)]
        right.plot(range(width, width + len(smooth)), smooth, color=f"C{number}", **style)
    left.set(xlabel="step", ylabel="top-1, held out", xticks=found["marks"])
    right.set(xlabel="step", ylabel=f"loss, mean of {width} steps", yscale="log")
    left.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)


# ---- in the processes of a variant ---------------------------------------------------------------------------------------


def worker(variant: str, arguments: list[str]):
    """This process's part of a variant; ends the process."""
    with quiet.hushed():
        import app.train as training
        from app import assembly
        from cluster import runtime

    settings, _ = command_line.parse(arguments)
    if "sum" in FAULTS.get(variant, ()):
        assembly.trainer = _summing_trainer
    if "same" in FAULTS.get(variant, ()):
        opened = training.open_data
        training.open_data = lambda *given, **facts: _with_the_same_examples(opened(*given, **facts))

    def part(strategy):
        training.train(settings, strategy)

    runtime.run(part, settings.identical, settings.intra_op_threads, settings.seed, settings.communication)


def _summing_trainer(config, plain):
    """A trainer that adds the workers' mean gradients where it should average them."""
    from cluster import Trainer
    from cluster.step import Step

    class SummingStep(Step):
        def _sum_of_passes(self, one_pass, *rest):
            gradients = len(one_pass.differentiable)
            sums = super()._sum_of_passes(one_pass, *rest)
            return [total * self._trainer.reduction.replicas for total in sums[:gradients]] + sums[gradients:]

    class SummingTrainer(Trainer):
        def compile(self, *given, **named):
            super().compile(*given, **named)
            self._step = SummingStep(self)

    return SummingTrainer(
        plain, config.global_batch_size, config.logical_replicas, config.seed, config.identical, config.communication
    )


def _with_the_same_examples(data):
    """Data of which every worker reads what the first one should."""

    class Same:
        def __init__(self, streams):
            self._streams = streams

        def __getattr__(self, name):
            return getattr(self._streams, name)

        def examples(self, first, last, *rest, **named):
            return self._streams.examples(0, last - first, *rest, **named)

    return dataclasses.replace(data, training=Same(data.training))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--variant="):
        worker(sys.argv[1].partition("=")[2], sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
