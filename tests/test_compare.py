"""Runs that are broken in one way each: compare names the step, the stage and the cause; sound runs have none."""

import dataclasses

import numpy as np
import pytest

SOUND = {"normalised": True, "dropped": True}
BARE = {"normalised": False, "dropped": False}


@pytest.fixture(scope="module")
def sound(tensorflow, devices):
    """For a kind of network: (the sound run's record, its replay), made once."""
    import broken

    made = {}

    def of(kind):
        key = tuple(sorted(kind.items()))
        if key not in made:
            made[key] = broken.run(devices(1), "A", **kind), broken.replay(devices(1), **kind)
        return made[key]

    return of


@pytest.fixture
def found(sound, devices):
    """Breaks a run of this kind and compares the sound one with it."""
    import broken

    from app.compare import compare

    def find(kind=SOUND, replicas=1, **how):
        a, replay = sound(kind)
        b = broken.run(devices(replicas), "B", **{**kind, **how})
        find.mirrored = lambda: compare(b, a, replay)
        return compare(a, b, replay)

    return find


def expect(finding, step, stage, cause, text):
    assert (finding.step, finding.stage) == (step, stage), str(finding)
    assert finding.causes, str(finding)
    assert finding.causes[0].number == cause, str(finding)
    assert text in finding.causes[0].evidence, str(finding)
    assert f"cause: {finding.causes[0].evidence}" in str(finding).replace(f"{_name(cause)}: ", "").replace("in run A, ", "")


def expect_mirrored(finding, step, stage, cause, text):
    """The broken run is run A."""
    expect(finding, step, stage, cause, text)
    assert {found.run for found in finding.causes} == {"A"}, str(finding)
    assert f"{_name(cause)}: in run A, {finding.causes[0].evidence}" in str(finding)


def _name(cause):
    from app.hypotheses import CAUSES

    return CAUSES[cause]


def test_sound_runs_on_one_and_two_replicas_are_the_same(found):
    finding = found(replicas=2)
    assert (finding.step, finding.stage, finding.causes, finding.same) == (None, None, (), 3)
    assert "the same: 3 recorded steps" in str(finding)


@pytest.mark.parametrize(
    ("factor", "cause", "text"),
    [
        (2, 1, "summed over 2 workers, not averaged"),
        (0.5, 1, "divided by the 2 workers twice"),
        (1024.0, 9, "the loss scale of 1024 is left in"),
    ],
)
def test_gradients_summed_averaged_twice_or_with_the_loss_scale(found, factor, cause, text):
    import broken

    expect(found(fault=broken.gradients_times(factor)), 1, "reduction", cause, text)
    expect_mirrored(found.mirrored(), 1, "reduction", cause, text)


def _in_batches(change):
    """X and Y with every batch of 24 changed."""
    import broken

    x, y = (np.concatenate([change(batch) for batch in a.reshape(-1, 24, *a.shape[1:])]) for a in (broken.X, broken.Y))
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("change", "cause", "text"),
    [
        (lambda batch: np.concatenate([batch[:12], batch[:12]]), 2, "all 2 workers read the same 12 examples"),
        (lambda batch: np.concatenate([batch[:20], batch[:4]]), 2, "4 of the 24 examples in run B's batch are there a second"),
        (lambda batch: batch[::-1], 3, "the same 24 examples in another order"),
    ],
)
def test_same_examples_on_all_workers_overlap_and_order(found, change, cause, text):
    finding = found(**_in_batches(change))
    expect(finding, 1, "data", cause, text)
    mirrored = found.mirrored()
    if cause == 2:
        expect_mirrored(mirrored, 1, "data", cause, text.replace("run B's", "run A's"))
    else:  # neither order is the proper one
        assert mirrored.causes == finding.causes


def test_examples_missing_and_batches_in_another_order(found):
    import broken

    again = [np.concatenate([a[:24], a[:24], a[48:]]) for a in (broken.X, broken.Y)]  # step 2 reads what step 1 has read
    expect(found(x=again[0], y=again[1]), 2, "data", 2, "24 of run A's never")
    expect_mirrored(found.mirrored(), 2, "data", 2, "run A read 24 a second time, and 24 of run B's never")
    turned = [np.concatenate([a[24:72], a[:24], a[72:]]) for a in (broken.X, broken.Y)]
    expect(found(x=turned[0], y=turned[1]), 1, "data", 3, "steps 1 to 3 hold the same 72 examples in another order")


def test_other_pixels_have_no_cause_where_no_augmentation_is_known(found):
    import broken

    finding = found(x=broken.X * 1.5)
    assert (finding.step, finding.stage, finding.causes) == (1, "pixels", ())
    assert "cause: unknown" in str(finding)


