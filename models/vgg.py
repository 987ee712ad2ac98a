"""VGG-16 and VGG-19: 3x3 convolutions with bias, two dense layers of 4096 with dropout, no batch normalisation."""

from functools import partial

import keras
from keras import layers


def vgg(input_shape, classes, convolutions, name):
    """Five stages of 3x3 convolutions with max pooling after each, and three dense layers (Simonyan and Zisserman 2014).

    Dropout of 0.5 follows the two large dense layers (their 3.1); keras.applications leaves it out. Initialised as He et al.
    2015 (arXiv 1502.01852), who train such networks from scratch; their authors had to pretrain a smaller one.

    Args:
      input_shape: [height, width, channels], 32x32 or larger.
      classes: number of logits; they are float32 [batch, classes].
      convolutions: how many in each stage of 64, 128, 256, 512 and 512 filters (their table 1).
      name: of the model.
    """
    x = inputs = keras.Input(input_shape)
    for filters, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(count):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(4096, activation="relu", kernel_initializer="he_normal")(x)
        x = layers.Dropout(0.5)(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x), name=name)


vgg16 = partial(vgg, convolutions=(2, 2, 3, 3, 3), name="vgg16")  # configuration D
vgg19 = partial(vgg, convolutions=(2, 2, 4, 4, 4), name="vgg19")  # configuration E
