"""What an evaluation says about its examples: a line, a table of classes, a confusion matrix, every prediction in order.

Pure functions of NumPy arrays. Everywhere here `labels` and `predictions` are int [n], class numbers in input order, and
`classes` are the c classes' names; other types, lengths and numbers are a ValueError that says what was received.
"""

import contextlib
import csv
import os

import numpy as np

_TABLE_CLASSES, _EXTREMES = 50, 10
_TEXT_CLASSES = 20
_NAME_LENGTH = 24


def summary_line(top_1: float, top_5: float | None, loss: float, examples: int) -> str:
    """The line that programs parse; accuracies in [0, 1]. `top_5` is None where there are fewer than 6 classes."""
    fifth = "" if top_5 is None else f" Accuracy @ 5 = {top_5:.4f}"
    return f"Accuracy @ 1 = {top_1:.4f}{fifth} [{examples} examples] loss = {loss:.4f}"


def class_table(labels, predictions, classes: tuple[str, ...]) -> str:
    """A line for each class, and one for all, whose recall and precision both are the accuracy.

    'most often taken for' is the most frequent wrong prediction and how often it was made; of several the first. '-' is
    what nothing is known of: the recall of a class without examples, the precision of one that was never predicted. More
    than 50 classes are cut to the 10 best and the 10 worst by recall, best first, classes of equal recall in their order.

    Raises:
      ValueError: see the module.
    """
    labels, predictions = _checked(labels, predictions, classes)
    examples, predicted, correct = (
        np.bincount(numbers, minlength=len(classes)) for numbers in (labels, predictions, labels[labels == predictions])
    )
    shown, lines = range(len(classes)), []
    if len(classes) > _TABLE_CLASSES:
        shown = sorted(np.flatnonzero(examples), key=lambda k: -correct[k] / examples[k])
        if len(shown) > 2 * _EXTREMES:
            shown = shown[:_EXTREMES] + shown[-_EXTREMES:]
        lines = [
            f"{len(shown)} of {len(classes)} classes: the {_EXTREMES} best and the {_EXTREMES} worst by recall, best first; "
            "classes without examples are left out"
        ]

    def taken_for(k):
        wrong = np.bincount(predictions[(labels == k) & (predictions != k)], minlength=1)
        return f"{_short(classes[wrong.argmax()])} ({wrong.max()})" if wrong.any() else "-"

    def row(name, examples, correct, predicted, taken_for):
        return name, str(examples), str(correct), _share(correct, examples), _share(correct, predicted), taken_for

    rows = [("class", "examples", "correct", "recall", "precision", "most often taken for")]
    rows += [row(_short(classes[k]), examples[k], correct[k], predicted[k], taken_for(k)) for k in shown]
    rows += [row("all", len(labels), correct.sum(), len(labels), "-")]
    return "\n".join(lines + _aligned(rows))


def confusion_counts(labels, predictions, classes: tuple[str, ...]) -> np.ndarray:
    """How many examples of each true class (row) were taken for each class (column): int64 [c, c], of sum n.

    Raises:
      ValueError: see the module.
    """
    labels, predictions = _checked(labels, predictions, classes)
    c = len(classes)
    return np.bincount(labels * c + predictions, minlength=c * c).reshape(c, c)


def confusion_picture(counts: np.ndarray, classes: tuple[str, ...], path: str):
    """Writes `confusion_counts` as a PNG file; colour is the share of a true class's examples.

    Up to 20 classes have their names at the axes and their counts, but for 0, in the cells; more have their numbers alone.

    Raises:
      OSError: if the file cannot be written; what was at `path` is then still there.
    """
    from matplotlib.figure import Figure  # draws with Agg, whatever display there is, and leaves pyplot's state alone

    c, examples = len(counts), counts.sum()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = max(4, 0.5 * c) if c <= _TEXT_CLASSES else 8  # inches
    figure = Figure(figsize=(side, side))
    axes = figure.add_axes((0, 0, 1, 1))  # names go outside, where bbox_inches="tight" finds them: they shrink no cell
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.04, 1)), label="share of the true class")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(f"{examples} examples, accuracy {_share(np.trace(counts), examples)}")
    if c <= _TEXT_CLASSES:
        names = [_short(name) for name in classes]
        upright = 0 if max(map(len, names)) <= 3 else 90
        axes.set_xticks(range(c), names, rotation=upright, parse_math=False)  # a $ in a name is a dollar
        axes.set_yticks(range(c), names, parse_math=False)
        size = min(10, 48 / len(str(counts.max())))  # points: as many digits fit into half an inch
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=colour, size=size)
    with renamed(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")


def write_predictions(path: str, keys, labels, logits: np.ndarray, classes: tuple[str, ...], example_losses=None):
    """Writes a CSV file (RFC 4180: CR LF, a header; UTF-8) of one record an example, in input order.

    Columns: index, key, label, label_name, predicted, predicted_name, probability; loss, where `example_losses` are given.
    The prediction is the largest logit, of equal ones the first; `probability` is its softmax, and nan if a logit is.

    Args:
      keys: n strings or numbers that tell the user which example it was.
      logits: float [n, c].
      example_losses: float [n].
    Raises:
      ValueError: see the module.
      OSError: if the file cannot be written; what was at `path` is then still there.
    """
    logits = np.asarray(logits)
    if logits.shape != (len(labels), len(classes)):
        raise ValueError(f"logits must be [{len(labels)} examples, {len(classes)} classes], received {list(logits.shape)}")
    labels, predictions = _checked(labels, logits.argmax(-1), classes)
    losses = [()] * len(labels) if example_losses is None else [(f"{loss:.6g}",) for loss in example_losses]
    if not len(keys) == len(losses) == len(labels):
        raise ValueError(f"{len(labels)} labels need as many keys and losses, received {len(keys)} and {len(losses)}")
    header = ["index", "key", "label", "label_name", "predicted", "predicted_name", "probability"]
    with renamed(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)  # ends lines by CR LF: given LF alone, Python 3.11 does not quote a CR in a key
        writer.writerow(header if example_losses is None else [*header, "loss"])
        for i, (key, label, predicted, loss) in enumerate(zip(keys, labels, predictions, losses, strict=True)):
            probability = f"{_largest_probability(logits[i]):.6g}"
            writer.writerow([i, key, label, classes[label], predicted, classes[predicted], probability, *loss])


def _largest_probability(logits):
    with np.errstate(invalid="ignore"):  # inf - inf is nan, as promised
        return 1 / np.exp(logits.astype(np.float64) - logits.max()).sum()


def _checked(labels, predictions, classes):
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if labels.ndim != 1 or labels.shape != predictions.shape:
        raise ValueError(f"labels and predictions must be [n], received {list(labels.shape)} and {list(predictions.shape)}")
    for name, numbers in (("labels", labels), ("predictions", predictions)):
        if numbers.dtype.kind not in "iu":
            raise ValueError(f"{name} must be integers, received {numbers.dtype}")
        outside = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
        if len(outside):
            at = outside[0]
            raise ValueError(f"{name} must be 0 to {len(classes) - 1}, received {numbers[at]} for example {at}")
    return labels.astype(np.int64), predictions.astype(np.int64)


def _aligned(rows):
    """Lines of cells: the first and the last column begin, those between end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:-1]), "{}"])
    return [template.format(*cells) for cells in rows]


def _share(part, whole):
    return f"{part / whole:.4f}" if whole else "-"


def _short(name):
    name = " ".join(name.split())
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


@contextlib.contextmanager
def renamed(path):
    """A temporary name beside `path`, renamed at the end, so that `path` never holds half a file."""
    temporary = f"{path}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