def test_other_dropout_masks(found):
    import broken

    same = found(fault=broken.keyed(lambda step, k: (step, k % 2)))
    expect(same, 1, "loss", 4, "all 2 workers draw the dropout masks of worker 0")
    expect_mirrored(found.mirrored(), 1, "loss", 4, "all 2 workers draw the dropout masks of worker 0")
    seed = found(seed=8)
    expect(seed, 1, "configuration", 4, "the dropout masks are those of seed 8, not 7")
    assert any("seed is 7 in run A and 8 in run B" in note for note in seed.notes)


def test_batch_normalisation_over_another_group(found):
    kind = {"normalised": True, "dropped": False}
    expect(found(kind, logical=1), 1, "configuration", 5, "those of the whole batch, not of 6 (K = 4)")


def test_batch_normalisation_by_logical_replica_and_over_the_global_batch(found):
    """Each of the two definitions is what explains the other."""
    kind = {"normalised": True, "dropped": False, "identical": False}
    by_replica, over_all = ({**kind, "batch_norm": batch_norm} for batch_norm in ("replica", "global"))
    finding = found(by_replica, replicas=2, batch_norm="global")
    expect(finding, 1, "configuration", 5, "those of the whole batch, not of 6 (K = 4)")
    assert "batch_norm is 'replica' in run A and 'global' in run B" in str(finding)
    assert len(finding.causes) == 1, str(finding)
    finding = found(over_all, replicas=2, batch_norm="replica")
    expect(finding, 1, "configuration", 5, "those of 6 examples (K = 4), not of the whole batch")


def test_without_clipping_no_fault_is_taken_for_clipping(found):
    """Each of two workers normalises its own half, as K = 2 does."""
    kind = {"normalised": True, "dropped": False, "logical": 1, "clip": None}
    finding = found(kind, logical=2)
    assert {cause.number for cause in finding.causes} == {5}, str(finding)


def test_moving_statistics_that_drift_apart(found, monkeypatch):
    import broken

    monkeypatch.setattr("cluster.drift.check", lambda *_: None)  # which would end our own run there
    finding = found(replicas=2, fault=broken.own_statistics)
    expect(finding, 1, "statistics", 6, "each of 2 workers keeps the moving statistics of its own examples")
    assert any("run B's workers hold different values" in note and "replica 1 has" in note for note in finding.notes)
    finding = found.mirrored()
    expect_mirrored(finding, 1, "statistics", 6, "each of 2 workers keeps the moving statistics of its own examples")
    assert any("run A's workers hold different values" in note for note in finding.notes)


def test_clipping_before_the_reduction(found):
    import broken

    expect(found(BARE, fault=broken.clipped_before), 1, "gradient", 7, "clips its own mean gradient, before the reduction")
    expect_mirrored(found.mirrored(), 1, "gradient", 7, "clips its own mean gradient, before the reduction")


def test_optimizer_stepped_twice(found):
    import broken

    expect(found(fault=broken.stepped(2)), 1, "update", 8, "applied 2 times a step with the same gradient")
    expect_mirrored(found.mirrored(), 1, "update", 8, "applied 2 times a step with the same gradient")


def test_other_learning_rate_and_weight_decay(found):
    expect(found(rate=0.2), 1, "update", 9, "the learning rate is 2 times as large, as recorded: 0.2 for 0.1")
    expect_mirrored(found.mirrored(), 1, "update", 9, "the learning rate is 2 times as large, as recorded: 0.2 for 0.1")
    expect(found(decay=0.02), 1, "update", 9, "the weight decay is 2 times as large")


def test_a_rate_that_the_records_tell_comes_before_what_would_fit_as_well(sound, devices):
    """Without decay and clipping SGD makes the same of twice the rate and of twice the gradient, which `watch` does not see."""
    import broken

    from app.compare import compare

    kind = {"decay": 0.0, "clip": None}
    a, replay = sound(kind)
    b = broken.run(devices(1), "B", **kind, rate=0.2)
    runs = [
        dataclasses.replace(run, lines=[{k: v for k, v in line.items() if k != "gradient"} for line in run.lines])
        for run in (a, b)
    ]
    finding = compare(*runs, replay)
    expect(finding, 1, "update", 9, "the learning rate is 2 times as large, as recorded: 0.2 for 0.1")
    assert any("summed over 2 workers" in cause.evidence for cause in finding.causes), str(finding)


def test_other_initial_weights_and_other_networks(found):
    expect(found(weights_seed=2), 0, "initial weights", 11, "start from other numbers")
    expect(found(normalised=False), 0, "configuration", 11, "statistics is")


def test_rounding_alone(found):
    """Three logical replicas on each of two replicas: a ring adds six in another order than the tree."""
    finding = found({"normalised": True, "dropped": False, "logical": 6}, replicas=2, identical=False)
    expect(finding, 1, "configuration", 13, "--identical (the default)")
    assert len(finding.causes) == 1


