"""A small convolutional network with batch normalisation and dropout, for small images: digits, Fashion-MNIST, CIFAR."""

import keras
from keras import layers


def small_cnn(input_shape, classes):
    """Two blocks of two 3x3 convolutions (32, then 64 filters), max pooling between them, global average, dense.

    Args:
      input_shape: [height, width, channels], 8x8 or larger.
      classes: number of logits.
    """
    x = inputs = keras.Input(input_shape)
    for block, filters in enumerate((32, 64)):
        if block:
            x = layers.MaxPooling2D()(x)
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.Dropout(0.1)(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.Dropout(0.3)(layers.Dense(128, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x), name="small_cnn")
