"""A run's state before one of its steps, and that step made again: as it should be, or with one thing done wrongly.

The state is that of the recorded configuration run from its start in this process, the same to the last bit by construction;
or what `cluster.watch` has kept. The step is taken apart into what each group of examples gives, so that any way of putting it
together can be tried with the very numbers, in arrays.
"""

import contextlib
import dataclasses
import pathlib

import keras
import numpy as np
import tensorflow as tf

from app.by_worker import part
from cluster import digest
from cluster.replica_pass import ReplicaPass, layer_keys


class NoState(Exception):
    """The state before a step cannot be had: why, in one line."""


@dataclasses.dataclass(frozen=True)
class Change:
    """How a step is made otherwise than it should be; without arguments, as it should be.

    Attributes:
      groups: sizes of the groups of examples that are passed together, instead of K of b, or one of all (batch_norm='global').
      key: maps (step, k) to the (seed offset, step, k) by which group k's random layers are keyed.
      workers: W, for the next three: W equal blocks of the groups.
      clip: 'each' worker's mean gradient is clipped before they are averaged.
      only_first: the gradient is that of the first worker's groups alone.
      own_statistics: moving statistics are the mean over the first worker's groups alone.
      factor: of the gradient.
      updates: how often the optimizer is applied with it.
      learning_rate: of the update, as a factor.
      weight_decay: of the optimizer, as a factor.
      clipping: whether the optimizer clips.
    """

    groups: tuple[int, ...] | None = None
    key: object = None
    workers: int = 1
    clip: bool = False
    only_first: bool = False
    own_statistics: bool = False
    factor: float = 1.0
    updates: int = 1
    learning_rate: float = 1.0
    weight_decay: float = 1.0
    clipping: bool = True


