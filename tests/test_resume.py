"""Resumed equals uninterrupted, in one process: the trainer and its checkpoints."""

import io
import pickle
import zipfile

import cases
import keras
import numpy as np
import pytest

from cluster import checkpoint, wishes
from cluster.fingerprint import run_sha256

STEPS, EPOCHS = cases.STEPS_PER_EPOCH, cases.EPOCHS


class Keep(keras.callbacks.Callback):
    """Takes the checkpoints at the steps asked for, as the last of `callbacks`, and puts states back."""

    def __init__(self, others, resume=None, at=()):
        super().__init__()
        self.others, self.resume, self.at, self.kept = others, resume, at, {}

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


class StopAt(keras.callbacks.Callback):
    """This worker wishes to stop after a step, or in the first evaluation after it."""

    def __init__(self, step, in_evaluation=False):
        super().__init__()
        self._step, self._in_evaluation = step, in_evaluation

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.step + 1 == self._step and not self._in_evaluation:
            wishes.mine[wishes.STOP] = 1

    def on_train_batch_end(self, batch, logs=None):
        if self.model.wished[wishes.STOP]:
            raise wishes.Stopped

    def on_test_batch_end(self, batch, logs=None):
        if self.model.step >= self._step and self._in_evaluation:
            wishes.mine[wishes.STOP] = 1


