"""Evaluation of a saved model: every held-out example once, on any number of workers, with the same numbers to the last bit."""

import dataclasses
import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

from app import early, faults, report
from app.assembly import compile_trainer, open_data, trainer
from app.config import Config, UsageError
from cluster import spec


class ConfusionCounts(keras.metrics.Metric):
    """How often class i (row) was taken for class j (column), [classes, classes]; its result is how many examples that was."""

    def __init__(self, classes, name="examples"):
        super().__init__(name=name)
        self._classes = classes
        self.counts = self.add_variable((classes, classes), "zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = tf.argmax(y_true, -1) if len(y_true.shape) == 2 and y_true.shape[-1] > 1 else tf.reshape(y_true, [-1])
        predictions = tf.argmax(y_pred, -1)
        self.counts.assign_add(tf.math.confusion_matrix(labels, predictions, self._classes, dtype=self.counts.dtype))

    def result(self):
        return keras.ops.sum(self.counts)


def evaluate(config: Config, strategy, keras_file: str, confusion: str = "", predictions: str = "") -> dict:
    """Evaluates a `.keras` file on the configuration's held-out examples, and prints what it finds.

    Args:
      config: data set, batch and logical replicas; the flags for training have no part in it.
      strategy: as for training.
      keras_file: a classifier of logits.
      confusion: write the confusion matrix to this PNG file.
      predictions: write every prediction, in input order, to this CSV file.
    Returns:
      Keras's logs, {"loss", "top_1", ...}.
    Raises:
      UsageError: if the file does not fit the data, or nothing is held out.
    """
    me = spec.from_environment()
    chief = strategy.extended.should_checkpoint
    say = print if chief else lambda *_, **__: None
    for flag, path in (("confusion", confusion), ("predictions", predictions)):
        early.check_output(flag, path)
    if not tf.io.gfile.exists(keras_file):
        raise UsageError(f"--keras_file={keras_file} does not exist")
    with tf.io.gfile.GFile(keras_file, "rb") as file:
        model_sha256 = hashlib.sha256(file.read()).hexdigest()
    say(f"evaluating {keras_file} on {config.dataset}")
    data = open_data(config, strategy, me, say, model=model_sha256)
    classes = data.manifest.classes
    if data.evaluation is None:
        raise UsageError(f"{config.dataset} has no held-out examples to evaluate")
    with strategy.scope():
        plain = _open(keras_file, data)
        model = trainer(dataclasses.replace(config, asynchronous=False), plain)
        matrix = ConfusionCounts(len(classes))
        compile_trainer(model, "sgd", config, len(classes), [matrix])
    with faults.named(data, me):
        logs = model.evaluate(data.evaluation, verbose=0, return_dict=True)
    counts = np.rint(model.metric_value(matrix.counts)).astype(int)
    cells = np.repeat(np.arange(counts.size), counts.ravel())
    labels, predicted = np.divmod(cells, len(classes))
    say(report.class_table(labels, predicted, classes))
    say(report.summary_line(logs["top_1"], logs.get("top_5"), logs["loss"], model.examples_evaluated), flush=True)
    if chief and confusion:
        report.confusion_picture(counts, classes, confusion)
        say(f"saved   {confusion}")
    if chief and predictions:
        _write_predictions(config, data, plain, predictions)
        say(f"saved   {predictions}")
    return logs


def _open(keras_file, data):
    try:
        plain = keras.models.load_model(keras_file, compile=False)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"--keras_file={keras_file} cannot be opened: {str(error).splitlines()[0]}") from None
    wanted, found = (*data.image_shape, len(data.manifest.classes)), (*plain.input_shape[1:], plain.output_shape[-1])
    if wanted != found:
        raise UsageError(
            f"--keras_file={keras_file} takes images of {found[:-1]} and knows {found[-1]} classes; "
            f"{data.manifest.dataset} has {wanted[:-1]} and {wanted[-1]}"
        )
    return plain


def _write_predictions(config, data, plain, path):
    """All examples on this process, a logical replica's batch at a time: the shapes, and so the bits, of the evaluation."""
    replicas, size = config.logical_replicas, config.replica_batch_size
    parts = [([], []) for _ in range(replicas)]
    for number, ((images, labels), valid) in enumerate(
        data.evaluation.examples(0, replicas, size).batch(size).take(data.evaluation.steps * replicas)
    ):
        count = int(tf.reduce_sum(tf.cast(valid, tf.int32)))
        if count:
            classes = labels[:count].numpy()
            parts[number % replicas][0].append(classes if classes.ndim == 1 else classes.argmax(-1))
            parts[number % replicas][1].append(plain(images[:count], training=False).numpy())
    labels, logits = (np.concatenate([batch for part in parts for batch in part[i]]) for i in (0, 1))
    keys = [f"{os.path.basename(s.path)}[{r}]" for s in data.manifest.test.shards for r in range(s.examples)]
    bad = {f"{os.path.basename(data.manifest.test.shards[s].path)}[{r}]" for s, r in data.manifest.test.bad}
    report.write_predictions(path, [key for key in keys if key not in bad], labels, logits, data.manifest.classes)
