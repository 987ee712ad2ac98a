"""Fingerprints of any Keras script, from outside: two lines in it, and not a bit of its training changes.

dataset, recorder = cluster.watch(model, dataset, "mine.jsonl")
model.fit(dataset, callbacks=[recorder])
"""

import collections
import functools
import json
import os

import keras
import numpy as np
import tensorflow as tf

from cluster import digest, preflight, trainer
from cluster.fingerprint import FORMAT, described
from cluster.replica_pass import is_seed


def watch(model, dataset, path="fingerprints.jsonl", every=1, keep=None):
    """Records what `model.fit` does with `dataset`, in the format of `fingerprint.py`.

    Known from outside are batch, loss, weights, moving statistics and the optimizer's variables, and so the update. Gradients
    are not, nor are metrics that Keras makes only in the first step. Of several replicas in a process (MirroredStrategy)
    metrics are summed, and the state is the first one's; hashes tell where the others hold another. In a cluster every worker
    writes its own file, of what it holds itself: the chief `path`, worker i `path`.worker-i. `compare` reads them together.

    Args:
      model: a compiled keras.Model.
      dataset: a tf.data.Dataset of batches (x, y[, sample_weight]), which `fit` itself distributes.
      path: of the file.
      every: record the first step and every so many.
      keep: a folder; the compiled model is kept there in model.keras, and batch and state before each recorded step in
        step-T.npz (see `Watch`), so that steps can be made again; by worker i in the folder `keep`.worker-i.
    Returns:
      (dataset, callback): fit with both. The data set yields what the given one does.
    Raises:
      ValueError: for what cannot be followed from outside: a model that is not compiled; data that is no tf.data.Dataset of
        numbers, or of which several workers do not read every batch; a `cluster.Trainer`, which records itself. And in `fit`,
        if several steps are made in one execution, if the model is not built or was compiled anew, or for other data.
    """
    _check(model, dataset, every)
    tap = _Tap()
    return tap.on(dataset), Watch(tap, path, every, keep, dataset.element_spec)


