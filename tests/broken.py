"""A small training, sound or broken in one way, in this process; and its record. The faults are here, not in the product."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import cluster
import cluster.step
from app.compare import Run
from app.replay import Replay
from cluster.fingerprint import Recorder

BATCH, LOGICAL, STEPS = 24, 4, 3
X = np.random.default_rng(0).normal(size=(BATCH * 6, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, len(X))


def network(normalised=True, dropped=True):
    h = inputs = keras.Input((5,))
    h = keras.layers.Dense(6)(h)
    h = keras.layers.BatchNormalization(momentum=0.9)(h) if normalised else h
    h = keras.layers.ReLU()(h)
    h = keras.layers.Dropout(0.3)(h) if dropped else h
    return keras.Model(inputs, keras.layers.Dense(3)(h))


def data(x=X, y=Y):
    return lambda first_step: (
        tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH, drop_remainder=True).skip(first_step)
    )


def trainer(
    strategy,
    seed=7,
    weights_seed=1,
    logical=LOGICAL,
    rate=0.1,
    decay=0.01,
    clip=0.3,
    identical=True,
    batch_norm="replica",
    **network_kind,
):
    """A compiled trainer."""
    keras.utils.set_random_seed(weights_seed)
    with strategy.scope():
        model = cluster.Trainer(network(**network_kind), BATCH, logical, seed, identical, batch_norm=batch_norm)
        optimizer = keras.optimizers.SGD(rate, 0.9, weight_decay=decay or None, global_clipnorm=clip)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model


_sound = {}  # trainers of sound runs, traced: (trainer, values of its variables before the first step)


def _fresh(strategy, kind):
    """A trainer that has made no step; one that has been used is set back, which saves tracing it again."""
    key = id(strategy), *sorted(kind.items())
    if key not in _sound:
        _sound[key] = trainer(strategy, **kind), None
    model, values = _sound[key]
    if values:
        for variable, value in values:
            variable.assign(value)
        model._step.count.assign(0)
    return model, lambda: _sound.__setitem__(key, (model, _sound[key][1] or _values(model)))


def _values(model):
    return [(v, v.numpy()) for variables in model._step.variables.values() for v in variables]


def run(strategy, name="run", x=X, y=Y, steps=STEPS, every=1, fault=None, held_out=None, config=None, **kind) -> Run:
    """Trains and returns the record. `fault(model)` breaks it before it is traced; it returns a context."""
    lines = []
    model, remember = (trainer(strategy, **kind), lambda: None) if fault else _fresh(strategy, kind)

    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            remember()
            if fault:
                stack.enter_context(fault(self.model))

    with contextlib.ExitStack() as stack:
        model.fit(
            data(x, y)(0),
            steps_per_epoch=steps,
            total_steps=steps,
            fingerprints=Recorder(None, every, lines.append),
            callbacks=[Begin()],
            validation_data=held_out,
            verbose=0,
        )
    return Run(name, lines, config)


def replay(strategy, x=X, y=Y, evaluation=None, **kind) -> Replay:
    return Replay(trainer(strategy, **kind), data(x, y), evaluation=evaluation)


# ---- faults --------------------------------------------------------------------------------------------------------------


def gradients_times(factor):
    """The reduction's gradients are multiplied."""
    return lambda model: _reduced(model, lambda gradients, *rest: ([g * factor for g in gradients], *rest))


def own_statistics(model):
    """Each replica keeps the moving statistics of its own logical replicas."""
    step, original = model._step, model.reduction.__class__.__call__

    def call(reduction, replica, sums):
        total = original(reduction, replica, sums)
        one_pass = step._passes[True][1]
        if len(total) < len(one_pass.output_specs):
            return total
        gradients, _, metrics = one_pass.split(total[: len(one_pass.output_specs)])
        own = one_pass.split(sums[0][: len(one_pass.output_specs)])[1]
        own = [s * reduction.replicas for s in own]
        return [*gradients, *own, *metrics, *total[len(one_pass.output_specs) :]]

    return _patched(model.reduction.__class__, "__call__", call)


def clipped_before(model):
    """Every logical replica clips its own gradient."""
    one_pass = model._step._passes[True][1]
    original = one_pass.__class__.__call__

    def call(self, *arguments):
        gradients, *rest = self.split(original(self, *arguments))
        clipped = tf.clip_by_global_norm(gradients, model.optimizer.global_clipnorm)[0]
        return [*clipped, *rest[0], *rest[1]]

    return _patched(one_pass.__class__, "__call__", call)


def stepped(times):
    def fault(model):
        apply = model.optimizer.apply
        return _patched(model.optimizer, "apply", lambda *arguments: [apply(*arguments) for _ in range(times)][0])

    return fault


def keyed(change):
    """Dropout keys of (step, k) that `change` maps to others."""

    def fault(model):
        original = cluster.step.layer_keys
        return _patched(cluster.step, "layer_keys", lambda seed, step, k, seeds: original(seed, *change(step, k), seeds))

    return fault


def _reduced(model, change):
    step, original = model._step, model.reduction.__class__.__call__

    def call(reduction, replica, sums):
        total = original(reduction, replica, sums)
        one_pass = step._passes[True][1]
        count = len(one_pass.output_specs)
        if len(total) < count:
            return total
        parts = change(*one_pass.split(total[:count]))
        return [*(tensor for part in parts for tensor in part), *total[count:]]

    return _patched(model.reduction.__class__, "__call__", call)


@contextlib.contextmanager
def _patched(target, name, value):
    had, before = name in vars(target), getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if had:
            setattr(target, name, before)
        else:
            delattr(target, name)
