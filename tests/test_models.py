"""Every network of ours has the parameters of its reference, computes what its paper says, and is found by its name."""

import collections
import math
import subprocess
import sys

import numpy as np
import pytest

import models

# Trainable parameters with BatchNormalization's, and trainable variables, of tf_cnn_benchmarks, last state 2023-10-05. It
# counts one class more: 1001 for ImageNet, 11 for CIFAR-10.
REFERENCE = {
    "vgg16": (138_361_641, 32),
    "vgg19": (143_671_337, 38),
    "trivial": (4_263_877, 6),
    "inception3": (23_819_401, 190),
    "resnet50": (25_559_081, 161),
    "resnet50_v1.5": (25_559_081, 161),
    "resnet50_v2": (25_536_361, 138),
    "resnet101": (44_551_209, 314),
    "resnet101_v2": (44_511_081, 274),
    "resnet152": (60_194_857, 467),
    "resnet152_v2": (60_139_369, 410),
    "resnet20": (269_787, 59),
    "resnet20_v2": (269_467, 51),
    "resnet32": (464_219, 95),
    "resnet32_v2": (463_675, 81),
    "resnet44": (658_651, 131),
    "resnet44_v2": (657_883, 111),
    "resnet56": (853_083, 167),
    "resnet56_v2": (852_091, 141),
    "resnet110": (1_728_027, 329),
    "resnet110_v2": (1_726_027, 276),
}
REFERENCE_ELSEWHERE = {  # at other inputs than the table's: (name, input, classes)
    ("lenet", (28, 28, 3), 1001): (2_173_353, 8),
    ("trivial", (32, 32, 3), 11): (56_332, 6),
}


def parameters(model):
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


@pytest.mark.parametrize("name", models.NAMES)
def test_a_network_has_the_parameters_of_the_table_and_of_the_reference(symbolic, name):
    network = models.NAMES[name]
    model = symbolic(name, network.input_shape, network.classes)
    assert model.output_shape == (None, network.classes)
    assert parameters(model) == network.parameters
    if name in REFERENCE:
        one_class = math.prod(model.layers[-1].kernel.shape[:-1]) + 1
        assert (network.parameters + one_class, len(model.trainable_variables)) == REFERENCE[name]
    else:
        assert name in ("small_cnn", "lenet")
    # Then a saved file opens in plain Keras, without this package.
    assert all(type(layer).__module__.startswith("keras.") for layer in model.layers)


@pytest.mark.parametrize("arguments", REFERENCE_ELSEWHERE)
def test_small_networks_match_the_reference_at_its_input(symbolic, arguments):
    model = symbolic(*arguments)
    assert (parameters(model), len(model.trainable_variables)) == REFERENCE_ELSEWHERE[arguments]


def test_names_are_checked_and_listed_without_tensorflow():
    program = (
        "import sys, models; print(models.check_name('resnet-50'), models.check_name('keras:ResNet50')); models.listing();"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "did you mean resnet50?" in done.stdout
    assert done.stdout.endswith(" None\n")


@pytest.mark.parametrize("name", ["lenet", "resnet50_v1.5", "keras:EfficientNetV2B0", "mine:net", "my.own_2.module:net"])
def test_good_names(name):
    assert models.check_name(name) is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("resnet50_v3", "network 'resnet50_v3' is unknown; did you mean resnet50_v2? One of: small_cnn, trivial, "),
        ("ResNet-50", "network 'ResNet-50' is unknown; did you mean resnet50? One of: "),
        ("squeeze", "network 'squeeze' is unknown. One of: "),
        ("", "network '' is unknown. One of: "),
        ("keras:", "network 'keras:' is not well formed; expected keras:NAME of keras.applications, or a function of your own"),
        ("a.b:", "network 'a.b:' is not well formed; "),
        ("a..b:c", "network 'a..b:c' is not well formed; "),
        ("a/b.py:c", "network 'a/b.py:c' is not well formed; "),
        ("a:b:c", "network 'a:b:c' is not well formed; "),
        ("keras:A.b", "network 'keras:A.b' is not well formed; "),
    ],
)
def test_bad_names(name, what):
    problem = models.check_name(name)
    assert problem.startswith(what)
    assert "\n" not in problem
    with pytest.raises(ValueError) as raised:
        models.build(name, (32, 32, 3), 10)
    assert str(raised.value) == problem


