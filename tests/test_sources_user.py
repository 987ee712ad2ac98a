"""The user's own function: what it may return, and what is refused in one line."""

import sys

import pytest
from test_sources import refusal

from app import sources

USER = """
import numpy as np
x, y = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1), np.array([0, 1])
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a module of the user's in the current folder; mine('return ...') is the name of its function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def name(body, parameters=""):
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        module = f"mine_{abs(hash((body, parameters)))}"
        (tmp_path / f"{module}.py").write_text(f"{USER}\ndef load({parameters}):\n{lines}")
        return f"{module}:load"

    return name


@pytest.mark.parametrize(
    "returned",
    [
        "(x, y), (x[:1], y[:1])",
        "[[x, y], [x[:1], y[:1]]]",
        "{'train': (x, y), 'test': (x[:1], y[:1])}",
        "(x[..., 0], y[:, None]), (x[:1, ..., 0], y[:1].astype(float))",
        "(x.tolist and np.array(x), y.tolist()), (x[:1], [0])",
    ],
)
def test_a_users_arrays_become_examples(mine, returned):
    name = mine(f"return {returned}")
    source = sources.open_source(name)
    assert (source.image_shape, source.classes, len(source.test)) == ((3, 4, 1), ("0", "1"), 1)
    assert [example.image.reshape(-1).tolist() for example in source.train] == [list(range(12)), list(range(12, 24))]
    assert [example.label for example in source.train] == [0, 1]
    assert source.train[1].key == f"{name} train[1]"


def test_a_user_may_hold_nothing_out_and_be_given_the_folder(mine):
    source = sources.open_source(mine("return {'train': (x + int(data_dir), y)}", "data_dir=None"), "100")
    assert source.test is None
    assert source.train[0].image[0, 0, 0] == 100


@pytest.mark.parametrize(
    "returned",
    [
        "{'train': tf.data.Dataset.from_tensor_slices((x, y))}",
        "tf.data.Dataset.from_tensor_slices((x, y)), None",
        "tf.data.Dataset.from_tensor_slices((x[..., 0], y[:, None])), (x, y)",
        "{'train': tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True)}",
    ],
)
def test_a_users_finite_dataset_becomes_examples(tensorflow, mine, returned):
    source = sources.open_source(mine(f"import tensorflow as tf\nreturn {returned}"))
    assert [example.image.reshape(-1).tolist() for example in source.train] == [list(range(12)), list(range(12, 24))]
    assert [example.label for example in source.train] == [0, 1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return x, y", "train: is ndarray, not (images, labels)"),
        ("return x", "returned ndarray"),
        ("return {'training': (x, y)}", "a dict of ['training']"),
        ("return {'train': (x, [0.5, 1.0])}", "train[0]: its label is 0.5"),
        ("return {'train': (x, [0, -1])}", "train[1]: its label is -1"),
        ("return {'train': (x, [0, float('nan')])}", "train[1]: its label is nan"),
        ("return {'train': (x, [float('inf'), 0])}", "train[0]: its label is inf"),
        ("return {'train': (x, [0, 10**9])}", "train[1]: its label is 1000000000"),
        ("return {'train': (x, ['cat', 'dog'])}", "labels are <U3"),
        ("return {'train': (x, np.eye(2))}", "labels float64 [2, 2] for 2 images"),
        ("return {'train': (x, [0])}", "labels int64 [1] for 2 images"),
        ("return {'train': ([x[0], x[1][:2]], y)}", "differing shape"),
        ("return {'train': (x / 255, y)}", "float64 [2, 3, 4, 1]; expected uint8 or float32"),
        ("return {'train': (x.reshape(2, -1), y)}", "uint8 [2, 12]; expected"),
        ("return {'train': (np.where(x == 12, np.nan, x).astype('float32'), y)}", "train[1]: a pixel is NaN"),
        ("return (x, y), (x[:, :2], y)", "test: images uint8 [2, 2, 4, 1], but those of train are uint8 [2, 3, 4, 1]"),
        ("return (x, y), (x.astype('float32'), y)", "test: images float32"),
        ("return (x, y), (x, y + 1)", "test[1]: its label is 2, but labels go from 0 to 1"),
        ("return {'train': (x[:0], y[:0])}", "the train split has no examples"),
    ],
)
def test_what_a_user_returns_wrongly_is_refused(mine, body, says):
    name = mine(body)
    message = refusal(name)
    assert says in message
    assert message.startswith(name)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("from_tensor_slices((x, y)).repeat()", "endless"),
        ("from_tensor_slices((x, y)).batch(2)", "no (image, label)"),
        ("from_tensor_slices({'image': x, 'label': y})", "no (image, label)"),
        ("from_tensor_slices(x)", "no (image, label)"),
        (
            "from_tensor_slices((x, y)).map(lambda x, y: (x[:y + 1], y))",
            "train[1]: an image of shape [2, 4, 1] after [1, 4, 1]",
        ),
        ("from_tensor_slices((x, y)).filter(lambda x, y: True).repeat()", "endless"),
    ],
)
def test_a_users_dataset_that_cannot_be_held_is_refused(tensorflow, mine, dataset, says):
    assert says in refusal(mine(f"import tensorflow as tf\nreturn {{'train': tf.data.Dataset.{dataset}}}"))


def test_a_users_dataset_of_unknown_length_stops_at_the_limit(tensorflow, mine, monkeypatch):
    monkeypatch.setattr("app.sources.user.MOST_BYTES", 1000)
    endless = "tf.data.Dataset.from_generator(lambda: iter(lambda: (x[0], 0), 1), (tf.uint8, tf.int32))"
    assert "more than 0 GiB" in refusal(mine(f"import tensorflow as tf\nreturn {{'train': {endless}}}"))


def test_a_function_that_cannot_be_called_is_refused(mine):
    assert "cannot import it: ModuleNotFoundError: No module named 'nobodys'" in refusal("nobodys.module:load")
    name = mine("return x")
    assert "cannot import it: AttributeError" in refusal(name.replace("load", "lode"))
    assert "is ndarray, not a function" in refusal(name.replace("load", "x"))
    assert "missing a required argument: 'where'" in refusal(mine("return x", "where"))
    assert "cannot import it: ZeroDivisionError" in refusal(mine("pass", "x=1 / 0"))


def test_what_a_users_function_raises_is_left_to_be_seen(mine):
    with pytest.raises(KeyError, match="mistake"):
        sources.open_source(mine("raise KeyError('mistake')"))
