"""Loss and gradients that are no finite numbers end a run, with a line that says where, and leave its good checkpoints."""

import re

import cases
import keras
import pytest

from app.callbacks import Skipped
from cluster import wishes


def trained(strategy, rate=0.1, nan_at=None, policy="float32", callbacks=(), steps_per_execution=1, infinite=(), **fit):
    """The steps that were made, and the line it ended with; example `nan_at` has a NaN, steps in `infinite` infinite images."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model = cases.cluster.Trainer(cases.network(), cases.BATCH, 4, seed=7)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(rate), loss, steps_per_execution=steps_per_execution)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = cases.examples()
    if nan_at is not None:
        x[nan_at, 3, 3] = float("nan")
    for step in infinite:
        x[(step - 1) * cases.BATCH] = float("inf")
    try:
        model.fit(cases.batches(x, y), steps_per_epoch=11, verbose=0, callbacks=list(callbacks), **fit)
    except wishes.NonFinite as error:
        return model.step, str(error)
    return model.step, None


@pytest.mark.parametrize(("replicas", "steps_per_execution"), [(1, 1), (2, 4)])
def test_a_nan_in_an_image_ends_training_at_its_step_and_names_the_first_gradient(devices, replicas, steps_per_execution):
    found = trained(devices(replicas), nan_at=6 * cases.BATCH + 17, steps_per_execution=steps_per_execution)
    assert found == (7, "step 7: the gradient of first/kernel is not finite")


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_exploding_rate_ends_training_at_the_step_after(devices, replicas):
    """The first update is rate times gradient: 1e38 times it leaves weights whose products are infinite."""
    step, line = trained(devices(replicas), rate=1e38)
    assert (step, line) == (2, "step 2: the gradient of first/kernel is not finite")


def test_a_loss_scale_skips_such_steps_and_they_are_counted_until_too_many_follow_one_another(devices):
    skipped = Skipped(3)
    assert trained(devices(1), policy="mixed_float16", infinite=(2, 3, 5, 8), callbacks=[skipped]) == (11, None)
    assert skipped.total == 4
    step, line = trained(devices(1), policy="mixed_float16", infinite=(2, 4, 5, 6, 8), callbacks=[Skipped(3)])
    assert (step, line.partition(",")[0]) == (6, "step 6: the loss scale has skipped 3 steps in a row")


class Poison(keras.callbacks.Callback):
    """Sets a weight to NaN after a step."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.step == self._step:
            self.model.model.weights[0].assign(self.model.model.weights[0] + float("nan"))


def test_weights_that_are_not_finite_are_no_checkpoint_and_the_one_before_is_kept_and_named(devices, tmp_path):
    from app import command_line
    from app.train import train

    flags = ["--dataset=synthetic:8x8x1:3:256", "--model=trivial", "--global_batch_size=32", "--logical_replicas=2"]
    flags += ["--shards=4", "--checkpoint_every_steps=3", "--keep_checkpoints=1", "--notensorboard"]
    config, _ = command_line.parse([*flags, f"--prepared_dir={tmp_path}/prepared", f"--run_dir={tmp_path}/run"])
    with pytest.raises(wishes.NonFinite) as raised:
        train(config, devices(1), [Poison(6)])
    kept = tmp_path / "run" / "checkpoints" / "step-00000003.npz"
    assert list(kept.parent.iterdir()) == [kept]
    line = str(raised.value)
    assert re.match(r"step 6: dense\w*/kernel is not finite; ", line)  # its ReLU gives 0 for it: loss and gradients are finite
    assert line.endswith(f"the last checkpoint is kept, but the same command goes on from {kept} to the same step")