class Replay:
    """Makes steps of a run again.

    Args:
      trainer: a compiled `cluster.Trainer` of the run's model, on one replica, that has not been trained.
      data_from: maps a number of steps s to the data from step s + 1 on: `Streams`, or a tf.data.Dataset of global batches.
      kept: the folders in which `cluster.watch` kept states and batches, one of each worker; then `data_from` is not
        used.
      own_statistics: the recorded moving statistics are those of the first logical replica's examples alone.
      evaluation: (x, y) of the held-out examples in their order, or None; or a function that gives them.
      reseeded: maps a seed to the names (ids) of the examples of a step by `step`: see `compare_data`; or None.
      repainted: yields (text, hashes of x of a step) for other ways of augmentation; or None.
    """

    def __init__(self, trainer, data_from=None, kept=(), evaluation=None, reseeded=None, repainted=None, own_statistics=False):
        self.trainer, self._data_from = trainer, data_from
        self._kept, self._own_statistics = [pathlib.Path(folder) for folder in kept], own_statistics
        self.evaluation, self.reseeded, self.repainted = evaluation, reseeded, repainted
        self._saved, self._at = {}, None

    # ---- state and batch ---------------------------------------------------------------------------------------------

    def go_to(self, step: int):
        """Restores the state before step number `step`, from 1, and fetches its batch.

        Raises:
          NoState: if it was not kept.
        """
        if self._at == step:
            return
        if self._kept:
            if missing := [folder for folder in self._kept if not (folder / f"step-{step}.npz").exists()]:
                raise NoState(f"{missing[0]} has no step-{step}.npz")
            by_worker = [np.load(folder / f"step-{step}.npz") for folder in self._kept]  # without pickle
            parts = {kind: _numbered(by_worker[0], kind) for kind in ("weights", "statistics", "optimizer", "seeds")}
            batches = [(_numbered(arrays, "x"), _numbered(arrays, "y")) for arrays in by_worker]
            x, y = (list(map(_joined, zip(*of_kind, strict=True))) for of_kind in zip(*batches, strict=True))
            self.batch = (x[0] if len(x) == 1 else tuple(x), *y)
            self._prepare()
            self._state = parts
        else:
            self.batch = self._batch_of(step)
            self._prepare()
            self._saved.setdefault(0, self._values())
            before = max(s for s in self._saved if s < step)
            self._restore(self._saved[before])
            self.trainer._step.count.assign(before)
            if before < step - 1:
                steps = step - 1 - before
                self.trainer.fit(self._data_from(before), steps_per_epoch=steps, total_steps=steps, verbose=0)
            self._state = self._saved[step - 1] = self._values()
        self._at, self._results = step, {}

    def _batch_of(self, step):
        data, trainer = self._data_from(step - 1), self.trainer
        if hasattr(data, "examples"):
            size = trainer.global_batch_size
            data = data.examples(0, trainer.logical_replicas, size // trainer.logical_replicas).batch(size)
        batch = next(iter(data))
        return batch if isinstance(batch, tuple) else (batch,)

    def _prepare(self):
        if self._at is not None:
            return
        spec = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype), tf.nest.map_structure(tf.convert_to_tensor, self.batch)
        )
        self.trainer._prepare(True, spec)
        of_any_size = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype), spec)
        self._pass = ReplicaPass(self.trainer, of_any_size, True)

    def _values(self):
        return {kind: [v.numpy() for v in variables] for kind, variables in self.trainer._step.variables.items()}

    def _restore(self, values):
        for kind, variables in self.trainer._step.variables.items():
            for variable, value in zip(variables, values[kind], strict=True):
                variable.assign(value)

    # ---- the step ----------------------------------------------------------------------------------------------------

    @property
    def proper(self) -> Change:
        """What makes the step as the run made it."""
        if self._own_statistics and self.normalises:
            return Change(workers=self.trainer.logical_replicas, own_statistics=True)
        return Change()

    @property
    def keyed(self) -> bool:
        """Whether the masks of its random layers follow (seed, step, k); in scripts that were watched they are as kept."""
        return self.draws and not self._kept

    @property
    def normalises(self) -> bool:
        """Whether what an example gives depends on the others of its group: a pass changes moving statistics."""
        return bool(self._pass.moving)

    @property
    def draws(self) -> bool:
        """Whether the model has random layers."""
        return bool(self._pass.seeds)

    def predicted(self, change: Change):
        """Yields (kind, digests as a line holds them) of the step made with `change`, in the order of its stages.

        Kinds: metric_sums (a list), gradient, update, statistics, optimizer, weights.
        """
        gradients, statistics, sums = self._put_together(change)
        yield "metric_sums", [np.ravel(s).tolist() for s in sums]
        yield "gradient", _digests(gradients)
        after = self._updated(gradients, change)
        before = self._state
        yield "update", _digests([a - b for a, b in zip(after["weights"], before["weights"], strict=True)])
        new = list(before["statistics"])
        for position, value in zip(self._pass.moving, statistics, strict=True):
            new[position] = value.astype(new[position].dtype)
        yield "statistics", _digests(new)
        yield "optimizer", _digests(after["optimizer"])
        yield "weights", _digests(after["weights"])

    def _passes(self, groups, key):
        """What each group of examples gives: [(gradients, statistics, metric sums)], as NumPy arrays."""
        name = (groups, None if key is None else tuple(key(self._at - 1, k) for k in range(len(groups))))
        if name not in self._results:
            weights, state = (list(map(tf.constant, self._state[kind])) for kind in ("weights", "statistics"))
            found, start = [], 0
            for k, size in enumerate(groups):
                offset, t, owner = key(self._at - 1, k) if key else (0, self._at - 1, k)
                seeds = self._state.get("seeds")  # of a script that was watched: every replica's, as Keras has them
                if not self._kept:
                    seeds = layer_keys(
                        self.trainer.seed + offset, tf.constant(t, tf.int64), tf.constant(owner), self._pass.seeds
                    )
                part = tf.nest.map_structure(lambda t: tf.convert_to_tensor(t)[start : start + size], self.batch)
                flat = [np.asarray(t) for t in self._pass(weights, state, seeds, tf.constant(1.0), part)]
                found.append(self._pass.split(flat))
                start += size
            self._results[name] = found
        return self._results[name]

    def _put_together(self, change):
        trainer = self.trainer
        passes = 1 if trainer.batch_norm == "global" else trainer.logical_replicas
        batch = len(tf.nest.flatten(self.batch)[0])
        groups = change.groups or (batch // passes,) * passes
        if len(groups) % change.workers:  # fewer groups than workers
            groups = (batch // change.workers,) * change.workers
        results = self._passes(groups, change.key)
        share = len(groups) // change.workers
        workers = [_mean([g for g, _, _ in results[w * share : (w + 1) * share]]) for w in range(change.workers)]
        if change.clip:
            workers = [self._clipped(g) for g in workers]
        gradients = workers[0] if change.only_first else _mean(workers)
        gradients = [(g * change.factor).astype(like.dtype) for g, like in zip(gradients, results[0][0], strict=True)]
        first = share if change.own_statistics else len(groups)
        statistics = _mean([s for _, s, _ in results[:first]])
        sums = [np.sum([s[i] for _, _, s in results], 0, np.float64) for i in range(len(results[0][2]))]
        return gradients, statistics, sums

    def _clipped(self, gradients):
        inner = _inner(self.trainer.optimizer)
        return [np.asarray(g) for g in inner._clip_gradients([tf.constant(g, tf.float32) for g in gradients])]

    def _updated(self, gradients, change):
        """The variables after the update, from the state before it."""
        trainer = self.trainer
        optimizer, inner = trainer.optimizer, _inner(trainer.optimizer)
        self._restore(self._state)
        if trainer.schedule is not None:
            inner.learning_rate.assign(trainer.schedule(tf.constant(int(inner.iterations.numpy()))))
        scale = float(optimizer.scale_loss(tf.constant(1.0)))
        by_weight = dict(zip(self._pass.differentiable, gradients, strict=True))
        full = [
            tf.constant(by_weight[i] * scale, g.dtype) if (g := by_weight.get(i)) is not None else None
            for i in range(len(self._pass.weights))
        ]
        with _altered(inner, change):
            for _ in range(change.updates):
                trainer.distribute_strategy.run(lambda: optimizer.apply(list(full), self._pass.weights))
        return self._values()

    def evaluated(self, chunks):
        """The metric sums of some stretches (start, stop) of the held-out examples, with the weights before the step."""
        data = tuple(self.evaluation() if callable(self.evaluation) else self.evaluation)
        self._restore(self._state)
        spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], tf.convert_to_tensor(t[:1]).dtype), data)
        one_pass = ReplicaPass(self.trainer, spec, False)
        weights, state = (list(map(tf.constant, self._state[kind])) for kind in ("weights", "statistics"))
        seeds = layer_keys(0, tf.constant(0, tf.int64), tf.constant(0), one_pass.seeds)
        found = []
        for start, stop in chunks:
            part = tf.nest.map_structure(lambda t: tf.convert_to_tensor(t[start:stop]), data)
            found.append([np.ravel(t) for t in one_pass(weights, state, seeds, tf.constant(1.0), part)])
        return found


