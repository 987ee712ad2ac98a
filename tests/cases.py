"""Small training runs whose result may not depend on the number of workers. `python -m cluster.launcher` runs this file.

    python tests/cases.py OUTPUT_DIRECTORY NAME...    as one worker of the cluster in TF_CONFIG

Each worker writes OUTPUT_DIRECTORY/worker-I.json: {name: what it saw}. Every case runs in the same started cluster.
"""

import contextlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import keras
import numpy as np
import tensorflow as tf

import cluster
from cluster.fingerprint import run_sha256

BATCH, STEPS_PER_EPOCH, EPOCHS = 24, 11, 4  # 44 steps; 11 is no multiple of the 4 steps per execution


def network():
    """Batch normalisation, two dropout layers, a frozen-able first layer."""
    x = inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(8, 3, use_bias=False, name="first")(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9, name="normal")(x))
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(16, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def examples(infinite_at=None):
    """264 images and labels; image `infinite_at` is all infinity."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH * STEPS_PER_EPOCH, 8, 8, 1)).astype("float32")
    if infinite_at is not None:
        images[infinite_at] = np.inf
    return images, rng.integers(0, 10, len(images))


def batches(x, y, batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(batch, drop_remainder=True)


class EpochWeights(keras.callbacks.Callback):
    """The hash of everything after each epoch, as this worker holds it."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(run_sha256(self.model, {}))


def training(
    strategy,
    logical_replicas=4,
    optimizer=None,
    policy="float32",
    frozen=False,
    infinite_at=None,
    callbacks=(),
    compile=(),
    fit=(),
):
    """Trains `network` and tells the hash, the history, and the hash after each epoch."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            plain = network()
            if frozen:
                plain.get_layer("first").trainable = False
                plain.get_layer("normal").trainable = False
            model = cluster.Trainer(plain, BATCH, logical_replicas, seed=7)
            model.compile(
                optimizer() if optimizer else keras.optimizers.SGD(0.1, 0.9, weight_decay=1e-3, global_clipnorm=0.5),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5")],
                **dict(compile),
            )
        x, y = examples(infinite_at)
        epochs = EpochWeights()
        history = model.fit(
            batches(x, y),
            steps_per_epoch=STEPS_PER_EPOCH,
            epochs=EPOCHS,
            validation_data=(examples()[0][:35], y[:35]),  # 35: the last batch is not whole
            callbacks=[epochs, *callbacks],
            verbose=0,
            **dict(fit),
        ).history
    finally:
        keras.config.set_dtype_policy("float32")
    return {
        "sha256": run_sha256(model, history),
        "history": history,
        "epochs": epochs.seen,
        "steps": model.step,
        "updates": int(model.optimizer.iterations.numpy()),
        "moving_mean": plain.get_layer("normal").moving_mean.numpy().tolist(),
    }


def keras_callbacks(strategy):
    """Keras's own callbacks: they act on global numbers, so they decide alike everywhere."""
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="loss", min_delta=1.0, patience=2),  # which no epoch after the first brings
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=1.0),
    ]
    return training(strategy, callbacks=callbacks)


def by_hand(strategy, logical_replicas):
    """loss = mean(x) A B with A = 1, B = 2 at the start, images -1, 0, ..., 14 in order, batch 4, SGD 1/16, L2(1/32)."""

    class Product(keras.layers.Layer):
        def build(self, _):
            for name, value in (("a", 1.0), ("b", 2.0)):
                weight = self.add_weight(
                    shape=(),
                    name=name,
                    initializer=keras.initializers.Constant(value),
                    regularizer=keras.regularizers.L2(1 / 32),
                )
                setattr(self, name, weight)

        def call(self, x):
            return x * self.a * self.b

    with strategy.scope():
        inputs = keras.Input((1,))
        model = cluster.Trainer(keras.Model(inputs, Product()(inputs)), 4, logical_replicas)
        model.compile(keras.optimizers.SGD(1 / 16), lambda y_true, y_pred: y_pred[:, 0])
    images = np.arange(-1, 15, dtype="float32")[:, None]
    losses = []
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(logs["loss"]))
    model.fit(batches(images, images, 4), steps_per_epoch=1, epochs=4, verbose=0, callbacks=[log])
    return losses


def dropout_masks(strategy, steps=3):
    """The masks of two dropout layers, by [layer][step][logical replica], read off the gradients.

    Example k of 4 (one a logical replica) is 4^k. A layer's kernel [1, 16] starts at 0 and ends at minus the gradient, which is
    the sum of 2 4^k mask_k / 4 over k: base-4 digits.
    """
    with strategy.scope():
        inputs = keras.Input((1,))
        dense = [keras.layers.Dense(16, use_bias=False, kernel_initializer="zeros", name=f"branch_{i}") for i in range(2)]
        dropped = [keras.layers.Dropout(0.5)(layer(inputs)) for layer in dense]
        plain = keras.Model(inputs, keras.ops.sum(keras.layers.Concatenate()(dropped), -1, keepdims=True))
        model = cluster.Trainer(plain, 4, 4, seed=3)
        model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_pred[:, 0])
    x = np.float32([[1], [4], [16], [64]])
    masks = [[], []]

    def read(epoch, logs):
        for layer, kernel in enumerate(k.kernel for k in dense):
            digits = np.rint(-2 * kernel.numpy()[0]).astype(int)
            masks[layer].append([((digits >> 2 * k) & 3).tolist() for k in range(4)])
            kernel.assign(np.zeros((1, 16)))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=read)
    model.fit(batches(x, x, 4), steps_per_epoch=1, epochs=steps, verbose=0, callbacks=[callback])
    return masks


