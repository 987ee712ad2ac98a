"""Why two runs read other examples: from the names of the examples that their batches held, at and after a step.

An example's name is (epoch, shard, record) where the runs recorded it, else the hashes of its x and y.
"""

import collections


def explained(steps_a: dict[int, dict], steps_b: dict[int, dict], step: int, workers: list[int], replay=None):
    """Yields (number of the cause, evidence) of what accounts for the difference of run B's examples from step `step` on.

    Args:
      steps_a, steps_b: {step: line} of both runs.
      workers: numbers of workers that B may have had.
      replay: a `Replay` of run A, to try other seeds; or None.
    """
    a, b = steps_a[step], steps_b[step]
    named = "ids" in a and "ids" in b
    both = [t for t in sorted(steps_a) if t >= step and t in steps_b]
    stream_a, stream_b = ([name for t in both for name in _names(of[t], named)] for of in (steps_a, steps_b))
    names_a, names_b = _names(a, named), _names(b, named)
    yield from ((2, text) for text in repeated(steps_a, steps_b, step, workers))
    if len(names_a) != len(names_b):
        if names_b == stream_a[: len(names_b)] or names_a == stream_b[: len(names_a)]:
            yield 3, f"the same order of examples, in batches of {len(names_b)} for {len(names_a)}"
    elif collections.Counter(names_a) == collections.Counter(names_b):
        moved = sum(x != y for x, y in zip(names_a, names_b, strict=True))
        yield 3, f"the batch holds the same {len(names_a)} examples in another order: {moved} are in another place"
    elif replay is not None and replay.reseeded and named:
        for seed in range(10):
            if seed != replay.trainer.seed and replay.reseeded(seed, step) == names_b:
                yield 3, f"run B's batch is the one of seed {seed}, example by example; run A has seed {replay.trainer.seed}"
    elif len(both) > 1 and collections.Counter(stream_a) == collections.Counter(stream_b):
        yield 3, f"steps {both[0]} to {both[-1]} hold the same {len(stream_a)} examples in another order"


def repeated(steps_a, steps_b, step, workers, first="A"):
    """Yields the evidence of cause 2, of what cannot happen by another order: some example several times, and not so in run A.

    Args:
      first: what the first run is called; 'B' if they are given the other way round.
    """
    second = "A" if first == "B" else "B"
    named = "ids" in steps_a[step] and "ids" in steps_b[step]
    names_a, names_b = _names(steps_a[step], named), _names(steps_b[step], named)
    recorded = [t for t in steps_a if t in steps_b]
    stream_a, stream_b = ([name for t in recorded for name in _names(of[t], named)] for of in (steps_a, steps_b))
    twice_a, twice_b = len(stream_a) - len(set(stream_a)), len(stream_b) - len(set(stream_b))
    size = len(names_b)
    for w in workers:
        share = size // w
        if w > 1 and size % w == 0 and names_b == names_b[:share] * w and names_a != names_a[:share] * w:
            whose = f"the first of run {first}'s" if names_b[:share] == names_a[:share] else "all of them the same"
            yield f"all {w} workers read the same {share} examples, {whose}: the batch of {size} holds {share} different ones"
            return
    within = size - len(set(names_b))
    if within > len(names_a) - len(set(names_a)):
        twice = f"{within} of the {size} examples in run {second}'s batch are there a second time"
        yield f"shards overlap: {twice}, in run {first}'s {len(names_a) - len(set(names_a)) or 'none'}"
    elif twice_b > twice_a:
        missing = len(set(stream_a) - set(stream_b))
        yield (
            f"of {len(stream_b)} recorded examples run {second} read {twice_b} a second time, and {missing} of run {first}'s "
            f"never; run {first} read {twice_a} a second time"
        )


def _names(line, named):
    return [tuple(name) for name in line["ids"]] if named else list(zip(line["x"], line["y"], strict=True))
