"""One fixed order of addition over the K logical replicas, whichever workers hold them.

The order is the aligned binary tree: the node of size 2^j that starts at a multiple of 2^j covers the leaves
[start, start + 2^j), cut at K; its value is left child + right child, or the left child alone where the right one
lies beyond K. Floating-point addition is not associative, so the tree *is* the result: whoever adds in another order
gets other last bits. A worker's contiguous block of leaves is a union of such nodes, and only those need to travel.
"""

import math
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
Node = tuple[int, int]  # (start, size)


def maximal_nodes(start: int, stop: int) -> list[Node]:
    """The largest tree nodes whose union is the block of leaves [start, stop), in order.

    >>> maximal_nodes(3, 6)
    [(3, 1), (4, 2)]
    """
    nodes = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        nodes.append((start, size))
        start += size
    return nodes


def root(nodes: dict[Node, Value], leaves: int, add: Callable[[Value, Value], Value]) -> Value:
    """Combines the values of `nodes`, which together cover all `leaves`, into the value of the tree's root."""

    def value(start: int, size: int) -> Value:
        if (start, size) in nodes:
            return nodes[start, size]
        assert size > 1, f"leaf {start} of {leaves} is covered by none of {sorted(nodes)}"
        half = size // 2
        left = value(start, half)
        return left if start + half >= leaves else add(left, value(start + half, half))

    return value(0, 1 << (leaves - 1).bit_length())


def default_logical_replicas(global_batch_size: int, smallest: int = 32) -> int:
    """K where none is given: the largest power of two that divides the batch and leaves `smallest` examples each.

    It follows from the batch alone, never from the cluster, so that the same command is the same run everywhere.
    """
    replicas = 1
    while global_batch_size % (2 * replicas) == 0 and global_batch_size // (2 * replicas) >= smallest:
        replicas *= 2
    return replicas


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending: what may be offered where something must divide it."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
