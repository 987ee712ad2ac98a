"""Why two evaluations of the same weights differ: from their sums, and from the sums of stretches of the held-out examples."""

import math

_CLOSE = 1e-5


def explained(replay, a: dict, b: dict, header: dict):
    """Yields ('B', what explains run B's evaluation), or ('A', what explains run A's) if run B's is the proper one.

    Args:
      replay: a `Replay` of run A with `evaluation`, or None.
      a, b: the lines of both.
      header: run A's.
    """
    for odd, (x, y) in (("B", (a, b)), ("A", (b, a))):
        for times in (2, 3, 4, 8):
            if _near(_times(x["metric_sums"], times), y["metric_sums"]):
                of = f"{y['examples']} for {x['examples']}"
                yield odd, f"every example counts {times} times: {of}, and each sum is {times} times as large"
                return
    if replay is None or replay.evaluation is None:
        return
    replay.go_to(a["evaluation_after"] + 1)
    for odd, (x, y) in (("B", (a, b)), ("A", (b, a))):
        whole = replay.evaluated([(0, None)])
        proper = _near(whole[0], x["metric_sums"]) and not list(_wrongly_weighted(whole, x, y, "y's are the means, x's not"))
        found = list(_wrong(replay, x, y, header["global_batch_size"])) if proper else []
        yield from ((odd, text) for text in found)
        if found:
            return


def _wrong(replay, a, b, batch):
    """Yields what would make b of the held-out examples, where a is the proper evaluation."""
    count = a["examples"]
    cuts = [*range(0, count, batch), count]
    sums = replay.evaluated(list(zip(cuts, cuts[1:], strict=False)))
    if len(sums) > 1 and cuts[-1] - cuts[-2] < batch:
        last = cuts[-1] - cuts[-2]
        if _near(_sum(sums[:-1]), b["metric_sums"]):
            yield f"the last {last} of {count} examples are left out: they fill no batch of {batch}"
        if _near(_sum([*sums, sums[-1]]), b["metric_sums"]):
            yield f"the last {last} of {count} examples count twice"
    for workers in (2, 3, 4, 8):
        share = -(-count // workers)
        ends = [min(w * share, count) for w in range(workers + 1)]
        parts = replay.evaluated([(s, e) for s, e in zip(ends, ends[1:], strict=False) if s < e])
        for w, part in enumerate(parts):
            if _near(part, b["metric_sums"]):
                yield f"only worker {w} of {workers} is counted: {b['examples']} of {count} examples"
        yield from _wrongly_weighted(
            parts, a, b, f"the metrics are the mean of {workers} workers' means, which have unequal parts"
        )
    yield from _wrongly_weighted(
        sums, a, b, f"the metrics are the mean over batches, of which the last has {cuts[-1] - cuts[-2]} examples"
    )


def _wrongly_weighted(parts, a, b, text):
    """Whether B's metrics are the plain mean of the parts' means, and A's are not. Sums come as (total, count) for a mean."""
    names = list(a["metrics"])
    means = []
    for i, _ in enumerate(names):
        of_parts = [(part[2 * i][0], part[2 * i + 1][0]) for part in parts if len(part) > 2 * i + 1]
        if len(of_parts) < len(parts) or not all(count for _, count in of_parts):
            return
        means.append(sum(total / count for total, count in of_parts) / len(of_parts))
    recorded = [[b["metrics"].get(name, math.nan)] for name in names]
    if _near([[m] for m in means], recorded) and not _near([[a["metrics"][name]] for name in names], recorded):
        yield text


def _times(sums, factor):
    return [[value * factor for value in part] for part in sums]


def _sum(of_parts):
    return [[sum(values) for values in zip(*parts, strict=True)] for parts in zip(*of_parts, strict=True)]


def _near(a, b):
    pairs = [(float(x), float(y)) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return all(abs(x - y) <= _CLOSE * max(abs(x), abs(y), 1e-6) for x, y in pairs)