@contextlib.contextmanager
def _altered(optimizer, change):
    """The optimizer with the change's settings, until it is left."""
    clips = ("clipnorm", "clipvalue", "global_clipnorm")
    names = [
        "weight_decay",
        *(clips if not change.clipping else ()),
        *(["_learning_rate"] if change.learning_rate != 1 else []),
    ]
    before = {name: getattr(optimizer, name) for name in names}
    try:
        if before["weight_decay"]:
            optimizer.weight_decay = before["weight_decay"] * change.weight_decay
        for name in names[1:]:
            setattr(optimizer, name, None)
        if change.learning_rate != 1:
            optimizer._learning_rate = before["_learning_rate"]
            rate = keras.ops.convert_to_numpy(optimizer.learning_rate) * change.learning_rate
            optimizer._learning_rate = lambda: keras.ops.convert_to_tensor(rate)
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _mean(lists):
    return [np.mean(arrays, 0, np.float64) for arrays in zip(*lists, strict=True)]


def _digests(arrays):
    return digest.of([tf.convert_to_tensor(a) for a in arrays]).json()


def _joined(by_worker):
    """Of each worker's batch the part that it trains."""
    return np.concatenate([a[part(len(a), i, len(by_worker))] for i, a in enumerate(by_worker)])


def _numbered(arrays, kind):
    found = []
    while f"{kind}_{len(found)}" in arrays:
        found.append(arrays[f"{kind}_{len(found)}"])
    return found
