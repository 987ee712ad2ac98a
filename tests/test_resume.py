"""Resumed equals uninterrupted, in one process: the trainer and its checkpoints."""

import cases
import keras
import pytest

from cluster import checkpoint
from cluster.fingerprint import run_sha256

STEPS, EPOCHS = cases.STEPS_PER_EPOCH, cases.EPOCHS


class Keep(keras.callbacks.Callback):
    """Takes the checkpoints at the steps asked for, as the last of `callbacks`, and puts states back; `ends` raises there."""

    def __init__(self, others, resume=None, at=(), ends=False):
        super().__init__()
        self.others, self.resume, self.at, self.ends, self.kept = others, resume, at, ends, {}

    def on_train_begin(self, logs=None):
        self.epoch = self.resume.epoch if self.resume else 0
        if self.resume:
            checkpoint.put_back_callbacks(self.resume, self.others)

    def on_train_batch_end(self, batch, logs=None):
        if self.model.step in self.at:
            self._keep(self.model.step, self.epoch, self.model.step - self.epoch * STEPS)

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1
        if f"epoch {self.epoch}" in self.at:
            self._keep(f"epoch {self.epoch}", self.epoch, 0)

    def _keep(self, name, epoch, in_epoch):
        self.kept[name] = checkpoint.take(self.model, epoch, in_epoch, self.others).to_bytes()
        if self.ends:
            raise KeyboardInterrupt


def trained(strategy, resume=None, at=(), steps_per_execution=1, ends=False, total_steps=None, policy="float32"):
    """Trains case 'keras_callbacks' of cases.py: (sha256, history, checkpoints taken, steps seen by a callback)."""
    if resume is not None:
        resume = checkpoint.from_bytes(resume)
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        model = cases.cluster.Trainer(cases.network(), cases.BATCH, 4, seed=7)
        optimizer = keras.optimizers.Adam(0.003, use_ema=True, ema_momentum=0.9, weight_decay=1e-3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    x, y = cases.examples()
    data = cases.batches(x, y).skip(resume.step if resume else 0)
    others = [
        keras.callbacks.History(),
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0.5),
    ]
    seen = []
    keep = Keep(others, resume, at, ends)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, float(logs["loss"]))))
    try:
        model.fit(
            data,
            steps_per_epoch=STEPS,
            epochs=EPOCHS,
            total_steps=total_steps,
            validation_data=(x[:70], y[:70]),
            callbacks=[*others, watch, keep],
            verbose=0,
            resume=resume,
        )
    except KeyboardInterrupt:
        return keep.kept
    finally:
        keras.config.set_dtype_policy("float32")
    return run_sha256(model, others[0].history), others[0].history, keep.kept, seen


@pytest.fixture(scope="module")
def whole(devices):
    return trained(devices(1), at=(1, 14, 21, "epoch 1", "epoch 3", "epoch 4"))


@pytest.mark.parametrize("at", [1, 14, 21, "epoch 1", "epoch 3", "epoch 4"])
def test_a_resumed_run_is_the_uninterrupted_one_also_on_another_number_of_devices(devices, whole, at):
    sha256, history, kept, seen = whole
    resumed = trained(devices(2 if at in (14, "epoch 3") else 1), resume=kept[at])
    assert resumed[0] == sha256
    assert resumed[1] == history
    assert resumed[3] == seen[len(seen) - len(resumed[3]) :]  # batch numbers and the epoch's running loss show no seam
    steps = {"epoch 1": 11, "epoch 3": 33, "epoch 4": 44}.get(at, at)
    assert len(resumed[3]) == STEPS * EPOCHS - steps
