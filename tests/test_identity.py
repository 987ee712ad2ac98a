"""One, two and four real worker processes, and three: the same run to the last bit."""

import numpy as np
import pytest

RUNS = (
    "plain",
    "adamw_ema",
    "mixed_bfloat16",
    "mixed_float16_infinity",
    "jit_compile",
    "steps_per_execution",
    "frozen",
    "class_weight",
    "keras_callbacks",
)
EVERYWHERE = (*RUNS, "by_hand_4", "dropout_masks", "evaluation")
SIX = ("six",)
# What a cluster of W workers runs, in one start.
LISTS = {
    1: (*EVERYWHERE, "by_hand_2", *SIX, "normalised_globally"),
    2: (*EVERYWHERE, "by_hand_2", *SIX, "equal_in_float64", "normalised_globally"),
    3: SIX,
    4: EVERYWHERE,
}
# What four workers run without --soak: on two cores they take turns.
FOUR = ("plain", "mixed_float16_infinity", "by_hand_4", "dropout_masks", "evaluation")


@pytest.fixture
def results(clusters, request):
    lists = LISTS if request.config.getoption("--soak") else {**LISTS, 4: FOUR}
    return lambda workers: clusters.run(workers, lists[workers])


@pytest.mark.parametrize("case", RUNS)
def test_two_and_four_workers_train_the_same_weights_as_one(results, case):
    one, two, four = (results(workers)[0].get(case) for workers in (1, 2, 4))
    assert one["sha256"] == two["sha256"]
    np.testing.assert_equal(two, one)  # the history, and the hash after each epoch; NaN is equal to NaN here
    if four or case in FOUR:
        np.testing.assert_equal(four, one)
    assert one["steps"] == (33 if case == "keras_callbacks" else 44)


def test_two_and_three_workers_train_six_logical_replicas_like_one(results):
    one, two, three = (results(workers)[0]["six"] for workers in (1, 2, 3))
    assert one == two == three


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("workers", [2, 4])
def test_after_each_epoch_all_workers_hold_the_same_bits(results, workers, case):
    if case not in results(workers)[0]:
        pytest.skip("on four workers with --soak")
    epochs = [worker[case]["epochs"] for worker in results(workers)]
    assert all(seen == epochs[0] for seen in epochs)
    assert len(set(epochs[0])) == len(epochs[0]) > 2


def test_the_runs_are_different_runs(results):
    same = {"plain", "steps_per_execution"}
    hashes = {case: results(1)[0][case]["sha256"] for case in RUNS}
    assert hashes["plain"] == hashes["steps_per_execution"]
    assert len({hashes[case] for case in RUNS if case not in same} | {hashes["plain"]}) == len(RUNS) - 1


def test_a_step_that_overflows_is_skipped_everywhere_and_leaves_no_trace_in_the_statistics(results):
    for workers in (1, 2, 4):
        run = results(workers)[0]["mixed_float16_infinity"]
        assert (run["steps"], run["updates"]) == (44, 40)  # one infinite image, seen once in each of 4 epochs
        assert np.isfinite(run["moving_mean"]).all()


@pytest.mark.parametrize(("workers", "logical_replicas"), [(1, 2), (2, 2), (1, 4), (2, 4), (4, 4)])
def test_total_losses_are_those_computed_by_hand(results, workers, logical_replicas):
    """loss = mean(x) A B + (A^2 + B^2) / 32: A = 1, B = 2 and mean(-1, 0, 1, 2) = 1/2 give 1 + 5/32 at first."""
    for worker in results(workers):
        losses = worker[f"by_hand_{logical_replicas}"]
        assert losses == pytest.approx([1.156250, 8.385638, 5.532262, -9.585484], abs=2e-6)


def test_dropout_masks_are_a_function_of_layer_step_and_logical_replica_alone(results):
    masks = results(1)[0]["dropout_masks"]
    assert masks == results(2)[0]["dropout_masks"] == results(4)[1]["dropout_masks"]
    flat = [tuple(mask) for layer in masks for step in layer for mask in step]
    assert len(flat) == 2 * 3 * 4
    assert len(set(flat)) == len(flat)  # they differ by layer, from step to step, and from k to k
    assert 0.3 < np.mean(flat) < 0.7


def test_evaluation_is_the_same_for_every_number_of_workers_and_set_size(results):
    """Sizes 1, 3 (fewer than four workers), 5, 8, 61, in batches of 8."""
    everyone = [worker["evaluation"] for workers in (1, 2, 4) for worker in results(workers)]
    assert all(seen == everyone[0] for seen in everyone)


def test_unordered_float64_training_on_two_workers_is_plain_keras_up_to_rounding(results, tensorflow):
    import cases

    for seen, expected in zip(results(2)[0]["equal_in_float64"], cases.equal_in_float64(), strict=True):
        np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-14)


def test_batch_normalisation_over_the_global_batch_is_plain_keras_on_one_and_two_workers(results, tensorflow):
    import cases

    losses, variables = cases.normalised_globally()
    for worker in (*results(1), *results(2)):
        seen = worker["normalised_globally"]
        np.testing.assert_allclose(seen[0], losses, rtol=1e-12)
        for values, expected in zip(seen[1], variables, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-12)
