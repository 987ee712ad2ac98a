"""What an evaluation says, against scikit-learn on random predictions and against small cases written by hand."""

import csv
import re

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from app import report

ABC = ("a", "b", "c")


def random_case(c, n=500, seed=0):
    """Labels [n] without the last class, predictions [n] without the first one, and c names of no more than 7 letters."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, c - 1, n)
    predictions = np.where(rng.random(n) < 0.6, np.maximum(labels, 1), rng.integers(1, c, n))
    return labels, predictions, tuple(f"class{k}" for k in range(c))


def test_the_summary_is_the_line_that_programs_know():
    assert report.summary_line(0.12344, 0.5678, 1.23451, 360) == (
        "Accuracy @ 1 = 0.1234 Accuracy @ 5 = 0.5678 [360 examples] loss = 1.2345"
    )
    assert report.summary_line(1.0, None, 0.0, 1) == "Accuracy @ 1 = 1.0000 [1 examples] loss = 0.0000"


def test_a_small_table_reads_as_written_by_hand():
    classes = ("cat", "a  dog\nof a very long breed indeed", "mouse", "owl")
    table = report.class_table([0, 0, 0, 0, 1, 1, 2], [0, 2, 2, 1, 1, 1, 0], classes)
    assert table == (
        "class                     examples  correct  recall  precision  most often taken for\n"
        "cat                              4        1  0.2500     0.5000  mouse (2)\n"
        "a dog of a very long br…         2        2  1.0000     0.6667  -\n"
        "mouse                            1        0  0.0000     0.0000  cat (1)\n"
        "owl                              0        0       -          -  -\n"
        "all                              7        3  0.4286     0.4286  -"
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
@pytest.mark.parametrize("c", [2, 10, 200])
def test_counts_are_scikit_learns_and_miss_nobody(c, dtype):
    labels, predictions, classes = random_case(c)
    counts = report.confusion_counts(labels.astype(dtype), predictions.astype(dtype), classes)
    assert counts.dtype == np.int64
    assert counts.sum() == len(labels)
    np.testing.assert_array_equal(counts, metrics.confusion_matrix(labels, predictions, labels=range(c)))


@pytest.mark.parametrize("c", [2, 10, 50])
def test_every_class_has_scikit_learns_recall_and_precision(c):
    labels, predictions, classes = random_case(c)
    _, *lines, last = report.class_table(labels, predictions, classes).splitlines()
    options = {"labels": range(c), "average": None, "zero_division": np.nan}
    recall = metrics.recall_score(labels, predictions, **options)
    precision = metrics.precision_score(labels, predictions, **options)
    wrong = metrics.confusion_matrix(labels, predictions, labels=range(c)) * (1 - np.eye(c, dtype=int))
    assert len(lines) == c
    for k, line in enumerate(lines):
        name, examples, correct, *numbers = line.split(maxsplit=5)
        assert (name, int(examples)) == (classes[k], (labels == k).sum())
        assert int(correct) == ((labels == k) & (predictions == k)).sum()
        shares = ["-" if np.isnan(share) else f"{share:.4f}" for share in (recall[k], precision[k])]
        most = f"{classes[wrong[k].argmax()]} ({wrong[k].max()})" if wrong[k].any() else "-"
        assert numbers == [*shares, most]
    accuracy = f"{metrics.accuracy_score(labels, predictions):.4f}"
    assert last.split() == ["all", str(len(labels)), str((labels == predictions).sum()), accuracy, accuracy, "-"]


def test_of_many_classes_the_best_and_the_worst_are_shown_and_a_line_says_so():
    labels, predictions, classes = random_case(200, n=5000)
    says, _, *lines, last = report.class_table(labels, predictions, classes).splitlines()
    assert says == (
        "20 of 200 classes: the 10 best and the 10 worst by recall, best first; classes without examples are left out"
    )
    recall = metrics.recall_score(labels, predictions, labels=range(199), average=None)
    order = np.argsort(-recall, kind="stable")
    assert [line.split()[0] for line in lines] == [classes[k] for k in [*order[:10], *order[-10:]]]
    assert last.split()[:2] == ["all", "5000"]


def test_no_class_is_shown_twice_where_few_have_examples():
    says, _, *lines, _ = report.class_table([7, 3, 3], [7, 3, 0], tuple(map(str, range(51)))).splitlines()
    assert says.startswith("2 of 51 classes")
    assert [line.split()[0] for line in lines] == ["7", "3"]


def test_no_examples_are_no_numbers():
    nothing = np.zeros(0, np.int32)
    assert re.fullmatch(r"(a|b|c|all) +0 +0 +- +- +-", report.class_table(nothing, nothing, ABC).splitlines()[-1])
    assert report.confusion_counts(nothing, nothing, ABC).tolist() == [[0] * 3] * 3


@pytest.mark.parametrize("function", [report.class_table, report.confusion_counts])
@pytest.mark.parametrize(
    ("labels", "predictions", "says"),
    [
        ([0, 1], [0], "received [2] and [1]"),
        ([[0]], [[0]], "received [1, 1] and [1, 1]"),
        ([0, 3], [0, 1], "labels must be 0 to 2, received 3 for example 1"),
        ([0, 1], [-1, 1], "predictions must be 0 to 2, received -1 for example 0"),
        ([0.0], [0], "labels must be integers, received float64"),
    ],
)
def test_what_cannot_be_counted_is_refused(function, labels, predictions, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        function(labels, predictions, ABC)


@pytest.mark.parametrize("c", [2, 10, 20, 21, 300])
def test_a_picture_shows_a_cell_for_each_class_and_its_share_as_colour(c, tmp_path):
    path = tmp_path / "confusion.png"
    counts = np.eye(c, dtype=np.int64) * 1000
    counts[0] = 0
    report.confusion_picture(counts, tuple(f"$\\class_{k}$" for k in range(c)), str(path))
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert all(600 <= side <= 2200 for side in image.size)
        pixels = np.asarray(image.convert("RGB")).astype(int)
    dark = (np.abs(pixels - [8, 48, 107]) < 3).all(-1)  # the end of the map "Blues": all examples of a class
    assert dark.sum() > (c - 1) / c**2 * 400**2  # c - 1 cells of c * c, of at least 400 pixels' side
    assert list(tmp_path.iterdir()) == [path]


def test_how_many_examples_a_true_class_has_changes_no_colour(tmp_path):
    counts = np.random.default_rng(2).integers(0, 9, (30, 30))
    pictures = []
    for factors in (np.ones(30, int), np.arange(1, 31)):
        report.confusion_picture(counts * factors[:, None], ("",) * 30, str(tmp_path / "confusion.png"))
        with Image.open(tmp_path / "confusion.png") as image:
            pictures.append(np.asarray(image)[60:])  # below the title, whose numbers differ
    np.testing.assert_array_equal(*pictures)


def test_predictions_are_read_back_in_input_order(tmp_path):
    path = tmp_path / "predictions.csv"
    classes = ('dog, "big"', "line\nbreak", "Käfer")
    logits = np.log(np.float32([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.4, 0.4]]))
    report.write_predictions(path, ["b,1.png", 'a"2".png', "c\r"], np.array([0, 0, 2]), logits, classes)
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["index", "key", "label", "label_name", "predicted", "predicted_name", "probability"]
    assert rows == [
        ["0", "b,1.png", "0", 'dog, "big"', "0", 'dog, "big"', "0.5"],
        ["1", 'a"2".png', "0", 'dog, "big"', "2", "Käfer", "0.8"],
        ["2", "c\r", "2", "Käfer", "1", "line\nbreak", "0.4"],
    ]


def test_probabilities_are_a_softmax_at_any_scale(tmp_path):
    path = tmp_path / "predictions.csv"
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(60, 7)).astype(np.float32) * 10.0 ** rng.integers(-3, 5, (60, 1))
    labels, losses = rng.integers(0, 7, 60), rng.random(60)
    logits[0] = np.nan
    report.write_predictions(path, range(60), labels, logits, tuple("abcdefg"), losses)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    with np.errstate(over="ignore"):
        powers = np.exp(logits[1:].astype(np.longdouble))  # whose range needs no shift for logits up to 11356
    exact = np.array([float(p.max() / p.sum()) if np.isfinite(p).all() else np.nan for p in powers])
    assert np.isfinite(exact).sum() > 40
    written = np.array([float(row["probability"]) for row in rows])
    assert np.isnan(written[0])
    assert ((written[1:] > 1 / 7) & (written[1:] <= 1)).all()
    np.testing.assert_allclose(np.where(np.isfinite(exact), written[1:], np.nan), exact, rtol=5.1e-6)
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=5.1e-6)
    assert [int(row["predicted"]) for row in rows] == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    ("keys", "logits", "losses", "says"),
    [
        (2, (2, 4), None, "logits must be [2 examples, 3 classes], received [2, 4]"),
        (2, (3, 3), None, "received [3, 3]"),
        (1, (2, 3), None, "received 1 and 2"),
        (2, (2, 3), 3, "received 2 and 3"),
    ],
)
def test_predictions_that_do_not_fit_are_refused_and_nothing_is_written(keys, logits, losses, says, tmp_path):
    losses = losses and np.zeros(losses)
    with pytest.raises(ValueError, match=re.escape(says)):
        report.write_predictions(tmp_path / "p.csv", range(keys), np.array([0, 1]), np.zeros(logits), ABC, losses)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "predictions.csv"
    arguments = (path, "xyz", np.arange(3), np.eye(3, dtype=np.float32), ABC)
    report.write_predictions(*arguments)
    before = path.read_bytes()

    def full(logits):
        raise OSError("no space left on device")

    monkeypatch.setattr(report, "_largest_probability", full)
    with pytest.raises(OSError, match="no space"):
        report.write_predictions(*arguments)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
