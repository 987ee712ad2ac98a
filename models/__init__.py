"""The networks by name. A new one is a function (input_shape, classes) -> keras.Model, and a line in this table."""

import importlib

NAMES = {
    "small_cnn": "models.small_cnn:small_cnn",
}


def build(name: str, input_shape: tuple[int, int, int], classes: int):
    """Builds the network `name` for images of `input_shape` [height, width, channels]; its outputs are logits [classes]."""
    module, function = NAMES[name].split(":")
    return getattr(importlib.import_module(module), function)(input_shape, classes)
