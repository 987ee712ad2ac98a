"""What may have been done wrongly in a step: a table of suspected faults, each with the change that would make a step so.

Each is put to the test by `compare`, which makes the step with that change and looks whether the other run's numbers come out.
"""

import dataclasses

from app.replay import Change
from cluster.tree import divisors

CAUSES = {
    1: "gradients summed for averaged, or averaged twice",
    2: "workers read the same examples, shards overlap, or examples are missing",
    3: "another order of examples, another batch, another seed",
    4: "another augmentation, or other dropout masks",
    5: "batch normalisation over another group of examples",
    6: "moving statistics drift apart between workers",
    7: "gradients clipped before they are reduced",
    8: "the optimizer is stepped several times a step",
    9: "another learning rate, schedule, weight decay or loss scale",
    10: "unequal local batches weighted equally",
    11: "other initial weights, or another configuration",
    12: "the evaluation counts examples twice, leaves some out, or weights them wrongly",
    13: "rounding alone",
    14: "asynchronous updates",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause that reproduces the other run.

    Attributes:
      number: in CAUSES.
      evidence: what was done, and the numbers that show it.
      distance: of the replayed step from the recorded one, the largest over its tensors, relative; 0 for what needs no replay.
      run: the one that is odd, 'B' as a rule; 'A' if run B's step is the proper one.
      recorded: whether the records tell it as well.
    """

    number: int
    evidence: str
    distance: float = 0.0
    run: str = "B"
    recorded: bool = False

    def __str__(self):
        shown = f" (replayed: within {self.distance:.1e} of run {self.run})" if self.distance else ""
        return f"{CAUSES[self.number]}: {'in run A, ' if self.run == 'A' else ''}{self.evidence}{shown}"


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A fault: the number of its cause in CAUSES, what was done, the change that does it, and whether the records tell it."""

    cause: int
    text: str
    change: Change
    recorded: bool = False


def table(replay, reference: dict, other: dict, line_a: dict, line_b: dict):
    """Yields the suspects, the cheap ones first.

    Args:
      replay: a `Replay` that has gone to the step.
      reference, other: headers of the run that is replayed, and of the one to be explained.
      line_a, line_b: their lines of the step.
    """
    batch, replicas = len(line_a["x"]), replay.trainer.logical_replicas
    passes = 1 if replay.trainer.batch_norm == "global" else replicas
    workers = _workers(batch, replicas, other.get("replicas", 1))
    yield from _factors(workers, batch, line_a, line_b)
    yield from _updates(workers, replay.trainer.optimizer, line_a, line_b)
    for w in workers:
        if clips(replay.trainer.optimizer):
            own = f"each of {w} workers clips its own mean gradient, before the reduction"
            yield Suspect(7, own, Change(workers=w, clip=True))
        alone = f"the gradient is that of one of {w} workers: nothing is reduced"
        yield Suspect(1, alone, Change(workers=w, only_first=True))
        if replay.normalises:
            own = f"each of {w} workers keeps the moving statistics of its own examples; these are worker 0's"
            yield Suspect(6, own, Change(workers=w, own_statistics=True))
    if replay.keyed:
        yield from _masks(workers, replicas, reference, other)
    if replay.normalises or replay.draws:
        yield from _groups(batch, passes, other)
    if replay.normalises:
        yield from _on_their_own(workers, batch, passes)
    if not replay.normalises and not replay.draws:
        yield from _unequal(batch)


def _factors(workers, batch, line_a, line_b):
    for w in workers:
        yield Suspect(1, f"gradients are summed over {w} workers, not averaged", Change(factor=w))
        yield Suspect(1, f"gradients are divided by the {w} workers twice", Change(factor=1 / w))
    yield Suspect(1, f"gradients are summed over the {batch} examples, not averaged", Change(factor=batch))
    scales = {line["loss_scale"] for line in (line_a, line_b) if line.get("loss_scale", 1) != 1}
    for scale in sorted(scales | {2.0**n for n in range(7, 17)}):
        if scale not in (*workers, batch):
            yield Suspect(9, f"the loss scale of {scale:g} is left in the gradient", Change(factor=scale))


def _updates(workers, optimizer, line_a, line_b):
    rate_a, rate_b = line_a["learning_rate"], line_b["learning_rate"]
    told = {rate_b / rate_a} if rate_a and rate_b != rate_a else set()
    for factor in sorted(told | set(map(float, workers)) | {1 / w for w in workers}):
        recorded = f", as recorded: {rate_b:.6g} for {rate_a:.6g}" if factor in told else ""
        yield Suspect(
            9, f"the learning rate is {factor:.6g} times as large{recorded}", Change(learning_rate=factor), factor in told
        )
    for w in workers:
        yield Suspect(8, f"the optimizer is applied {w} times a step with the same gradient", Change(updates=w))
        each = f"the optimizer is applied {w} times a step with 1/{w} of the gradient"
        yield Suspect(8, each, Change(updates=w, factor=1 / w))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner.weight_decay:
        for factor in (0.0, *map(float, workers), *(1 / w for w in workers)):
            yield Suspect(9, f"the weight decay is {factor:.4g} times as large", Change(weight_decay=factor))
    if clips(optimizer):
        yield Suspect(7, "the gradient is not clipped", Change(clipping=False))


def clips(optimizer) -> bool:
    """Whether the optimizer clips gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner.clipnorm or inner.clipvalue or inner.global_clipnorm)


def _masks(workers, replicas, reference, other):
    for w in [w for w in workers if replicas % w == 0]:
        share = replicas // w
        same = f"all {w} workers draw the dropout masks of worker 0"
        yield Suspect(4, same, Change(key=lambda t, k, share=share: (0, t, k % share)))
    yield Suspect(4, "the dropout masks are those of the step before", Change(key=lambda t, k: (0, t - 1, k)))
    yield Suspect(4, "the dropout masks are those of the step after", Change(key=lambda t, k: (0, t + 1, k)))
    yield Suspect(4, "the dropout masks are those of the first step", Change(key=lambda t, k: (0, 0, k)))
    own = reference.get("seed", 0)
    for seed in dict.fromkeys([other.get("seed", own), *range(own, own + 4), *range(4)]):
        if seed != own:
            by_seed = Change(key=lambda t, k, offset=seed - own: (offset, t, k))
            yield Suspect(4, f"the dropout masks are those of seed {seed}, not {own}", by_seed)


def _groups(batch, passes, other):
    told = 1 if other.get("batch_norm") == "global" else other.get("logical_replicas")
    for count in dict.fromkeys([told or passes, *(d for d in divisors(batch) if d <= min(64, batch // 2))]):
        if count == passes or batch % count:
            continue
        group = "the whole batch" if count == 1 else f"{batch // count} examples (K = {count})"
        own = "the whole batch" if passes == 1 else f"{batch // passes} (K = {passes})"
        text = f"the statistics of batch normalisation are those of {group}, not of {own}"
        yield Suspect(5, text, Change(groups=(batch // count,) * count))


def _on_their_own(workers, batch, passes):
    """As Keras does it under a strategy: no replica knows of the others' statistics."""
    for w in workers:
        if w != passes:
            text = f"each of {w} workers normalises its own {batch // w} examples and keeps their moving statistics"
            yield Suspect(5, text, Change(groups=(batch // w,) * w, workers=w, own_statistics=True))


def _unequal(batch):
    """A worker's mean counts as much as another's, though it is over fewer examples."""
    for count in range(2, 5):
        for share in range(batch // count + 1, -(-batch // (count - 1))):
            sizes = (share,) * (count - 1) + (batch - share * (count - 1),)
            text = f"{count} workers with {' + '.join(map(str, sizes))} examples: their means count equally"
            yield Suspect(10, text, Change(groups=sizes))


def _workers(batch, replicas, recorded):
    """Numbers of workers that may have been at work: as recorded, then small ones and those that divide K."""
    return [w for w in dict.fromkeys([recorded, 2, *divisors(replicas)[:6], 3, 4, 8]) if w > 1 and batch % w == 0]