class CountEvaluations(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.after = []

    def on_test_end(self, logs=None):
        self.after.append(self.model.step)


def compiled(strategy, steps_per_execution=1, policy="float32", optimizer=None, network=cases.network):
    """A trainer around the network of cases.py; by default Adam with averaged weights."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            model = cases.cluster.Trainer(network(), cases.BATCH, 4, seed=7)
            optimizer = (
                optimizer() if optimizer else keras.optimizers.Adam(0.003, use_ema=True, ema_momentum=0.9, weight_decay=1e-3)
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def trained(strategy, resume=None, at=(), stop=None, total_steps=None, **how):
    """Trains `compiled(strategy, **how)`: (sha256, history, checkpoints taken, steps seen by a callback, evaluations).

    If `stop` ends it, the checkpoint of that.
    """
    if resume is not None:
        resume = checkpoint.from_bytes(resume)
    model = compiled(strategy, **how)
    x, y = cases.examples()
    others = [
        keras.callbacks.History(),
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0.5),
    ]
    seen, evaluations, keep = [], CountEvaluations(), Keep(others, resume, at)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, float(logs["loss"]))))
    try:
        with wishes.attended():
            model.fit(
                cases.batches(x, y).skip(resume.step if resume else 0),
                steps_per_epoch=STEPS,
                epochs=EPOCHS,
                total_steps=total_steps,
                validation_data=(x[:70], y[:70]),
                callbacks=[*others, watch, evaluations, keep, *([stop] if stop else [])],
                verbose=0,
                resume=resume,
            )
    except wishes.Stopped:
        return checkpoint.take(model, keep.epoch, model.step - keep.epoch * STEPS, others).to_bytes(), evaluations.after
    return run_sha256(model, others[0].history), others[0].history, keep.kept, seen, evaluations.after


@pytest.fixture(scope="module")
def whole(devices):
    return trained(devices(1), at=(1, 14, 21, "epoch 1", "epoch 3", "epoch 4"))


SOAK = pytest.mark.soak


@pytest.mark.parametrize("at", [pytest.param(1, marks=SOAK), 14, pytest.param(21, marks=SOAK), "epoch 1", "epoch 3", "epoch 4"])
def test_a_resumed_run_is_the_uninterrupted_one_also_on_another_number_of_devices(devices, whole, at):
    sha256, history, kept, seen, _ = whole
    resumed = trained(devices(2 if at in (14, "epoch 3") else 1), resume=kept[at])
    assert resumed[0] == sha256
    assert resumed[1] == history
    assert resumed[3] == seen[len(seen) - len(resumed[3]) :]  # batch numbers and the epoch's running loss show no seam
    steps = {"epoch 1": 11, "epoch 3": 33, "epoch 4": 44}.get(at, at)
    assert len(resumed[3]) == STEPS * EPOCHS - steps


def test_a_run_goes_on_with_other_steps_per_execution(devices, whole):
    sha256, history, kept, *_ = whole
    assert trained(devices(1), resume=kept[21], steps_per_execution=4)[:2] == (sha256, history)
    kept = trained(devices(1), at=(19,), steps_per_execution=4, total_steps=20)[2]
    assert trained(devices(1), resume=kept[19])[:2] == (sha256, history)


@pytest.mark.parametrize(
    ("step", "in_evaluation", "steps_per_execution", "evaluated"),
    [
        (22, True, 1, [11]),  # in the evaluation of the second epoch
        pytest.param(22, False, 1, [11], marks=SOAK),  # after that epoch's last step, before its evaluation
        (44, False, 1, [11, 22, 33]),  # after the last step of the run
        pytest.param(44, True, 4, [11, 22, 33], marks=SOAK),
    ],
)
def test_a_run_stopped_at_an_epochs_end_evaluates_it_once(devices, whole, step, in_evaluation, steps_per_execution, evaluated):
    sha256, history, *_ = whole
    kept, before = trained(devices(1), stop=StopAt(step, in_evaluation), steps_per_execution=steps_per_execution)
    state = checkpoint.from_bytes(kept)
    assert (state.step, state.epoch, state.in_epoch) == (step, step // STEPS - 1, STEPS)
    resumed = trained(devices(1), resume=kept)
    assert resumed[:2] == (sha256, history)
    assert (before, resumed[4]) == (evaluated, [11, 22, 33, 44][len(evaluated) :])


def test_a_run_of_so_many_steps_that_is_stopped_after_the_last_goes_on_with_its_evaluation(devices):
    whole = trained(devices(1), total_steps=26)
    kept, _ = trained(devices(1), stop=StopAt(26), total_steps=26)
    assert checkpoint.from_bytes(kept).facts["stopped"]
    resumed = trained(devices(1), resume=kept, total_steps=26)
    assert resumed[:2] == whole[:2]
    assert (resumed[3], resumed[4]) == ([], [26])  # its evaluation was missing, no step


def test_a_wish_ends_with_its_training(devices):
    trained(devices(1), stop=StopAt(1))
    assert wishes.mine == [0, 0]


# ---- what is in a checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_a_checkpoint_in_half_precision_is_put_back_bit_by_bit(devices, policy):
    """bfloat16: weights and the optimizer's variables too. mixed_float16: the dynamic loss scale and its counter."""
    made = []

    def scaled():
        inner = keras.optimizers.SGD(0.1, 0.9)
        made.append(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3))
        return made[-1]

    how = {"policy": policy, "optimizer": scaled if policy == "mixed_float16" else None}
    found = trained(devices(1), at=(5,), total_steps=12, **how)
    state = checkpoint.from_bytes(found[2][5])
    if policy == "mixed_float16":
        names = [v.path for v in made[0].variables]
        scale = state.arrays[f"optimizer/{next(i for i, n in enumerate(names) if n.endswith('dynamic_scale'))}"]
        assert scale == 2.0**11  # doubled after three good steps, the fifth's comes after the sixth
    else:
        assert {str(a.dtype) for n, a in state.arrays.items() if n.startswith(("weights/", "optimizer/"))} >= {"bfloat16"}
    again = checkpoint.from_bytes(state.to_bytes())
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in again.arrays.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in state.arrays.items()
    }
    assert trained(devices(1), resume=found[2][5], total_steps=12, **how)[:2] == found[:2]