def test_the_listing_has_a_line_for_each_network():
    head, *lines, last = models.listing().splitlines()
    assert head.split() == ["name", "input", "classes", "trainable", "parameters"]
    assert [line.split()[0] for line in lines] == list(models.NAMES)
    line = next(line for line in lines if line.startswith("resnet50 "))
    assert line.split()[:4] == ["resnet50", "224x224x3", "1,000", "25,557,032"]
    assert line.endswith("He et al. 2015, arXiv 1512.03385, table 1")
    assert "keras:NAME" in last
    assert max(map(len, lines)) <= 128


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        ("lenet", (4, 4, 1)),
        ("resnet20", (28, 28, 1)),
        ("resnet20_v2", (27, 31, 4)),  # odd: the two sides of a block agree
        ("resnet50", (64, 64, 3)),
        ("resnet50_v1.5", (33, 47, 1)),
        ("resnet50_v2", (8, 8, 3)),
        ("vgg16", (32, 32, 3)),
        ("inception3", (75, 75, 3)),
        ("keras:MobileNetV3Small", (32, 32, 3)),
    ],
)
def test_other_inputs_and_numbers_of_classes(symbolic, name, input_shape):
    model = symbolic(name, input_shape, 7)
    assert model.input_shape == (None, *input_shape)
    assert model.output_shape == (None, 7)


@pytest.mark.parametrize(
    "name",
    ["small_cnn", "trivial", "lenet", "resnet20_v2", "resnet50_v1.5", "vgg16", "inception3", "keras:MobileNet"],
)
def test_logits_are_float32_under_mixed_precision(symbolic, name):
    shape = models.NAMES[name].input_shape if name in models.NAMES else (64, 64, 3)
    model = symbolic(name, shape, 10, policy="mixed_bfloat16")
    assert {layer.compute_dtype for layer in model.layers[1:-1]} == {"bfloat16"}
    assert model.output.dtype == "float32"
    assert model.output_shape == (None, 10)


# ---- what they compute ---------------------------------------------------------------------------------------------------


