"""The networks by name: a new one is a function (input_shape, classes) -> keras.Model, and an entry in NAMES.

The table, `check_name` and `listing` import nothing of TensorFlow, so that a mistake in a name is answered at once.
"""

import dataclasses
import difflib
import importlib
import re


class ModelError(ValueError):
    """A network that cannot be used: one line. What a user's own function raises is none."""


@dataclasses.dataclass(frozen=True)
class Network:
    """An entry of the table.

    Attributes:
      builder: 'module:function', a function (input_shape, classes) -> keras.Model whose outputs are float32 logits
        [batch, classes]; or 'keras:NAME', of keras.applications.
      input_shape: [height, width, channels] of the images that it was designed for; others work too.
      classes: how many it was designed for; any number works.
      parameters: trainable parameters for that input and so many classes.
      about: what it is, and its source, in one line.
    """

    builder: str
    input_shape: tuple[int, int, int]
    classes: int
    parameters: int
    about: str


def _cifar(function, parameters, about):
    return Network(f"models.resnet:{function}", (32, 32, 3), 10, parameters, about)


def _imagenet(function, parameters, about):
    return Network(f"models.{function}", (224, 224, 3), 1000, parameters, about)


_V1 = "He et al. 2015, arXiv 1512.03385"
_V1_5 = "stride in the 3x3; Goyal et al. 2017, arXiv 1706.02677, 5.1"
_V2 = "pre-activation; He et al. 2016, arXiv 1603.05027"
_VGG = "with dropout; Simonyan and Zisserman 2014, arXiv 1409.1556"
_INCEPTION = "without auxiliary head; Szegedy et al. 2015, arXiv 1512.00567"

NAMES = {
    "small_cnn": Network("models.small_cnn:small_cnn", (8, 8, 1), 10, 99_370, "4 convolutions with batch norm, dropout"),
    "trivial": Network("models.small:trivial", (227, 227, 3), 1000, 4_259_780, "dense 1, 4096: measures all but the network"),
    "lenet": Network("models.small:lenet", (28, 28, 1), 10, 1_663_370, "2 convolutions, dense 512; after LeCun et al. 1998"),
    "resnet20": _cifar("resnet20", 269_722, f"{_V1}, 4.2"),
    "resnet32": _cifar("resnet32", 464_154, f"{_V1}, 4.2"),
    "resnet44": _cifar("resnet44", 658_586, f"{_V1}, 4.2"),
    "resnet56": _cifar("resnet56", 853_018, f"{_V1}, 4.2"),
    "resnet110": _cifar("resnet110", 1_727_962, f"{_V1}, 4.2"),
    "resnet20_v2": _cifar("resnet20_v2", 269_402, _V2),
    "resnet32_v2": _cifar("resnet32_v2", 463_610, _V2),
    "resnet44_v2": _cifar("resnet44_v2", 657_818, _V2),
    "resnet56_v2": _cifar("resnet56_v2", 852_026, _V2),
    "resnet110_v2": _cifar("resnet110_v2", 1_725_962, _V2),
    "resnet50": _imagenet("resnet:resnet50", 25_557_032, f"{_V1}, table 1"),
    "resnet50_v1.5": _imagenet("resnet:resnet50_v1_5", 25_557_032, _V1_5),
    "resnet50_v2": _imagenet("resnet:resnet50_v2", 25_534_312, _V2),
    "resnet101": _imagenet("resnet:resnet101", 44_549_160, f"{_V1}, table 1"),
    "resnet101_v2": _imagenet("resnet:resnet101_v2", 44_509_032, _V2),
    "resnet152": _imagenet("resnet:resnet152", 60_192_808, f"{_V1}, table 1"),
    "resnet152_v2": _imagenet("resnet:resnet152_v2", 60_137_320, _V2),
    "vgg16": _imagenet("vgg:vgg16", 138_357_544, _VGG),
    "vgg19": _imagenet("vgg:vgg19", 143_667_240, _VGG),
    "inception3": Network("keras:InceptionV3", (299, 299, 3), 1000, 23_817_352, _INCEPTION),
}
_OF_KERAS = """
ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201 EfficientNetB0
EfficientNetB1 EfficientNetB2 EfficientNetB3 EfficientNetB4 EfficientNetB5 EfficientNetB6 EfficientNetB7 EfficientNetV2B0
EfficientNetV2B1 EfficientNetV2B2 EfficientNetV2B3 EfficientNetV2L EfficientNetV2M EfficientNetV2S InceptionResNetV2 InceptionV3
MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetLarge NASNetMobile ResNet101 ResNet101V2 ResNet152 ResNet152V2
ResNet50 ResNet50V2 VGG16 VGG19 Xception
"""
APPLICATIONS = tuple(_OF_KERAS.split())  # all that keras.applications has (a test compares)
OTHERS = "keras:NAME of keras.applications, or a function of your own as package.module:function"
_WORD = r"[^\W\d]\w*"
_OTHER = re.compile(rf"keras:{_WORD}|{_WORD}(\.{_WORD})*:{_WORD}")


def check_name(name: str) -> str | None:
    """What is wrong with the name of a network, in one line; None if nothing is, as far as the name tells."""
    if name.startswith("keras:") and _OTHER.fullmatch(name) and name.removeprefix("keras:") not in APPLICATIONS:
        lower = {application.lower(): application for application in APPLICATIONS}
        near = difflib.get_close_matches(name.removeprefix("keras:").lower(), lower, n=1)
        return f"network {name!r} is unknown{f'; did you mean keras:{lower[near[0]]}?' if near else ''}"
    if name in NAMES or _OTHER.fullmatch(name):
        return None
    if ":" in name:
        return f"network {name!r} is not well formed; expected {OTHERS}"
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    return f"network {name!r} is unknown{f'; did you mean {near[0]}?' if near else '.'} One of: {', '.join(NAMES)}; {OTHERS}"


def build(name: str, input_shape: tuple[int, int, int], classes: int):
    """Builds a network.

    Args:
      name: one of NAMES; 'keras:NAME', a network of keras.applications without weights and, where it lets one choose, without
        preprocessing of its own; or 'package.module:function', a function (input_shape, classes) -> keras.Model, looked
        for in the current folder too.
      input_shape: [height, width, channels] of the images.
      classes: number of logits.
    Returns:
      A keras.Model from images [batch, *input_shape] to logits [batch, classes], float32 under every dtype policy.
    Raises:
      ModelError: in one line, if there is no such network, if it cannot take such images, or if a user's function gives
        something else. What that function itself raises is passed on.
    """
    if problem := check_name(name):
        raise ModelError(problem)
    from models import others  # imports Keras

    builder = NAMES[name].builder if name in NAMES else name
    if builder.startswith("keras:"):
        return others.application(builder, input_shape, classes)
    if name not in NAMES:
        return others.users(name, input_shape, classes)
    module, function = builder.split(":")
    with others.one_line(name):
        return getattr(importlib.import_module(module), function)(input_shape, classes)


def listing() -> str:
    """The table of NAMES for people: name, input, classes, trainable parameters, a note with the source."""
    rows = [("name", "input", "classes", "trainable parameters", "")]
    for name, network in NAMES.items():
        shape = "x".join(map(str, network.input_shape))
        rows.append((name, shape, f"{network.classes:,}", f"{network.parameters:,}", network.about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip() for a, b, c, d, e in rows)
    return "\n".join([*lines, f"or {OTHERS}"])