def test_a_fault_in_a_later_step_is_found_from_the_state_before_it(found):
    import broken

    finding = found(fault=broken.keyed(lambda step, k: (step, broken.tf.where(step < 2, k, k % 2))))
    expect(finding, 3, "loss", 4, "all 2 workers draw the dropout masks of worker 0")
    assert finding.same == 2
    expect_mirrored(found.mirrored(), 3, "loss", 4, "all 2 workers draw the dropout masks of worker 0")


def test_a_fault_that_no_suspect_reproduces_is_unknown(found):
    import broken

    finding = found(fault=broken.gradients_times(1.37))
    for either in (finding, found.mirrored()):
        assert (either.step, either.stage, either.causes) == (1, "reduction", ())
        assert "cause: unknown" in str(either)


def test_steps_between_the_recorded_ones_are_not_guessed_at(sound, devices):
    import broken

    from app.compare import compare

    a, replay = sound(SOUND)
    second = broken.keyed(lambda step, k: (step, broken.tf.where(step == 1, k % 2, k)))  # step 2 alone is broken
    b = broken.run(devices(1), "B", every=3, fault=second)
    finding = compare(a, b, replay)
    assert (finding.step, finding.causes) == (3, ())
    assert any("--fingerprint_every=1" in note for note in finding.notes)


@pytest.fixture(scope="module")
def evaluated(tensorflow, devices):
    """A run with 35 held-out examples, its replay, and the lines of evaluations of others with the same weights."""
    import broken

    x, y = broken.X[:35], broken.Y[:35]
    record = lambda held_out: broken.run(devices(1), steps=1, held_out=held_out, **BARE)  # noqa: E731
    return record((x, y)), broken.replay(devices(1), evaluation=(x, y), **BARE), record


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: np.concatenate([x, x]), "every example counts 2 times: 70 for 35"),
        (lambda x: x[:24], "the last 11 of 35 examples are left out"),
        (lambda x: x[18:], "only worker 1 of 2 is counted: 17 of 35 examples"),
    ],
)
def test_evaluations_that_count_twice_or_leave_out(evaluated, wrong, text):
    import broken

    from app.compare import compare

    a, replay, record = evaluated
    b = record((wrong(broken.X[:35]), wrong(broken.Y[:35])))
    expect(compare(a, b, replay), 1, "evaluation", 12, text)
    expect_mirrored(compare(b, a, replay), 1, "evaluation", 12, text)


def test_an_evaluation_that_weights_a_smaller_batch_like_the_others(evaluated):
    import broken

    from app.compare import Run, compare

    a, replay, record = evaluated
    parts = [record((broken.X[s], broken.Y[s])).lines[-1]["metrics"] for s in (slice(24), slice(24, 35))]
    mean = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    b = Run("B", [*a.lines[:-1], {**a.lines[-1], "metrics": mean}])
    expect(compare(a, b, replay), 1, "evaluation", 12, "mean over batches, of which the last has 11 examples")
    expect_mirrored(compare(b, a, replay), 1, "evaluation", 12, "mean over batches, of which the last has 11 examples")


def test_asynchronous_runs_part_because_gradients_are_applied_in_the_order_of_their_arrival(sound, devices):
    import broken

    from app.compare import compare

    a, replay = sound(SOUND)
    b = broken.run(devices(1), "B", **SOUND, fault=broken.gradients_times(2.0))
    asynchronous = [dataclasses.replace(run, config={"asynchronous": True}) for run in (a, b)]
    finding = compare(*asynchronous, replay)
    assert (finding.step, finding.causes[0].number) == (1, 14)
    assert "run A and run B applied gradients in the order in which they came" in str(finding)


def test_what_would_remove_rounding_is_told_from_what_the_runs_ran_with():
    from app.compare import Run
    from app.trials import remedy

    machine = {"architecture": "x86_64", "CPU features": ["avx2", "fma"], "TF_ENABLE_ONEDNN_OPTS": "1"}
    config = {"intra_op_threads": 1, "versions": {"tensorflow": "2.21.0"}, "machine": machine}

    def told(**other):
        return remedy(Run("a", [{}], config), Run("b", [{}], {**config, **other}))

    assert told(intra_op_threads=2) == "--intra_op_threads is 1 and 2; give both the same"
    of_one_kind = "use versions, processors and settings of one kind"
    assert told(versions={"tensorflow": "2.22.0"}) == f"tensorflow 2.21.0 and 2.22.0: {of_one_kind}"
    other = {**machine, "CPU features": ["avx2", "avx512f", "fma"], "TF_ENABLE_ONEDNN_OPTS": ""}
    assert told(machine=other) == f"CPU features no more and avx512f; TF_ENABLE_ONEDNN_OPTS 1 and unset: {of_one_kind}"
    assert told().startswith("the same processor, TensorFlow and --intra_op_threads")