class Watch(keras.callbacks.Callback):
    """The callback of `watch`.

    A kept step-T.npz holds the variables before step T in the model's order, weights_i, statistics_i, optimizer_i, seeds_i, and
    the parts of its batch, x_i, y_i (sample weights are the last of y).
    """

    def __init__(self, tap, path, every, keep, element_spec):
        super().__init__()
        self._tap, self._path, self._every, self._keep = tap, path, every, keep
        self._batch_size = tf.nest.flatten(element_spec)[0].shape[0]
        self._file = None

    def on_train_begin(self, logs=None):
        if self.model.steps_per_execution > 1:
            raise ValueError(f"watch needs steps_per_execution=1; the model has {self.model.steps_per_execution}.")
        model, strategy = self.model, self.model.distribute_strategy
        if not model.built:
            raise ValueError(f"watch needs a model that has its weights: call {model.name} on a batch before fit.")
        if model.train_function != self._train:  # as a fit that has failed leaves it
            self._function, model.train_function = model.train_function, self._train
            for method in ("evaluate", "predict"):
                setattr(model, method, self._apart(getattr(model, method)))
        if self._file:  # a second `fit` goes on in the same file
            if [id(v) for v in _followed(model)] != self._ids:
                raise ValueError(f"{model.name} was compiled or frozen anew: watch it again, with another file.")
            return
        if not model.optimizer.built:  # Keras would do so in the first step
            model.optimizer.build(model.trainable_variables)
        self._variables = {
            "weights": model.trainable_variables,
            "statistics": [v for v in model.non_trainable_variables if not is_seed(v)],
            "optimizer": model.optimizer.variables,
        }
        self._ids = [id(v) for v in _followed(model)]
        self._seeds = [v for v in model.non_trainable_variables if is_seed(v)]
        self._metrics = [m for m in _flat(model.metrics) if isinstance(m, keras.metrics.Mean)]
        if "loss" not in [m.name for m in self._metrics]:
            raise ValueError(f"watch needs the metric 'loss', which compile makes; {model.name} has {model.metrics_names}.")
        worker, workers = _place(strategy)
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        self._file = open(self._path + (f".worker-{worker}" if worker else ""), "w")  # noqa: SIM115
        self._step, self._first = 0, True
        replicas = strategy.num_replicas_in_sync
        header = {"format": FORMAT, "made_by": "cluster.watch", "every": self._every, "global_batch_size": self._batch_size}
        header |= {"logical_replicas": replicas, "replicas": replicas, "machine": preflight.machine()}
        header |= {"worker": worker, "workers": workers} if workers > 1 else {}
        header |= {kind: described(variables) for kind, variables in self._variables.items()}
        if self._keep and worker:
            self._keep += f".worker-{worker}"
        header["metrics"] = described([v for m in self._metrics for v in m.variables])
        self._begin = [header, {"step": 0, **_digests(self._values())}]
        if self._keep:
            header["kept"] = os.path.relpath(self._keep, os.path.dirname(os.path.abspath(self._path)))
            os.makedirs(self._keep, exist_ok=True)
            model.save(os.path.join(self._keep, "model.keras"))

    def _train(self, iterator):
        """Keras's own step, in the place of `model.train_function` while it fits."""
        self._due = self._first or (self._step + 1) % self._every == 0
        if not self._due:
            return self._function(iterator)
        self._before = self._values()
        self._seeds_before = [v.numpy() for v in self._seeds]
        self._rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        # A mean's total is total + the step's sum. Starting from 0 leaves the step's sum itself, and adding it to the total
        # afterwards is the very addition that the metric would have made. Each replica has its own; reading them together
        # would round otherwise, and be a collective in a cluster.
        copies = [[self._held(v) for v in m.variables] for m in self._metrics]
        totals = tf.nest.map_structure(lambda copy: copy.numpy(), copies)
        tf.nest.map_structure(lambda copy: copy.assign(tf.zeros_like(copy)), copies)
        try:
            logs = self._function(iterator)
        finally:  # the data may have ended instead
            self._of_step = tf.nest.map_structure(lambda copy: copy.numpy(), copies)
            tf.nest.map_structure(lambda copy, a, b: copy.assign(a + b), copies, totals, self._of_step)
        alone = self.model.distribute_strategy.num_replicas_in_sync == 1
        return self.model.get_metrics_result() if alone else logs  # for other callbacks: since the epoch's beginning

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        parts = self._tap.next()
        if not self._due:
            return
        self._first = False
        sums = [[sum(held[1:], held[0]) for held in of_metric] for of_metric in self._of_step]
        metrics = {m.name: float(m.stateless_result(part)) for m, part in zip(self._metrics, sums, strict=True)}
        after = self._values()
        update = [a - b for a, b in zip(after["weights"], self._before["weights"], strict=True)]
        x, *labels = parts if isinstance(parts, tuple) else (parts,)
        count = len(tf.nest.flatten(x)[0])
        scale = getattr(self.model.optimizer, "dynamic_scale", None)
        if self._begin:
            self._begin[0]["global_batch_size"] = self._begin[0]["global_batch_size"] or count
            for line in self._begin:
                self._write(line)
            self._begin = []
        self._write(
            {
                "step": self._step,
                "loss": metrics["loss"].hex(),
                "metrics": metrics,
                "metric_sums": [np.ravel(part).tolist() for of_metric in sums for part in of_metric],
                "learning_rate": self._rate,
                "loss_scale": 1.0 if scale is None else float(keras.ops.convert_to_numpy(scale)),
                "x": digest.hex_digits(digest.of_examples(x, count)),
                "y": digest.hex_digits(digest.of_examples(labels, count)),
                **_digests({"update": update, **after}),
                **({"workers": self._by_replica()} if self.model.distribute_strategy.num_replicas_in_sync > 1 else {}),
            }
        )
        if self._keep:
            self._save(x, labels)

    def _save(self, x, labels):
        kinds = {**self._before, "seeds": self._seeds_before, "x": tf.nest.flatten(x), "y": tf.nest.flatten(labels)}
        arrays = {f"{kind}_{i}": array for kind, parts in kinds.items() for i, array in enumerate(parts)}
        np.savez(os.path.join(self._keep, f"step-{self._step}.npz"), **arrays)

    def _apart(self, method):
        """`evaluate` or `predict`, whose batches are not training's: fit's own, and those of other callbacks."""

        @functools.wraps(method)
        def called(*args, **kwargs):
            self._tap.training = False
            try:
                return method(*args, **kwargs)
            finally:
                self._tap.training = True

        return called

    def on_train_end(self, logs=None):
        self.model.train_function = self._function
        for method in ("evaluate", "predict"):
            vars(self.model).pop(method, None)

    def _held(self, variable):
        """The variable of TensorFlow on each device of this process."""
        return list(self.model.distribute_strategy.experimental_local_results(variable.value))

    def _by_replica(self):
        """A hash of the weights, and one of the moving statistics, on each device of this process."""
        found = {}
        for kind in ("weights", "statistics"):
            by_device = zip(*map(self._held, self._variables[kind]), strict=True)
            hashes = [digest.one_hash(digest.of([tf.convert_to_tensor(v) for v in held]).hash) for held in by_device]
            found[kind] = digest.hex_digits(tf.stack(hashes)) if hashes else []
        return found

    def _values(self):
        return {kind: [v.numpy() for v in variables] for kind, variables in self._variables.items()}

    def _write(self, line):
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class _Tap:
    """Remembers the batches that training reads of a data set, in their order, until they have been asked for.

    Keras may read ahead, starts the data set anew for an epoch or to look at its first batch, and evaluates from iterators that
    it keeps: the one that training reads is the newest of those whose first batch was not read by `evaluate` or `predict`.
    Iterators are numbered as they read that batch, and not when they are made, since `shuffle` draws its order then, whether
    somebody reads from it or not.
    """

    def __init__(self):
        self.training = True  # not evaluating
        self._begun = 0
        self._newest = 0, collections.deque()  # its number, and its batches that were not asked for yet

    def on(self, dataset):
        def remembered(number, *batch):
            batch = batch if len(batch) > 1 else batch[0]
            remember = tf.numpy_function(self._remember, [number, *tf.nest.flatten(batch)], [])
            with tf.control_dependencies([remember]):
                return tf.nest.map_structure(tf.identity, batch)

        self._spec = dataset.element_spec
        begin = lambda _: tf.ensure_shape(tf.numpy_function(self._begin, [], tf.int64), [])  # noqa: E731
        numbers = tf.data.Dataset.from_tensors(0).map(begin).flat_map(lambda n: tf.data.Dataset.from_tensors(n).repeat())
        numbers = numbers.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        numbered = tf.data.Dataset.zip(numbers, dataset)  # its cardinality is the data set's
        return numbered.map(lambda number, batch: remembered(number, *(batch if isinstance(batch, tuple) else (batch,))))

    def next(self):
        """The oldest batch that has not been asked for, as NumPy arrays. Raises ValueError."""
        _, batches = self._newest
        if not batches:
            raise ValueError(
                "fit trains on other data than watch has returned: dataset, recorder = cluster.watch(model, dataset)."
            )
        return tf.nest.pack_sequence_as(self._spec, batches.popleft())

    def _begin(self):
        self._begun += 1
        if self.training:
            self._newest = self._begun, collections.deque()
        return np.int64(self._begun)

    def _remember(self, number, *parts):
        newest, batches = self._newest
        if number == newest:
            batches.append([np.array(part) for part in parts])


