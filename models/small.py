"""Two networks without batch normalisation or dropout: `trivial`, which costs next to nothing, and LeNet."""

import keras
from keras import layers


def trivial(input_shape, classes):
    """Dense layers of 1 and 4096 units: it computes so little that a run's speed is that of the data and the reduction.

    Args:
      input_shape: [height, width, channels], any.
      classes: number of logits; they are float32 [batch, classes].
    """
    x = inputs = keras.Input(input_shape)
    x = layers.Flatten()(x)
    for units in (1, 4096):
        x = layers.Dense(units, activation="relu", kernel_initializer="he_normal")(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x), name="trivial")


def lenet(input_shape, classes):
    """Two 5x5 convolutions (32, then 64 filters), each with max pooling, a dense layer of 512 units, and the logits.

    The widths are those of TensorFlow's MNIST tutorial, not LeNet-5's 6, 16, 120 and 84 (LeCun et al. 1998, II.B).

    Args:
      input_shape: [height, width, channels], 4x4 or larger.
      classes: number of logits; they are float32 [batch, classes].
    """
    x = inputs = keras.Input(input_shape)
    for filters in (32, 64):
        x = layers.Conv2D(filters, 5, padding="same", activation="relu", kernel_initializer="he_normal")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(512, activation="relu", kernel_initializer="he_normal")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x), name="lenet")
