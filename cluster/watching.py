"""Fingerprints of any Keras script, from outside: two lines in it, and not a bit of its training changes.

dataset, recorder = cluster.watch(model, dataset, "mine.jsonl")
model.fit(dataset, callbacks=[recorder])
"""

import collections
import itertools
import json
import os

import keras
import numpy as np
import tensorflow as tf

from cluster import digest, trainer
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
      ValueError: for what cannot be followed from outside: a model that is not compiled; data that is no tf.data.Dataset, or
        of which several workers do not read every batch; a `cluster.Trainer`, which records itself. And when `fit` begins,
        if several steps are made in one execution.
    """
    _check(model, dataset)
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
        if self._file:
            return  # a second `fit` goes on in the same file
        model, strategy = self.model, self.model.distribute_strategy
        if not model.optimizer.built:  # Keras would do so in the first step
            model.optimizer.build(model.trainable_variables)
        self._variables = {
            "weights": model.trainable_variables,
            "statistics": [v for v in model.non_trainable_variables if not is_seed(v)],
            "optimizer": model.optimizer.variables,
        }
        self._seeds = [v for v in model.non_trainable_variables if is_seed(v)]
        worker, workers = _place(strategy)
        self._file = open(self._path + (f".worker-{worker}" if worker else ""), "w")  # noqa: SIM115
        self._step, self._first = 0, True
        replicas = strategy.num_replicas_in_sync
        header = {"format": FORMAT, "made_by": "cluster.watch", "every": self._every, "global_batch_size": self._batch_size}
        header |= {"logical_replicas": replicas, "replicas": replicas}
        header |= {"worker": worker, "workers": workers} if workers > 1 else {}
        header |= {kind: described(variables) for kind, variables in self._variables.items()}
        if self._keep and worker:
            self._keep += f".worker-{worker}"
        self._metrics = [m for m in _flat(model.metrics) if isinstance(m, keras.metrics.Mean)]
        header["metrics"] = described([v for m in self._metrics for v in m.variables])
        self._begin = [header, {"step": 0, **_digests(self._values())}]
        if self._keep:
            header["kept"] = os.path.relpath(self._keep, os.path.dirname(os.path.abspath(self._path)))
            os.makedirs(self._keep, exist_ok=True)
            model.save(os.path.join(self._keep, "model.keras"))

    def on_train_batch_begin(self, batch, logs=None):
        self._step += 1
        self._due = self._first or self._step % self._every == 0
        if not self._due:
            return
        self._before = self._values()
        self._seeds_before = [v.numpy() for v in self._seeds]
        self._rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        # A mean's total is total + the step's sum. Starting from 0 leaves the step's sum itself, and adding it to the total
        # afterwards is the very addition that the metric would have made. Each replica has its own; reading them together
        # would round otherwise, and be a collective in a cluster.
        self._copies = [[self._held(v) for v in m.variables] for m in self._metrics]
        self._totals = tf.nest.map_structure(lambda copy: copy.numpy(), self._copies)
        tf.nest.map_structure(lambda copy: copy.assign(tf.zeros_like(copy)), self._copies)

    def on_train_batch_end(self, batch, logs=None):
        parts = self._tap.next()
        if not self._due:
            return
        self._first = False
        of_step = tf.nest.map_structure(lambda copy: copy.numpy(), self._copies)
        tf.nest.map_structure(lambda copy, a, b: copy.assign(a + b), self._copies, self._totals, of_step)
        sums = [[sum(held[1:], held[0]) for held in of_metric] for of_metric in of_step]
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
                "loss_scale": 1.0 if scale is None else float(scale),
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

    def on_train_end(self, logs=None):
        self._file.flush()

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
    """Remembers the batches of a data set in their order, until they have been asked for.

    Keras may read ahead, and starts the data set anew for an epoch, or to look at its first batch: the newest iterator is the
    one that it trains from.
    """

    def __init__(self):
        self._iterators, self._batches = itertools.count(), collections.defaultdict(collections.deque)

    def on(self, dataset):
        def remembered(iterator, *batch):
            batch = batch if len(batch) > 1 else batch[0]
            remember = tf.numpy_function(self._remember, [iterator, *tf.nest.flatten(batch)], [])
            with tf.control_dependencies([remember]):
                return tf.nest.map_structure(tf.identity, batch)

        self._spec = dataset.element_spec
        started = tf.data.Dataset.from_tensors(0).map(lambda _: tf.numpy_function(self._start, [], tf.int64))
        tapped = started.flat_map(lambda iterator: dataset.map(lambda *batch: remembered(iterator, *batch)))
        return tapped.apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))

    def next(self):
        """The oldest batch of the newest iterator that has not been asked for, as NumPy arrays."""
        newest = max(self._batches)
        for iterator in [i for i in self._batches if i < newest]:
            del self._batches[iterator]
        return tf.nest.pack_sequence_as(self._spec, self._batches[newest].popleft())

    def _start(self):
        return np.int64(next(self._iterators))

    def _remember(self, iterator, *parts):
        self._batches[int(iterator)].append([np.array(part) for part in parts])


_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ArrayRecordDataset")


def _check(model, dataset):
    if isinstance(model, trainer.Trainer):
        raise ValueError("watch is for models that Keras trains; a cluster.Trainer records itself: fit(..., fingerprints=...).")
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ValueError(f"watch needs a model compiled with an optimizer; {model.name} is not.")
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"watch needs a tf.data.Dataset, which fit itself distributes; got {type(dataset).__name__}.")
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


def _digests(values):
    return {kind: digest.of([tf.convert_to_tensor(v) for v in of_kind]).json() for kind, of_kind in values.items()}


def _flat(metrics):
    """Metrics, those within Keras's container of compiled metrics included."""
    return [m for metric in metrics for m in (_flat(metric.metrics) if hasattr(metric, "metrics") else [metric])]