def convolve(x, kernel, strides=1):
    """Convolution in NumPy, with kernel // 2 zeros on each side: [height, width, in] and [k, k, in, out]."""
    size = len(kernel)
    x = np.pad(x, [(size // 2,) * 2, (size // 2,) * 2, (0, 0)])
    rows, columns = (range(0, n - size + 1, strides) for n in x.shape[:2])
    return np.array([[np.tensordot(x[i : i + size, j : j + size], kernel, 3) for j in columns] for i in rows])


def relu(x):
    return np.maximum(x, 0)


def norm(x):
    return x / np.sqrt(1 + 1e-5)  # with moving statistics of 0 and 1


def option_a(x):
    return np.pad(x[::2, ::2], [(0, 0), (0, 0), (1, 2)])


BLOCKS = {  # of x and the kernels, by their shapes: from the block's input or from its filters, to its filters or to all
    "basic_v1": lambda x, k: relu(option_a(x) + norm(convolve(relu(norm(convolve(x, k[3, 2, 5], 2))), k[3, 5, 5]))),
    "basic_v2": lambda x, k: option_a(x) + convolve(relu(norm(convolve(relu(norm(x)), k[3, 2, 5], 2))), k[3, 5, 5]),
    "bottleneck_v1": lambda x, k: relu(
        norm(convolve(x, k[1, 2, 20], 2))
        + norm(convolve(relu(norm(convolve(relu(norm(convolve(x, k[1, 2, 5], 2))), k[3, 5, 5]))), k[1, 5, 20]))
    ),
    "bottleneck_v1_5": lambda x, k: relu(
        norm(convolve(x, k[1, 2, 20], 2))
        + norm(convolve(relu(norm(convolve(relu(norm(convolve(x, k[1, 2, 5]))), k[3, 5, 5], 2))), k[1, 5, 20]))
    ),
    "bottleneck_v2": lambda x, k: (
        convolve(relu(norm(x)), k[1, 2, 20], 2)
        + convolve(relu(norm(convolve(relu(norm(convolve(relu(norm(x)), k[1, 2, 5], 2))), k[3, 5, 5]))), k[1, 5, 20])
    ),
}


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_residual_block_computes_what_numpy_does(tensorflow, block, size):
    import keras

    from models import resnet

    inputs = keras.Input((size, size, 2))
    model = keras.Model(inputs, getattr(resnet, block)(inputs, 5, 2))
    kernels = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            kernels[layer.kernel_size[0], *layer.kernel.shape[2:]] = layer.kernel.numpy()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.scale:
            layer.gamma.assign(np.ones(layer.gamma.shape))
    x = np.random.default_rng(1).normal(size=(size, size, 2))
    np.testing.assert_allclose(model(x[None])[0], BLOCKS[block](x, kernels), rtol=1e-4, atol=1e-5)


def test_option_a_takes_every_second_pixel_and_adds_channels_of_zeros(tensorflow):
    from models import resnet

    x = np.arange(1, 19, dtype=np.float32).reshape(1, 3, 3, 2)
    shortcut = resnet._shortcut(tensorflow.constant(x), 5, 2)
    np.testing.assert_array_equal(shortcut[0, 0, 0], [0, 1, 2, 0, 0])
    np.testing.assert_array_equal(shortcut[0, 1, 1], [0, 17, 18, 0, 0])
    assert shortcut.shape == (1, 2, 2, 5)
    assert resnet._shortcut(x, 2, 1) is x


@pytest.mark.parametrize("block", ["bottleneck_v1", "bottleneck_v1_5"])
def test_a_bottleneck_block_starts_as_its_shortcut(tensorflow, block):
    import keras

    from models import resnet

    inputs = keras.Input((4, 4, 8))
    x = np.random.default_rng(1).uniform(size=(2, 4, 4, 8)).astype(np.float32)
    output = keras.Model(inputs, getattr(resnet, block)(inputs, 2, 1))(x, training=True)
    np.testing.assert_array_equal(output, x)


@pytest.mark.parametrize(
    ("name", "strided"),
    [("resnet50", {7: 1, 1: 6}), ("resnet50_v1.5", {7: 1, 3: 3, 1: 3}), ("resnet50_v2", {7: 1, 1: 6}), ("resnet20", {3: 2})],
)
def test_where_the_strides_are(symbolic, name, strided):
    """Kernel sizes of the convolutions with stride 2: the first, then one in each of three stages and its projection."""
    convolutions = [layer for layer in symbolic(name, (64, 64, 3), 10).layers if hasattr(layer, "kernel_size")]
    assert collections.Counter(c.kernel_size[0] for c in convolutions if c.strides == (2, 2)) == strided
    assert not any(convolution.use_bias for convolution in convolutions)


@pytest.mark.parametrize("name", ["vgg16", "vgg19"])
def test_dropout_follows_each_large_dense_layer_of_vgg(symbolic, name):
    last = symbolic(name, (32, 32, 3), 10).layers[-5:]
    assert [type(layer).__name__ for layer in last] == ["Dense", "Dropout", "Dense", "Dropout", "Dense"]
    assert [layer.units for layer in last[::2]] == [4096, 4096, 10]
    assert [layer.rate for layer in last[1::2]] == [0.5, 0.5]


def test_a_saved_resnet_opens_in_keras_and_computes_the_same(tensorflow, tmp_path):
    import keras

    model = models.build("resnet20", (9, 9, 1), 3)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(1).normal(size=(2, 9, 9, 1)).astype(np.float32)
    np.testing.assert_array_equal(model(x), again(x))