_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset")


def _check(model, dataset, every):
    if isinstance(model, trainer.Trainer):
        raise ValueError("watch is for models that Keras trains; a cluster.Trainer records itself: fit(..., fingerprints=...).")
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ValueError(f"watch needs a model compiled with an optimizer; {model.name} is not.")
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"watch needs a tf.data.Dataset, which fit itself distributes; got {type(dataset).__name__}.")
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string for spec in specs):
        raise ValueError(f"watch needs batches of dense numbers; this data set has {dataset.element_spec}.")
    if every < 1:
        raise ValueError(f"every={every}: record every so many steps, 1 or more.")
    if _place(model.distribute_strategy)[1] > 1 and not _every_batch(dataset):
        raise ValueError(
            "watch needs workers that read every batch and train their parts of it. Set the data set's option "
            "experimental_distribute.auto_shard_policy to DATA; files are sharded otherwise without it."
        )


def _place(strategy) -> tuple[int, int]:
    """This process's number among those that train together, the chief's being 0; and how many they are."""
    resolver = getattr(strategy, "cluster_resolver", None)
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    chiefs, workers = (len(jobs.get(job, ())) for job in ("chief", "worker"))
    number = (resolver.task_id or 0) + (chiefs if resolver.task_type == "worker" else 0) if jobs else 0
    return number, max(1, chiefs + workers)


def _every_batch(dataset):
    """Whether every worker reads every batch: AUTO gives each other files if there is a source of records in the graph."""
    policies, policy = tf.data.experimental.AutoShardPolicy, dataset.options().experimental_distribute.auto_shard_policy
    if policy != policies.AUTO:
        return policy == policies.DATA
    graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return not any(node.op.startswith(_READERS) for node in nodes)


def _followed(model):
    return [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]


def _digests(values):
    return {kind: digest.of([tf.convert_to_tensor(v) for v in of_kind]).json() for kind, of_kind in values.items()}


def _flat(metrics):
    """Metrics, those within Keras's container of compiled metrics included."""
    return [m for metric in metrics for m in (_flat(metric.metrics) if hasattr(metric, "metrics") else [metric])]
