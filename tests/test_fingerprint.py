"""Fingerprints: what they say is true, they cost nothing to the bits, and they are the same for any number of workers."""

import cases
import numpy as np
import pytest

import cluster

BATCH, LOGICAL, STEPS = 24, 4, 6


@pytest.fixture(scope="module")
def runs(tensorflow, devices, tmp_path_factory):
    """`cases.network` trained for two epochs of 6 steps, by name: (sha256, lines of the file, trainer)."""
    import keras

    from cluster import fingerprint

    def train(name, every=None, replicas=1, **compile):
        keras.utils.set_random_seed(1)
        with devices(replicas).scope():
            model = cluster.Trainer(cases.network(), BATCH, LOGICAL, seed=7)
            model.compile(
                keras.optimizers.SGD(0.1, 0.9, weight_decay=1e-3, global_clipnorm=0.5),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                **compile,
            )
        x, y = cases.examples()
        path = str(tmp_path_factory.mktemp(name) / "fingerprints.jsonl")
        history = model.fit(
            cases.batches(x, y),
            steps_per_epoch=STEPS,
            epochs=2,
            validation_data=(x[:35], y[:35]),
            fingerprints=fingerprint.Recorder(path, every) if every else None,
            verbose=0,
        ).history
        return fingerprint.run_sha256(model, history), fingerprint.read(path) if every else None, model

    return {
        "not recorded": train("none"),
        "every step": train("every", 1),
        "every seventh": train("seventh", 7, replicas=2, steps_per_execution=4),
    }


def test_recording_changes_no_bit_of_the_training(runs):
    """Neither does it on two replicas, of four steps an execution; and it says the same there."""
    plain, every, seventh = runs.values()
    assert plain[0] == every[0] == seventh[0]
    steps = [{line["step"]: line for line in lines[2:] if "step" in line} for _, lines, _ in (every, seventh)]
    assert [list(by_step) for by_step in steps] == [list(range(1, 13)), [1, 7]]
    assert seventh[1][1] == every[1][1]
    for step, line in steps[1].items():
        for kind in ("weights", "statistics"):
            assert line["workers"][kind] == 2 * steps[0][step]["workers"][kind]
        assert {**line, "workers": None} == {**steps[0][step], "workers": None}
    evaluations = [[line for line in lines if "evaluation_after" in line] for _, lines, _ in (every, seventh)]
    assert evaluations[0] == evaluations[1]
    assert [(line["evaluation_after"], line["examples"]) for line in evaluations[0]] == [(6, 35), (12, 35)]


def test_lines_say_what_the_step_did(runs):
    """Against NumPy: the projections are linear, the update is the difference of the weights, the batch is the data's."""
    from cluster import digest

    _, (header, before, *lines), model = runs["every step"]
    steps = [line for line in lines if "step" in line]
    assert header["weights"][0] == ["first/kernel", [3, 3, 1, 8], "float32"]
    assert header["gradients"] == list(range(7))
    assert steps[-1]["weights"] == digest.of([v.value for v in model.trainable_variables]).json()
    for line in steps:
        gradient, update, replicas = line["gradient"], line["update"], line["replicas"]
        mean = np.mean(replicas["gradient_projections"], 0)
        np.testing.assert_allclose(np.sum(gradient["projections"], 0), mean, rtol=1e-5, atol=1e-6)
        moved = np.subtract(line["weights"]["projections"], before["weights"]["projections"])
        np.testing.assert_allclose(update["projections"], moved, atol=1e-5)
        assert sum(sums[0][0] for sums in replicas["metric_sums"]) == pytest.approx(line["metric_sums"][0][0])
        assert float.fromhex(line["loss"]) == np.float32(line["metric_sums"][0][0] / BATCH)
        before = line
    x, y = cases.examples()
    assert steps[0]["x"] == digest.hex_digits(digest.of_examples(x[:BATCH], BATCH))
    assert steps[0]["y"] == digest.hex_digits(digest.of_examples((y[:BATCH],), BATCH))
    assert len(set(steps[0]["x"])) == BATCH


def test_a_digest_is_that_of_numpy(tensorflow):
    """The norm and the linearity of tensors of all sizes and types; the hash sees one bit, the place and the length."""
    from cluster import digest

    rng = np.random.default_rng(0)
    for size in (1, 1023, 1024, 1025, 70_000):  # a row, less, more, and more than a block of rows
        a, b = (tensorflow.constant(rng.normal(size=size).astype("float32")) for _ in range(2))
        of_a, of_b, of_sum = (
            digest.of([t]).json() for t in (a, b, tensorflow.cast(a, "float64") + tensorflow.cast(b, "float64"))
        )
        assert of_a["norm"][0] == pytest.approx(np.linalg.norm(a.numpy().astype("float64")), rel=1e-12)
        both = np.add(of_a["projections"], of_b["projections"])
        np.testing.assert_allclose(of_sum["projections"], both, rtol=1e-9, atol=1e-9)
        flipped = a.numpy()
        flipped.view("int32")[-1] ^= 1
        assert digest.of([tensorflow.constant(flipped)]).json()["hash"] != of_a["hash"]
    ones = digest.of([tensorflow.ones([n]) for n in (1000, 70_000)]).json()["projections"]
    assert np.abs(ones).max() < 5 * np.sqrt(70_000)  # the signs are balanced
    a = rng.normal(size=3000).astype("float32")
    texts = [a, a[::-1], a[:-1], np.append(a, np.float32(0)), -a, a.astype("float64"), a.astype("float16")]
    found = digest.of([tensorflow.constant(t) for t in [*texts, np.arange(5), np.int64([2**62, -1])]]).json()
    assert len(set(found["hash"])) == len(texts) + 2
    alone = [digest.of([tensorflow.constant(t)]).json()["hash"][0] for t in texts]
    assert found["hash"][: len(texts)] == alone  # a tensor's digest does not depend on its company