class Bomb:
    """Unpickled, it would be told."""

    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def with_facts(content, change):
    """The checkpoint with its JSON changed, checksums and all."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    name = next(name for name in entries if name.startswith("facts.json"))
    text = change(np.load(io.BytesIO(entries[name])).tobytes())
    entries[name] = io.BytesIO()
    np.save(entries[name], np.frombuffer(text, np.uint8))
    entries[name] = entries[name].getvalue()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, data in entries.items():
            new.writestr(name, data)
    return file.getvalue()


def test_what_is_no_whole_checkpoint_is_damaged_and_nothing_else(whole):
    good = whole[2][14]
    rng = np.random.default_rng(0)
    bad = {"empty": b"", "zeros": bytes(5000), "text": b"no checkpoint", "random": rng.bytes(5000)}
    cuts = [1, 3, 21, 100, 1000, len(good) // 2, len(good) - 1000, len(good) - 100, len(good) - 23, len(good) - 1]
    bad |= {f"cut at {cut}": good[:cut] for cut in cuts}
    bad |= {"the end alone": good[1000:], "zeros inside": good[:3000] + bytes(2000) + good[5000:]}
    bad |= {"foreign": npz(a=np.arange(3)), "object": npz(**{"facts.json": np.array([Bomb()], dtype=object)})}
    bad |= {"pickle": pickle.dumps(Bomb()), "npy": npz(a=np.arange(3))[:0] + b"\x93NUMPY\x01\x00", "no numbers": npz()}
    for old, new in [
        (b"{", b""),
        (b'"format"', b'"formal"'),
        (b"checkpoint 1", b"checkpoint 2"),
        (b'"step": 14', b'"step": "x"'),
        (b'"step": 14', b'"step": -1'),
        (b'"epoch": 1', b'"epoch": null'),
        (b'"in_epoch": 3', b'"in_epoch": 3.5'),
        (b'"arrays": {', b'"arrays": 3, "a": {'),
        (b'["float32"', b'["float33"'),
        (b'["float32"', b'["object"'),
        (b'["float32", [', b'["float32", [-1, 7, '),
        (b'"facts": {', b'"facts": [], "a": {'),
        (b'"callbacks": [', b'"callbacks": 3, "a": ['),
        (b'"stopped"', b'"stepped"'),
        (b"History", b"\xff\xfe"),
    ]:
        bad[f"{old} for {new}"] = with_facts(good, lambda text, old=old, new=new: text.replace(old, new, 1))
        assert bad[f"{old} for {new}"] != with_facts(good, bytes), old
    bad["JSON that is no object"] = with_facts(good, lambda text: b"[1, 2]")
    bad["JSON without end"] = with_facts(good, lambda text: b"[" * 100_000)
    for name, content in bad.items():
        with pytest.raises(checkpoint.Damaged) as raised:
            checkpoint.from_bytes(content)
            pytest.fail(name)
        assert "\n" not in str(raised.value)
    assert not Bomb.exploded
    checkpoint.from_bytes(with_facts(good, bytes))


def test_a_flipped_bit_is_damage_or_changes_nothing(whole):
    good = whole[2][14]
    state = checkpoint.from_bytes(good)
    found = 0
    for at in np.random.default_rng(1).integers(0, len(good), 300):
        flipped = bytearray(good)
        flipped[at] ^= 16
        try:
            other = checkpoint.from_bytes(bytes(flipped))
        except checkpoint.Damaged:
            found += 1
        else:  # in a date, say
            assert (other.step, other.epoch, other.in_epoch, other.facts) == (14, 1, 3, state.facts)
            assert all(other.arrays[name].tobytes() == a.tobytes() for name, a in state.arrays.items())
    assert found > 150


def test_another_networks_or_optimizers_checkpoint_names_the_first_variable_that_differs(devices, whole):
    def wider():
        inputs = keras.Input((8, 8, 1))
        x = keras.layers.Conv2D(9, 3, use_bias=False, name="first")(inputs)
        return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))

    x, y = cases.examples()
    resume = checkpoint.from_bytes(whole[2][14])
    for how, expected in [
        ({"network": wider}, r"first/kernel is float32 \[3, 3, 1, 8\] there and float32 \[3, 3, 1, 9\] here"),
        (
            {"optimizer": lambda: keras.optimizers.SGD(0.1, 0.9)},
            r"adam\w*/first_kernel_momentum is float32 \[3, 3, 1, 8\] there and missing",
        ),
        ({"policy": "float16"}, r"first/kernel is float32 \[3, 3, 1, 8\] there and float16 \[3, 3, 1, 8\] here"),
    ]:
        with pytest.raises(checkpoint.Damaged, match=expected):
            compiled(devices(1), **how).fit(cases.batches(x, y), steps_per_epoch=STEPS, epochs=2, verbose=0, resume=resume)
