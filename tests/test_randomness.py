"""A layer that draws random numbers which no run keys is named; Keras's own random layers are not."""

import pytest

from app.config import UsageError


def test_a_layer_that_draws_unkeyed_random_numbers_is_named(tensorflow, devices):
    import keras

    import cluster
    from app import randomness

    tf = tensorflow

    class Uniform(keras.layers.Layer):
        def call(self, x):
            return tf.cond(tf.reduce_sum(x) > 0, lambda: x + tf.random.uniform(tf.shape(x)), lambda: x)

    class Global(keras.layers.Layer):
        def call(self, x):
            return keras.random.dropout(x, 0.5)

    class Counting(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.count = tf.Variable(0.0)

        def call(self, x):
            return x + self.count.assign_add(1.0)

    def checked(*layers):
        keras.utils.set_random_seed(1)
        with devices(1).scope():
            trainer = cluster.Trainer(keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(3)]), 8, 2)
            trainer.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        trainer._prepare(True, (tf.TensorSpec([8, 4], tf.float32), tf.TensorSpec([8], tf.int32)))
        randomness.check(trainer)

    checked(keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1), keras.layers.BatchNormalization())
    for layer, text in {
        keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)), name="shake"): "layer shake .Lambda. draws .*Normal",
        Uniform(name="inner"): "layer inner .Uniform. draws random numbers that follow no seed of the run .RandomUniform",
        Global(name="global"): "layer global .Global. draws from keras.random without a seed",
        Counting(name="counting"): "layer counting .Counting. changes a variable that Keras does not know",
    }.items():
        with pytest.raises(UsageError, match=text):
            checked(keras.layers.Dense(4), layer)
