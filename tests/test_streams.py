"""The order of examples: a function of the run, whatever the number of workers."""

import os
import resource

import numpy as np
import pytest

SETS = [  # examples, shards, K
    ("synthetic:6x6x1:3:101", 8, 4),
    ("synthetic:6x6x1:3:64", 12, 6),
    ("synthetic:6x6x1:3:7", 4, 4),
]
EACH = 3  # examples of a logical replica in a step


@pytest.fixture(scope="module")
def prepared(tensorflow, tmp_path_factory):
    from app import prepare

    folder = tmp_path_factory.mktemp("prepared")
    return lambda dataset, shards: prepare.prepare(dataset, "", str(folder), shards, say=lambda *_, **__: None)


@pytest.fixture(scope="module")
def streams(prepared):
    from app import preprocessing
    from app.streams import TrainingStreams

    def make(dataset, shards, logical_replicas, seed=5, first_step=0, buffer=16):
        manifest = prepared(dataset, shards)
        shape = manifest.image_shape
        treatment = preprocessing.make("cifar", shape, 0.5, 0.25)
        batch = EACH * logical_replicas
        return TrainingStreams(manifest, treatment, logical_replicas, batch, seed, first_step, buffer)

    return make


def identities(made, workers, steps):
    """By step, then by logical replica: [(epoch, shard, record)], gathered from the pipelines of all workers."""
    replicas = len(made._shards)
    share = replicas // workers
    by_step = [[] for _ in range(steps)]
    for worker in range(workers):
        dataset = made.identified(worker * share, (worker + 1) * share, EACH).take(steps * share * EACH)
        seen = [(int(e), int(s), int(r)) for e, s, r, _ in dataset]
        for place in range(0, len(seen), EACH):
            by_step[place // (share * EACH)].append(seen[place : place + EACH])
    return by_step


@pytest.mark.parametrize("case", SETS)
def test_which_logical_replica_has_which_examples_of_a_step_is_the_same_for_every_number_of_workers(streams, case):
    one = identities(streams(*case), 1, steps=40)
    for workers in (2, case[2]):
        assert identities(streams(*case), workers, steps=40) == one


@pytest.mark.parametrize("case", SETS)
def test_each_pass_of_a_stream_sees_each_of_its_examples_once_in_another_order(streams, prepared, case):
    made = streams(*case)
    manifest = prepared(case[0], case[1])
    all_seen = set()
    for k, shards in enumerate(made._shards):
        own = {(s, r) for s in shards for r in range(manifest.train.shards[s].examples)}
        seen = [(int(e), (int(s), int(r))) for e, s, r, _ in made.identified(k, k + 1, EACH).take(3 * len(own))]
        passes = [[i for e, i in seen if e == epoch] for epoch in range(3)]
        assert all(sorted(one) == sorted(own) for one in passes)
        assert len(own) < 4 or len({tuple(one) for one in passes}) == 3
        all_seen |= own
    assert len(all_seen) == manifest.train.examples == int(case[0].rpartition(":")[2])


@pytest.mark.parametrize("case", SETS)
@pytest.mark.parametrize("bad", [(), ((0, 1), (3, 0))])
def test_the_batch_of_any_step_and_logical_replica_is_found_by_its_place(streams, prepared, tensorflow, case, bad):
    """Blocks of 5, so that batches of 3 straddle blocks and epochs."""
    import dataclasses

    made = streams(*case, buffer=5)
    bad = bad if len(made._shards[0]) > 1 else ()
    made._manifest = dataclasses.replace(made._manifest, train=dataclasses.replace(made._manifest.train, bad=bad))
    made = type(made)(made._manifest, made._preprocessing, case[2], EACH * case[2], seed=5, shuffle_buffer=5)
    at = tensorflow.function(lambda step, k: made.batch_at(step, k, with_ids=True))
    for k in (0, case[2] - 1):
        read = list(made.examples(k, k + 1, EACH, with_ids=True).batch(EACH).take(60))
        for step in (0, 1, 2, 3, 7, 20, 59):
            found = at(np.int64(step), np.int64(k))
            tensorflow.nest.map_structure(np.testing.assert_array_equal, found, read[step])


@pytest.mark.parametrize("size", [61, 3])
@pytest.mark.parametrize("bad", [(), ((0, 1),)])
def test_the_batches_of_an_evaluation_are_found_by_their_place(prepared, tensorflow, size, bad):
    import dataclasses

    from app import preprocessing
    from app.streams import EvaluationStreams

    manifest = prepared(f"synthetic:4x4x1:3:{4 * size}", 1)
    manifest = dataclasses.replace(manifest, test=dataclasses.replace(manifest.test, bad=bad))
    made = EvaluationStreams(manifest, preprocessing.make("none", manifest.image_shape), 4, 4 * EACH)
    at = tensorflow.function(made.batch_at)
    for k in range(4):
        for step, batch in enumerate(made.examples(k, k + 1, EACH).batch(EACH).take(2 * made.steps)):
            tensorflow.nest.map_structure(np.testing.assert_array_equal, at(np.int64(step), np.int64(k)), batch)


@pytest.mark.parametrize("case", SETS)
def test_a_step_is_reached_by_skipping_as_by_reading(streams, case):
    """Step 77 lies many epochs on, in the middle of one."""
    read = identities(streams(*case), 1, steps=85)
    assert identities(streams(*case, first_step=77), 1, steps=8) == read[77:]


def test_another_seed_is_another_order(streams):
    one, two = (identities(streams(*SETS[0], seed=seed), 1, steps=10) for seed in (5, 6))
    assert one != two


def test_pixels_are_the_same_for_every_number_of_workers_and_differ_between_epochs(streams):
    made = streams(*SETS[0])
    replicas = SETS[0][2]

    def pixels(workers, steps):
        share = replicas // workers
        parts = [
            [image.numpy() for image, _ in made.examples(w * share, (w + 1) * share, EACH).take(steps * share * EACH)]
            for w in range(workers)
        ]
        shaped = [np.reshape(part, (steps, share, EACH, 6, 6, 1)) for part in parts]
        return np.concatenate(shaped, axis=1)

    one = pixels(1, 12)
    for workers in (2, 4):
        np.testing.assert_array_equal(pixels(workers, 12), one)
    ids = identities(made, 1, 12)
    first = {i[1:]: one[t, k, j] for t in range(12) for k in range(replicas) for j, i in enumerate(ids[t][k]) if i[0] == 0}
    again = [
        (first[i[1:]], one[t, k, j])
        for t in range(12)
        for k in range(replicas)
        for j, i in enumerate(ids[t][k])
        if i[0] == 1 and i[1:] in first
    ]
    assert len(again) > 20
    assert sum(not np.array_equal(a, b) for a, b in again) > 0.8 * len(again)  # of 81 crops and flips few coincide


def test_a_worker_reads_its_own_files_alone(streams, prepared, tmp_path):
    """All other training files are taken away."""
    import dataclasses
    import shutil

    made = streams(*SETS[0])
    manifest = prepared(*SETS[0][:2])
    expected = identities(made, 2, steps=30)
    for worker in range(2):
        folder = tmp_path / str(worker)
        shutil.copytree(manifest.directory, folder)
        own = made.shards_of(worker, 2)
        for index, shard in enumerate(manifest.train.shards):
            if index not in own:
                os.remove(folder / shard.path)
        made._manifest = dataclasses.replace(manifest, directory=str(folder))
        dataset = made.identified(worker * 2, worker * 2 + 2, EACH).take(30 * 2 * EACH)
        seen = [(int(e), int(s), int(r)) for e, s, r, _ in dataset]
        assert seen == [i for step in expected for k in (2 * worker, 2 * worker + 1) for i in step[k]]
    made._manifest = manifest


def test_records_that_are_called_bad_are_left_out_everywhere(streams, prepared):
    import dataclasses

    from app import preprocessing
    from app.streams import TrainingStreams

    manifest = prepared(*SETS[0][:2])
    bad = ((0, 1), (3, 2), (3, 4))
    manifest = dataclasses.replace(manifest, train=dataclasses.replace(manifest.train, bad=bad))
    treatment = preprocessing.make("none", manifest.image_shape)
    made = TrainingStreams(manifest, treatment, 4, 4 * EACH, seed=5)
    one = identities(made, 1, steps=30)
    assert identities(made, 2, steps=30) == one
    seen = {i[1:] for step in one for part in step for i in part}
    assert not seen & set(bad)
    assert len(seen) == 101 - 3
    later = TrainingStreams(manifest, treatment, 4, 4 * EACH, seed=5, first_step=20)
    assert identities(later, 1, steps=10) == one[20:]


def test_k_that_does_not_divide_the_shards_is_one_line_with_what_would(streams):
    from app.streams import ShardsError

    with pytest.raises(ShardsError, match=r"out of 1, 2, 4, 8.*--shards=3"):
        streams("synthetic:6x6x1:3:101", 8, 3)


@pytest.mark.parametrize("size", [961, 1, 3, 5, 24])
def test_an_evaluation_has_every_example_once_for_every_number_of_workers_and_size(prepared, size):
    """Also fewer examples than workers, and fewer files than workers."""
    from app import preprocessing
    from app.sources import open_source
    from app.streams import EvaluationStreams

    name = f"synthetic:4x4x1:3:{4 * size}"  # a quarter of which is held out
    manifest, source = prepared(name, 1), open_source(name, "")
    assert len(source.test) == manifest.test.examples == size
    assert len(manifest.test.shards) == 1
    made = EvaluationStreams(manifest, preprocessing.make("none", manifest.image_shape), 4, 4 * EACH)
    for workers in (1, 2, 4):
        share = 4 // workers
        seen = []
        for worker in range(workers):
            steps = [[] for _ in range(share)]
            dataset = made.examples(worker * share, (worker + 1) * share, EACH).take(made.steps * share * EACH)
            for place, ((image, label), valid) in enumerate(dataset):
                steps[place // EACH % share].append((image.numpy(), int(label), bool(valid)))
            for part in steps:
                valid = [v for _, _, v in part]
                assert valid == sorted(valid, reverse=True)  # padding comes last
                seen += [(image, label) for image, label, v in part if v]
        assert len(seen) == size
        for i, (image, label) in enumerate(seen):  # in input order
            np.testing.assert_allclose(image, source.test[i].image / 255, atol=1e-6)
            assert label == source.test[i].label


def test_memory_does_not_grow_over_twenty_epochs(streams):
    made = streams("synthetic:6x6x1:3:1003", 8, 4, buffer=64)
    rows = iter(made.examples(0, 4, EACH).batch(4 * EACH))

    def epochs(count):
        for _ in range(count * made.steps):
            next(rows)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    start = epochs(3)
    assert epochs(20) - start < 20_000  # KiB


def test_evaluation_callbacks_see_the_steps_asked_for_and_count_the_whole_set(streams, prepared, devices):
    import keras

    import cluster
    from app import preprocessing
    from app.callbacks import EvaluateAt
    from app.streams import EvaluationStreams

    manifest = prepared("synthetic:8x8x1:3:96", 8)
    made = streams("synthetic:8x8x1:3:96", 8, 4)
    held_out = EvaluationStreams(manifest, preprocessing.make("cifar", (8, 8, 1), 0.5, 0.25), 4, 4 * EACH)
    seen = {}
    for replicas in (1, 2):
        keras.utils.set_random_seed(1)
        with devices(replicas).scope():
            layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
            model = cluster.Trainer(keras.Sequential(layers), 4 * EACH, 4)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        said = []
        callback = EvaluateAt(held_out, every=5, steps=[3], at_start=True, say=lambda text, **_: said.append(text))
        history = model.fit(made, epochs=2, validation_data=held_out, callbacks=[callback], verbose=0).history
        assert [step for step, _ in callback.seen] == [0, 3, 5, 10, 15]
        assert made.steps == 8
        assert model.examples_evaluated == 24
        assert all("[24 examples]" in line for line in said)
        seen[replicas] = history, callback.seen
    assert seen[1] == seen[2]
    losses = [logs["loss"] for _, logs in seen[1][1]]
    assert len(set(losses)) == len(losses)


def test_without_a_learning_rate_evaluation_is_constant(streams, prepared, devices):
    import keras

    import cluster
    from app import preprocessing
    from app.streams import EvaluationStreams

    manifest = prepared("synthetic:8x8x1:3:96", 8)
    held_out = EvaluationStreams(manifest, preprocessing.make("cifar", (8, 8, 1), 0.5, 0.25), 4, 4 * EACH)
    with devices(2).scope():
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        model = cluster.Trainer(keras.Sequential(layers), 4 * EACH, 4)
        model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    made = streams("synthetic:8x8x1:3:96", 8, 4)
    history = model.fit(made, epochs=3, validation_data=held_out, verbose=0).history
    assert len(set(history["val_loss"])) == 1
