"""The fixed order of addition, as pure functions."""

import random

import numpy as np
import pytest

from cluster import tree


def by_definition(leaves):
    """The expression of the aligned tree, from its definition: combine neighbours, level by level."""
    level = [str(i) for i in range(leaves)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [f"({'+'.join(pair)})" if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def add(left, right):
    return f"({left}+{right})"


@pytest.mark.parametrize("leaves", [1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 24])
def test_any_cut_into_blocks_gives_the_expression_of_the_whole_tree(leaves):
    random.seed(leaves)
    equal = [range(0, leaves + 1, leaves // n) for n in tree.divisors(leaves)]
    uneven = [sorted({0, leaves, *random.choices(range(leaves + 1), k=3)}) for _ in range(20)]
    for cuts in [*equal, *uneven]:
        nodes = {}
        for start, stop in zip(cuts, cuts[1:], strict=False):
            for node_start, size in tree.maximal_nodes(start, stop):
                inside = {(i, 1): str(i) for i in range(node_start, node_start + size)}
                shifted = {(i - node_start, 1): value for (i, _), value in inside.items()}
                nodes[node_start, size] = tree.root(shifted, size, add)
        assert tree.root(nodes, leaves, add) == by_definition(leaves)


@pytest.mark.parametrize(("block", "nodes"), [((0, 8), [(0, 8)]), ((3, 6), [(3, 1), (4, 2)]), ((6, 12), [(6, 2), (8, 4)])])
def test_a_block_is_cut_into_its_maximal_nodes(block, nodes):
    assert tree.maximal_nodes(*block) == nodes


@pytest.mark.parametrize(
    ("batch", "replicas"), [(256, 8), (128, 4), (64, 2), (63, 1), (32, 1), (1, 1), (96, 2), (192, 4), (8192, 256)]
)
def test_k_defaults_to_the_largest_power_of_two_that_leaves_32_examples(batch, replicas):
    assert tree.default_logical_replicas(batch) == replicas


@pytest.mark.parametrize("last_apart", [False, True])
@pytest.mark.parametrize(("start", "size"), [(3, 1), (2, 2), (4, 4), (8, 8)])
def test_passes_are_added_in_the_order_of_the_tree_each_once(tensorflow, start, size, last_apart):
    from cluster.replica_pass import node_sum

    tf = tensorflow
    leaves = np.random.default_rng(0).normal(0, 1e3, (16, 5)).astype(np.float32)
    specs = [tf.TensorSpec([5], tf.float32), tf.TensorSpec([], tf.int32)]
    one_pass = lambda k: [tf.gather(tf.constant(leaves), k), tf.cast(2 ** (k - start), tf.int32)]  # noqa: E731
    total, once_each = tf.function(lambda: node_sum(one_pass, start, size, specs, last_apart))()
    level = list(leaves[start : start + size])
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    np.testing.assert_array_equal(total, level[0])
    assert once_each == 2**size - 1