def evaluation(strategy):
    """Evaluates sets of many sizes with weights that were not trained; history as [size][metric]."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = cluster.Trainer(network(), 8, 4)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = examples()
    return {size: model.evaluate(x[:size], y[:size], verbose=0, return_dict=True) for size in (1, 3, 5, 8, 61)}


def equal_in_float64(strategy=None):
    """Weights after 100 steps in float64: of a Trainer with identical=False, or of plain Keras without a strategy."""
    keras.utils.set_random_seed(1)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            inputs = keras.Input((8, 8, 1))
            x = keras.layers.Conv2D(8, 3, activation="tanh")(inputs)
            model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))
            if strategy:
                model = cluster.Trainer(model, BATCH, 4, identical=False)
            optimizer = keras.optimizers.SGD(0.05, 0.9, weight_decay=1e-3, global_clipnorm=0.5)
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = examples()
        data = batches(x.astype("float64"), y)
        model.fit(data, steps_per_epoch=100, verbose=0)
        return [v.numpy().tolist() for v in model.trainable_variables]
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def normalised_globally(strategy=None, logical_replicas=4, batch_norm="global", policy="float64", compile=()):
    """Losses, and weights and moving statistics, after 10 steps of a Trainer, or of plain Keras without a strategy.

    Pixels are about 3: a variance made of sums of squares in float32 would show it. The examples are weighted.
    """
    keras.utils.set_random_seed(1)
    keras.config.set_floatx(policy)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            x = inputs = keras.Input((8, 8, 1))
            for filters in (8, 6):
                x = keras.layers.Conv2D(filters, 3, use_bias=False)(x)
                x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
            plain = model = keras.Model(inputs, keras.layers.Dense(10, kernel_regularizer="l2")(keras.layers.Flatten()(x)))
            if strategy:
                model = cluster.Trainer(plain, BATCH, logical_replicas, identical=False, batch_norm=batch_norm)
            optimizer = keras.optimizers.SGD(0.05, 0.9, weight_decay=1e-3, global_clipnorm=0.5)
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **dict(compile))
        x, y = examples()
        weights = 1 + np.arange(len(y), dtype=policy) % 3
        data = tf.data.Dataset.from_tensor_slices((x.astype(policy) + 3, y, weights)).repeat().batch(BATCH, drop_remainder=True)
        history = model.fit(data, steps_per_epoch=5, epochs=2, validation_data=(x[:35], y[:35]), verbose=0).history
        return [*history["loss"], *history["val_loss"]], [v.numpy().tolist() for v in plain.variables]
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def drift(strategy):
    """What ends a run of which worker 1 changes a weight of its own after step 3; fingerprints are made of every second."""
    from cluster.drift import Drift
    from cluster.fingerprint import Recorder

    def disturb(batch, logs):
        if batch == 2 and strategy.cluster_resolver.task_id == 1:
            [kernel] = strategy.experimental_local_results(model.layers[-1].kernel.value)
            kernel[0, 0].assign(7.0)

    with strategy.scope():
        model = network()
        trainer = cluster.Trainer(model, BATCH, 4)
        trainer.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=disturb)
    try:
        trainer.fit(batches(*examples()), steps_per_epoch=6, fingerprints=Recorder(None, 2), callbacks=[callback], verbose=0)
    except Drift as error:
        return [trainer.step, str(error), model.layers[-1].kernel.path]


CASES = {
    "normalised_globally": normalised_globally,
    "drift": drift,
    "equal_in_float64": equal_in_float64,
    "plain": training,
    "adamw_ema": lambda s: training(s, optimizer=lambda: keras.optimizers.AdamW(1e-3, use_ema=True, ema_momentum=0.9)),
    "mixed_bfloat16": lambda s: training(s, policy="mixed_bfloat16"),
    "mixed_float16_infinity": lambda s: training(s, policy="mixed_float16", infinite_at=30),
    "jit_compile": lambda s: training(s, compile={"jit_compile": True}),
    "steps_per_execution": lambda s: training(s, compile={"steps_per_execution": 4}),
    "frozen": lambda s: training(s, frozen=True),
    "class_weight": lambda s: training(s, fit={"class_weight": {0: 3.0, 4: 0.5, 9: 2.0}}),
    "keras_callbacks": keras_callbacks,
    "six": lambda s: training(s, logical_replicas=6),
    "by_hand_2": lambda s: by_hand(s, 2),
    "by_hand_4": lambda s: by_hand(s, 4),
    "dropout_masks": dropout_masks,
    "evaluation": evaluation,
}


def main(strategy):
    tf.get_logger().setLevel("ERROR")  # it warns of many functions of one name, which here are many trainers'
    directory, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    results = {name: CASES[name](strategy) for name in names}
    me = strategy.cluster_resolver.task_id
    (directory / f"worker-{me}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    cluster.run(main)
