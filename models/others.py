"""Networks that are not ours: those of keras.applications, and functions of the user's, checked before they are used."""

import contextlib
import inspect

import keras

from models import ModelError, imported


def application(name: str, input_shape, classes: int) -> keras.Model:
    """The network 'keras:NAME' of keras.applications, with random weights and logits as outputs.

    Where the class scales its input and lets one choose, it does not: images arrive scaled.

    Raises:
      ModelError: if it cannot take such images.
    """
    with one_line(name):
        return _with_float32_logits(_applied(name, weights=None, input_shape=input_shape, classes=classes))


def pretrained(name: str) -> keras.Model:
    """The network 'keras:NAME' for ImageNet with the weights that Keras downloads. Raises what that raises."""
    return _applied(name, weights="imagenet")


def _applied(name, **arguments):
    builder = getattr(keras.applications, name.removeprefix("keras:"))
    scaling = {"include_preprocessing": False} if "include_preprocessing" in inspect.signature(builder).parameters else {}
    return builder(classifier_activation=None, **arguments, **scaling)


def users(name: str, input_shape, classes: int) -> keras.Model:
    """The network of 'package.module:function', looked for in the current folder, on PYTHONPATH and in installed packages.

    Raises:
      ModelError: if it cannot be imported or called, or what it returns is not a keras.Model from such images to float32
        logits [batch, classes]. What the function itself raises is passed on.
    """
    function = imported.function(name, ModelError)
    if problem := imported.fits(function, input_shape, classes):
        raise ModelError(f"{name}: cannot be called with (input_shape, classes): {problem}")
    model = function(input_shape, classes)
    if not isinstance(model, keras.Model):
        raise ModelError(f"{name}: returned {type(model).__name__}, not a keras.Model")
    with one_line(name):
        outputs = model(keras.Input(input_shape))  # which builds a model that has not been called yet
    shapes = [tuple(output.shape) for output in keras.tree.flatten(outputs)]
    if shapes != [(None, classes)]:
        raise ModelError(f"{name}: outputs {', '.join(map(_shown, shapes))}; expected logits {_shown((None, classes))}")
    dtype = keras.tree.flatten(outputs)[0].dtype
    if dtype != "float32":
        raise ModelError(f"{name}: outputs {dtype}; give the last layer dtype='float32', so that the loss is exact")
    return model


@contextlib.contextmanager
def one_line(name: str):
    """Turns a ValueError of Keras's into a ModelError: one line that begins with the name of the network."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{name}: {imported.first_line(error)}") from error


def _with_float32_logits(model):
    """The model itself; under a mixed dtype policy, with its last layer made again in float32."""
    if model.output.dtype == "float32":
        return model
    last = model.layers[-1]
    again = type(last).from_config({**last.get_config(), "dtype": "float32"})
    return keras.Model(model.inputs, again(last.input), name=model.name)


def _shown(shape):
    return f"[{', '.join(map(str, shape))}]"
