"""A Keras script on two real workers is watched: nothing of it changes, and its record is compared with one process's."""

import os
import shutil
import subprocess
import sys

import pytest

# Keras's own fit does not start under MultiWorkerMirroredStrategy (keras#20585); with these two methods it does.
SCRIPT = """
import os, sys
import cluster, keras, numpy as np, tensorflow as tf

class Repaired(keras.Model):
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        pass

    def make_train_function(self, force=False):
        def step(iterator):
            logs = self.distribute_strategy.run(self.train_step, (next(iterator),))
            return {name: self.distribute_strategy.reduce("MEAN", value, axis=None) for name, value in logs.items()}
        self.train_function = tf.function(step)

def train(strategy, path=None, same=False):
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 5)).astype("float32"), rng.integers(0, 3, 48)
    with strategy.scope():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(6, activation="relu")(inputs)
        model = (Repaired if strategy.num_replicas_in_sync > 1 else keras.Model)(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.optimizer.build(model.trainable_variables)
    if same:  # a worker trains the first half of its batches, or the second
        x, y = (np.repeat(a.reshape(2, 2, 12, *a.shape[1:])[:, :1], 2, 1).reshape(a.shape) for a in (x, y))
    data, callbacks = tf.data.Dataset.from_tensor_slices((x, y)).batch(24), []
    if path:
        data, recorder = cluster.watch(model, data, path + "/fingerprints.jsonl", keep=path + "/kept")
        callbacks = [recorder]
    history = model.fit(data, steps_per_epoch=2, callbacks=callbacks, verbose=0).history
    return history, [v.numpy().tolist() for v in model.variables]

if "TF_CONFIG" in os.environ:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    plain, watched = (train(strategy, path) for path in (None, sys.argv[1] + "/two"))
    print("untouched" if plain == watched else "CHANGED", flush=True)
    train(strategy, sys.argv[1] + "/same", same=strategy.cluster_resolver.task_id == 1)
    os._exit(0)
train(tf.distribute.get_strategy(), sys.argv[1] + "/one")
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Folders of fingerprints: of one process; of two workers; of two that read the same examples."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "script.py").write_text(SCRIPT)
    for name in ("one", "two", "same"):
        (folder / name).mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    outputs = []
    for command in ([], ["-m", "cluster.launcher", "--workers=2"]):
        command = [sys.executable, *command, str(folder / "script.py"), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    return folder, outputs[-1]


def test_a_script_on_two_workers_is_untouched_by_watch(records):
    assert records[1].count("untouched") == 2
    assert "CHANGED" not in records[1]


def test_two_workers_differ_from_one_process_by_rounding_or_by_reading_the_same_examples(records, devices):
    from app import rebuild
    from app.compare import compare, read
    from app.replay import NoState

    one, two, same = (read(str(records[0] / name)) for name in ("one", "two", "same"))
    finding = compare(one, two, lambda: rebuild.replay(one, devices(1)))
    assert [cause.number for cause in finding.causes] == [13], str(finding)
    with pytest.raises(NoState, match="cannot be opened without its script's own code: Could not locate class 'Repaired'"):
        rebuild.replay(two, devices(1))
    finding = compare(two, one, lambda: rebuild.replay(one, devices(1)))  # as the command does then
    assert [cause.number for cause in finding.causes] == [13], str(finding)
    finding = compare(same, one)
    assert (finding.step, finding.stage) == (1, "data"), str(finding)
    assert "in run A, all 2 workers read the same 12 examples, the first of run B's" in str(finding)


def test_a_record_without_that_of_another_worker_is_refused(records, tensorflow, tmp_path):
    from app.compare import read

    folder, _ = records
    shutil.copy(folder / "two" / "fingerprints.jsonl", tmp_path)
    with pytest.raises(ValueError, match="fingerprints.jsonl.worker-1 is missing: 2 workers trained"):
        read(str(tmp_path))
    with pytest.raises(ValueError, match="is worker 1's; name the chief's"):
        read(str(folder / "two" / "fingerprints.jsonl.worker-1"))
