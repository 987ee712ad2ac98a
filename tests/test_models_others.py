"""Networks that are not ours, of keras.applications and of the user's: built as they are meant, or refused in one line."""

import sys
import types

import pytest

import models


@pytest.mark.parametrize("name", ["keras:EfficientNetV2B0", "keras:MobileNetV3Small"])
def test_applications_give_logits_and_leave_the_scaling_to_the_data(symbolic, name):
    model = symbolic(name, (64, 64, 3), 10)
    assert not {"Rescaling", "Normalization"} & {type(layer).__name__ for layer in model.layers}
    assert model.output_shape == (None, 10)
    assert model.layers[-1].activation.__name__ == "linear"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("keras:EfficentNetV2B0", "network 'keras:EfficentNetV2B0' is unknown; did you mean keras:EfficientNetV2B0?"),
        ("keras:resnet50", "network 'keras:resnet50' is unknown; did you mean keras:ResNet50?"),  # which is a module
        ("keras:Perceptron", "network 'keras:Perceptron' is unknown"),
        ("keras:Xception", "keras:Xception: Input size must be at least 71x71; Received: input_shape=(8, 8, 3)"),
        ("inception3", "keras:InceptionV3: Input size must be at least 75x75; Received: input_shape=(8, 8, 3)"),
        ("vgg16", "vgg16: Computed output size would be zero or negative. Received: "),
        ("no_such_module:net", "no_such_module:net: cannot import it: ModuleNotFoundError: No module named 'no_such_module'"),
        ("their_nets:none", "their_nets:none: cannot import it: AttributeError: module 'their_nets' has no attribute 'none'"),
        ("their_broken:net", "their_broken:net: cannot import it: ZeroDivisionError: division by zero"),
        ("their_nets:number", "their_nets:number: is int, not a function"),
        (
            "their_nets:no_arguments",
            "their_nets:no_arguments: cannot be called with (input_shape, classes): too many positional",
        ),
        ("their_nets:layer", "their_nets:layer: returned Dense, not a keras.Model"),
        ("their_nets:pictures", "their_nets:pictures: outputs [None, 8, 8, 10]; expected logits [None, 10]"),
        ("their_nets:two", "their_nets:two: outputs [None, 10], [None, 10]; expected logits [None, 10]"),
        ("their_nets:half", "their_nets:half: outputs float16; give the last layer dtype='float32', so that the loss is exact"),
        ("their_nets:other_input", "their_nets:other_input: "),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(symbolic, theirs, name, line):
    with pytest.raises(models.ModelError) as raised:
        symbolic(name, (8, 8, 3), 10)
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("function", ["functional", "Subclass", "unbuilt"])
def test_networks_of_the_user(symbolic, theirs, function):
    model = symbolic(f"their_nets:{function}", (8, 8, 3), 10)
    assert model.count_params() == 8 * 8 * 3 * 10 + 10


def test_what_a_function_of_the_user_raises_is_passed_on(symbolic, theirs):
    """A ValueError too, which is no refusal of ours."""
    with pytest.raises(ValueError, match="^my own mistake$") as error:
        symbolic("their_nets:fails", (8, 8, 3), 10)
    assert type(error.value) is ValueError


def test_training_shows_a_mistake_of_the_user_as_it_is_and_a_refusal_as_one_line(theirs):
    from app.assembly import network
    from app.config import Config, UsageError

    data = types.SimpleNamespace(image_shape=(8, 8, 3), manifest=types.SimpleNamespace(classes=("a", "b")))
    with pytest.raises(ValueError, match="^my own mistake$") as error:
        network(Config(model="their_nets:fails"), data)
    assert not isinstance(error.value, UsageError)
    with pytest.raises(UsageError, match="^--model=their_nets:layer: returned Dense"):
        network(Config(model="their_nets:layer"), data)


@pytest.fixture
def theirs(tensorflow, tmp_path, monkeypatch):
    """Modules of a user's in the current folder."""
    (tmp_path / "their_broken.py").write_text("1 / 0\n")
    (tmp_path / "their_nets.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("their_nets", None)


THEIRS = """
import keras
from keras import layers

number = 1


def functional(input_shape, classes, dtype=None):
    x = inputs = keras.Input(input_shape)
    return keras.Model(inputs, layers.Dense(classes, dtype=dtype)(layers.Flatten()(x)))


class Subclass(keras.Model):
    def __init__(self, shape, n):
        super().__init__()
        self.flatten, self.dense = layers.Flatten(), layers.Dense(n)

    def call(self, x):
        return self.dense(self.flatten(x))


def unbuilt(input_shape, classes):
    return keras.Sequential([layers.Flatten(), layers.Dense(classes)])


def no_arguments():
    pass


def layer(input_shape, classes):
    return layers.Dense(classes)


def pictures(input_shape, classes):
    return keras.Sequential([layers.Dense(classes)])


def two(input_shape, classes):
    model = functional(input_shape, classes)
    return keras.Model(model.inputs, [model.output, model.output])


def half(input_shape, classes):
    return functional(input_shape, classes, dtype="float16")


def other_input(input_shape, classes):
    return functional((4, 4, 1), classes)


def fails(input_shape, classes):
    raise ValueError("my own mistake")
"""


def test_the_table_of_applications_is_that_of_keras(tensorflow):
    import keras

    assert sorted(models.APPLICATIONS) == sorted(name for name in dir(keras.applications) if name[0].isupper())
