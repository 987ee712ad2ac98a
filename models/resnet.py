"""Residual networks, v1, v1.5 and v2: for ImageNet with bottleneck blocks, for CIFAR (6n + 2 layers) with basic blocks.

All take images of any size and any number of channels. A convolution that batch normalisation follows has no bias.
"""

from functools import partial

import keras
from keras import layers


def resnet(input_shape, classes, stages, block, name):
    """A network for ImageNet: 7x7 convolution, max pooling, four stages of 64 to 512 filters, global average, dense.

    The dense layer starts as in Goyal et al. 2017, 5.1: normal, standard deviation 0.01.

    Args:
      input_shape: [height, width, channels].
      classes: number of logits; they are float32 [batch, classes].
      stages: blocks in each stage, (3, 4, 6, 3) for 50 layers (He et al. 2015, table 1).
      block: `bottleneck_v1`, `bottleneck_v1_5` or `bottleneck_v2`.
      name: of the model.
    """
    x = inputs = keras.Input(input_shape)
    x = _norm_relu(_conv(x, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    x = _stages(x, stages, block, 64)
    x = layers.GlobalAveragePooling2D()(x)
    start = keras.initializers.RandomNormal(stddev=0.01)
    return keras.Model(inputs, layers.Dense(classes, kernel_initializer=start, dtype="float32")(x), name=name)


def resnet_cifar(input_shape, classes, n, block, name):
    """A network for CIFAR: 3x3 convolution, three stages of n blocks with 16, 32 and 64 filters, global average, dense.

    He et al. 2015, 4.2, with shortcuts that have no parameters (their option A).

    Args:
      input_shape: [height, width, channels].
      classes: number of logits; they are float32 [batch, classes].
      n: blocks in a stage; 6n + 2 layers with weights.
      block: `basic_v1` or `basic_v2`.
      name: of the model.
    """
    x = inputs = keras.Input(input_shape)
    x = _norm_relu(_conv(x, 16, 3))
    x = _stages(x, (n, n, n), block, 16)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(x), name=name)


def bottleneck_v1(x, filters, strides, strides_of_3x3=1):
    """1x1, 3x3 and 1x1 convolutions to 4 * filters channels, the stride in the first (He et al. 2015, figure 5).

    In v1 and v1.5 the last gamma starts at 0, so that a block starts as its shortcut (Goyal et al. 2017, 5.1; He et al. start
    it at 1). There is no flag for it. CIFAR's basic blocks and v2 are as He et al. have them.

    Args:
      x: [batch, height, width, channels].
      filters: of the first two convolutions.
      strides: of the first convolution and of the shortcut.
      strides_of_3x3: of the second, and of the shortcut.
    Returns:
      [batch, height / strides, width / strides, 4 * filters], sizes rounded up.
    """
    y = _norm_relu(_conv(x, filters, 1, strides))
    y = _norm_relu(_conv(y, filters, 3, strides_of_3x3))
    y = _norm(_conv(y, 4 * filters, 1), gamma_initializer="zeros")
    if x.shape[-1] != 4 * filters:
        x = _norm(_conv(x, 4 * filters, 1, strides * strides_of_3x3))
    return layers.ReLU()(layers.Add()([x, y]))


def bottleneck_v1_5(x, filters, strides):
    """`bottleneck_v1` with the stride in the 3x3 convolution, which then sees all pixels (Goyal et al. 2017, 5.1)."""
    return bottleneck_v1(x, filters, 1, strides)


def bottleneck_v2(x, filters, strides):
    """Batch norm and ReLU before the convolutions; nothing after the addition (He et al. 2016, figure 4e).

    The stride is in the first convolution, the projection is a convolution alone.
    """
    before = _norm_relu(x, scale=False)
    y = _norm_relu(_conv(before, filters, 1, strides))
    y = _norm_relu(_conv(y, filters, 3))
    y = _conv(y, 4 * filters, 1)
    if x.shape[-1] != 4 * filters:
        x = _conv(before, 4 * filters, 1, strides)
    return layers.Add()([x, y])


def basic_v1(x, filters, strides):
    """Two 3x3 convolutions, the stride in the first (He et al. 2015, figure 5)."""
    y = _norm_relu(_conv(x, filters, 3, strides))
    y = _norm(_conv(y, filters, 3))
    return layers.ReLU()(layers.Add()([_shortcut(x, filters, strides), y]))


def basic_v2(x, filters, strides):
    """Batch norm and ReLU before each of two 3x3 convolutions; nothing after the addition (He et al. 2016, figure 4e)."""
    y = _norm_relu(x, scale=False)
    y = _norm_relu(_conv(y, filters, 3, strides))
    y = _conv(y, filters, 3)
    return layers.Add()([_shortcut(x, filters, strides), y])


def _stages(x, stages, block, filters):
    """Stages of blocks; from the second on, a stage begins with stride 2 and has twice the filters."""
    for stage, blocks in enumerate(stages):
        for i in range(blocks):
            x = block(x, filters << stage, 2 if stage and not i else 1)
    return _norm_relu(x, scale=False) if block in (bottleneck_v2, basic_v2) else x


def _conv(x, filters, kernel, strides=1):
    """A convolution without bias, initialised as in He et al. 2015, arXiv 1502.01852."""
    padding = "same"
    if kernel > 1 and strides > 1:
        # The same on all sides, so that its centre is the pixel that a shortcut of the same stride takes. "same" would
        # pad an even size at its end only.
        x, padding = layers.ZeroPadding2D(kernel // 2)(x), "valid"
    return layers.Conv2D(filters, kernel, strides, padding, use_bias=False, kernel_initializer="he_normal")(x)


def _norm(x, **arguments):
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **arguments)(x)


def _norm_relu(x, **arguments):
    """Batch norm and ReLU. Where v2 normalises a sum (`scale=False`) there is no gamma: the convolutions after it can scale."""
    return layers.ReLU()(_norm(x, **arguments))


def _shortcut(x, filters, strides):
    """Option A: every `strides`-th pixel, and zeros as the new channels, half of them on each side."""
    missing = filters - x.shape[-1]
    if not missing:
        return x
    x = layers.AveragePooling2D(1, strides)(x)
    return keras.ops.pad(x, [(0, 0), (0, 0), (0, 0), (missing // 2, missing - missing // 2)])


_50, _101, _152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)
resnet50 = partial(resnet, stages=_50, block=bottleneck_v1, name="resnet50")
resnet50_v1_5 = partial(resnet, stages=_50, block=bottleneck_v1_5, name="resnet50_v1.5")
resnet50_v2 = partial(resnet, stages=_50, block=bottleneck_v2, name="resnet50_v2")
resnet101 = partial(resnet, stages=_101, block=bottleneck_v1, name="resnet101")
resnet101_v2 = partial(resnet, stages=_101, block=bottleneck_v2, name="resnet101_v2")
resnet152 = partial(resnet, stages=_152, block=bottleneck_v1, name="resnet152")
resnet152_v2 = partial(resnet, stages=_152, block=bottleneck_v2, name="resnet152_v2")

resnet20 = partial(resnet_cifar, n=3, block=basic_v1, name="resnet20")
resnet32 = partial(resnet_cifar, n=5, block=basic_v1, name="resnet32")
resnet44 = partial(resnet_cifar, n=7, block=basic_v1, name="resnet44")
resnet56 = partial(resnet_cifar, n=9, block=basic_v1, name="resnet56")
resnet110 = partial(resnet_cifar, n=18, block=basic_v1, name="resnet110")
resnet20_v2 = partial(resnet_cifar, n=3, block=basic_v2, name="resnet20_v2")
resnet32_v2 = partial(resnet_cifar, n=5, block=basic_v2, name="resnet32_v2")
resnet44_v2 = partial(resnet_cifar, n=7, block=basic_v2, name="resnet44_v2")
resnet56_v2 = partial(resnet_cifar, n=9, block=basic_v2, name="resnet56_v2")
resnet110_v2 = partial(resnet_cifar, n=18, block=basic_v2, name="resnet110_v2")
