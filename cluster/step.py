"""One step, end to end: the passes of this replica's logical replicas, one reduction, one update.

Nothing here asks how many workers there are. Each replica runs the passes of its block of logical replicas, the reduction
adds all K in the order of the tree, and every replica makes the same update with the same finished numbers.
"""

import typing

import tensorflow as tf

from cluster import digest, observe, parameter_servers
from cluster.reduction import replica_id
from cluster.replica_pass import ReplicaPass, is_seed, layer_keys, node_sum


class Told(typing.NamedTuple):
    """What every replica knows after a step, alike.

    Attributes:
      wish: float32 [2], how many replicas wish it: see `wishes.py`.
      bad: scalar int32, the first of the weights whose gradient is not finite; their number if only the loss is not; -1: all is
        well, or a loss scale has skipped the step.
      sums: its metric sums; norm: of the global gradient before clipping; learning_rate. None in an evaluation.
      seen: what was observed: {}, or see `Step._observed`.
    """

    wish: tf.Tensor
    bad: tf.Tensor
    sums: list | None = None
    norm: tf.Tensor | None = None
    learning_rate: tf.Tensor | None = None
    seen: dict | None = None


class Step:
    """The state of a run beside the model's own, and what a replica of the strategy does in a step.

    Attributes:
      count: t, the number of steps taken; keys and data go by it. (The optimizer's `iterations` lags behind it when
        a dynamic loss scale skips a step.)
      sums: {training: list of variables}, the metric sums since the last reset, over all workers. Kept apart, so that an
        evaluation in the middle of an epoch does not end the epoch's metrics. Floats are summed in float64: counts stay exact.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._passes = {}
        with trainer.distribute_strategy.scope():
            self.count = _plain_variable(0, tf.int64)
        self.sums = {True: [], False: []}

    @property
    def variables(self) -> dict[str, list]:
        """Those of which fingerprints are made, by kind: trainable weights, moving statistics, the optimizer's."""
        trainer = self._trainer
        moving = [v for v in trainer.model.non_trainable_variables if not is_seed(v)]
        return {"weights": trainer.model.trainable_variables, "statistics": moving, "optimizer": trainer.optimizer.variables}

    def differentiable(self) -> list[int]:
        """The positions in the weights of those that the loss depends on, once the training pass is traced."""
        return self._passes[True][1].differentiable

    def trace(self, training, element_spec, jit_compile):
        """Traces the pass for batches of `element_spec`, unless that has been done. Returns whether it was new."""
        spec = tf.nest.map_structure(
            lambda s: tf.TensorSpec(
                [s.shape[0] // self._trainer.reduction.leaves if training else None, *s.shape[1:]], s.dtype
            ),
            element_spec,
        )
        if training in self._passes and self._passes[training][0] == spec:
            return False
        if not self.sums[True]:
            with self._trainer.distribute_strategy.scope():
                for mode in self.sums:
                    for v in self._trainer.metrics_variables:
                        dtype = tf.float64 if v.dtype.startswith(("float", "bfloat")) else tf.as_dtype(v.dtype)
                        self.sums[mode].append(_plain_variable(tf.zeros(v.shape, dtype), dtype))
        totals = self._totals() if training and self._trainer.batch_norm == "global" else None
        self._passes[training] = spec, ReplicaPass(self._trainer, spec, training, jit_compile, totals)
        return True

    def _totals(self):
        """For each replica here, the function that adds a tensor over all replicas."""
        reduction = self._trainer.reduction
        return {replica: lambda t, replica=replica: reduction.of_few(replica, t) for replica in sorted(reduction.local)}

    def train(self, data, wish, ids=0, observed=False) -> Told:
        """One training step on this replica's part of the global batch, in replica context.

        Args:
          data: the element; with `ids`, (element, int64 [examples, ids]).
          wish: float32 [2], this worker's wishes.
          observed: tell what fingerprints are made of, too.
        """
        one_pass, call, specs = self.training_part(ids, observed)
        *sums, wish = self._sum_of_passes(one_pass, data, self.count.read_value(), call, specs, wish)
        return self.update(sums, wish, observed)

    def training_part(self, ids=0, observed=False):
        """What each leaf adds to a training step: (its pass, the function (run, examples, k) -> results, their specs)."""
        one_pass, loss_scale = self._passes[True][1], self.loss_scale()
        tables = [observe.PassTables(one_pass, self._trainer.reduction.leaves, ids)] if observed else []

        def results_of(run, examples, k):
            element, names = examples if ids else (examples, None)
            results = run(element)
            return results + [t for table in tables for t in table.of(k, element, names, results, loss_scale)]

        return one_pass, results_of, one_pass.output_specs + [spec for table in tables for spec in table.specs]

    def update(self, sums, wish, observed=False) -> Told:
        """The step's second half, the same on every replica: division, clipping, optimizer, statistics, metric sums.

        Args:
          sums: over all leaves, of what `training_part` says.
          wish: float32 [2], over all replicas.
          observed: as for `train`.
        """
        trainer, optimizer = self._trainer, self._trainer.optimizer
        one_pass, loss_scale = self._passes[True][1], self.loss_scale()
        gradients, statistics, metric_sums = one_pass.split(sums[: len(one_pass.output_specs)])
        leaves = trainer.reduction.leaves
        gradients = [g / tf.cast(leaves, g.dtype) for g in gradients]
        squares = tf.stack([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in gradients])  # halves of sums of squares
        norm = tf.sqrt(2 * tf.reduce_sum(squares)) / loss_scale
        before = observe.values(one_pass.weights) if observed else []
        # A dynamic loss scale skips a step whose gradient is not finite. Keras would keep that step's moving statistics,
        # infinities included (seen on Keras 3.15): they are committed only with the step.
        commit = optimizer.check_finite(gradients) if hasattr(optimizer, "check_finite") else None
        for position, total in zip(one_pass.moving, statistics, strict=True):
            variable = one_pass.state[position]
            mean = total // leaves if total.dtype.is_integer else total / tf.cast(leaves, total.dtype)
            if trainer.asynchronous:  # others have changed it since the pass read it: it told the change
                mean += variable.value
            variable.assign(mean if commit is None else tf.where(commit, mean, variable.value))
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if trainer.schedule is not None:
            inner.learning_rate.assign(trainer.schedule(inner.iterations))
        learning_rate = tf.cast(tf.convert_to_tensor(inner.learning_rate), tf.float32)
        all_gradients = dict(zip(one_pass.differentiable, gradients, strict=True))
        optimizer.apply([all_gradients.get(i) for i in range(len(one_pass.weights))], one_pass.weights)
        self._add(self.sums[True], metric_sums)
        self.count.assign_add(1)
        seen = {}
        if observed:
            gradients = observe.unscaled(gradients, loss_scale)
            seen = self._observed(before, gradients, sums[len(one_pass.output_specs) :], loss_scale)
        bad = self._bad(one_pass, squares, metric_sums) if commit is None else tf.constant(-1)
        return Told(wish, bad, metric_sums, norm, learning_rate, seen)

    def _bad(self, one_pass, squares, metric_sums):
        """See `Told.bad`."""
        loss = next(s for v, s in self.metric_values(True, metric_sums) if v is self._trainer._loss_tracker.total)
        finite = tf.math.is_finite(tf.concat([squares, [tf.cast(loss, tf.float32)]], 0))
        names = tf.constant([*one_pass.differentiable, len(one_pass.weights)])
        return tf.where(tf.reduce_all(finite), -1, names[tf.argmin(tf.cast(finite, tf.int32))])

    def _observed(self, before, gradients, tables, loss_scale):
        """What a step leaves to be recorded: tensors by name, the same on every replica. See `fingerprint.py`."""
        after = {name: observe.values(variables) for name, variables in self.variables.items()}
        digests = {name: digest.of(values) for name, values in after.items()}
        of_worker = tf.stack([digest.one_hash(digests[name].hash) for name in ("weights", "statistics")])
        return {
            "gradient": digest.of(gradients),
            "update": digest.of([a - b for a, b in zip(after["weights"], before, strict=True)]),
            **digests,
            "examples": tables[0],
            "replicas": tables[1],
            "workers": self._by_replica(of_worker),
            "loss_scale": loss_scale,
        }

    def _by_replica(self, values):
        """A table [N, ...] of what every replica of the strategy has to tell, on each of them."""
        reduction, replica = self._trainer.reduction, replica_id()
        table = tf.scatter_nd([[replica]], values[None], [reduction.replicas, *values.shape])
        nothing = [[tf.zeros_like(table)] for _ in reduction.nodes(replica)[1:]]
        return reduction(replica, [[table], *nothing])[0]

    def evaluate(self, data, wish) -> Told:
        """One evaluation step, in replica context; `data` is (element, valid). Padding does not reach the model."""
        one_pass, call, specs = self.evaluation_part()
        *sums, wish = self._sum_of_passes(one_pass, data, self.count.read_value(), call, specs, wish)
        self.add_evaluated(sums)
        return Told(wish, tf.constant(-1))

    def evaluation_part(self):
        """What each leaf adds to an evaluation step; see `training_part`."""
        one_pass = self._passes[False][1]

        def results_of(run, examples, _):
            element, valid = examples
            valid_ones = lambda: tf.nest.map_structure(lambda t: tf.boolean_mask(t, valid), element)  # noqa: E731
            nothing = lambda: [tf.zeros(spec.shape, spec.dtype) for spec in one_pass.output_specs]  # noqa: E731
            return tf.cond(tf.reduce_any(valid), lambda: run(valid_ones()), nothing)

        return one_pass, results_of, one_pass.output_specs

    def add_evaluated(self, sums):
        """An evaluation step's second half."""
        self._add(self.sums[False], sums)

    def runner(self, one_pass, step, weights, state, replica=None):
        """The function (element, k) -> results of leaf k's pass in this step, from these values of weights and state."""
        loss_scale = self.loss_scale()

        def run(element, k):
            seeds = layer_keys(self._trainer.seed, step, k, one_pass.seeds)
            return one_pass(weights, state, seeds, loss_scale, element, replica)

        return run

    def _sum_of_passes(self, one_pass, data, step, call, output_specs, wish):
        """The sum over all leaves k of their `call(run, examples, k)`, which runs one pass on its examples.

        Leaves are the K logical replicas, or the N replicas where the statistics of batch normalisation are global. And, at the
        end of the list, the sum of the replicas' wishes.
        """
        reduction, replica = self._trainer.reduction, replica_id()
        first, last = reduction.passes(replica)
        blocks = tf.nest.map_structure(lambda t: tf.reshape(t, [last - first, -1, *t.shape[1:]]), data)
        weights, state = observe.values(one_pass.weights), observe.values(one_pass.state)
        run = self.runner(one_pass, step, weights, state, replica)

        def of_leaf(k):
            examples = tf.nest.map_structure(lambda t: t[k - first], blocks)
            return call(lambda element: run(element, k), examples, k)

        nodes = reduction.nodes(replica)
        wishes = [wish] + [tf.zeros_like(wish)] * (len(nodes) - 1)
        overlaps = one_pass.training and reduction.replicas > 1  # what is reduced while the last pass goes on
        sums = [node_sum(of_leaf, *node, output_specs, overlaps and node == nodes[-1]) for node in nodes]
        return reduction(replica, [[*of_node, one] for of_node, one in zip(sums, wishes, strict=True)])

    def loss_scale(self):
        """What the loss of a pass is multiplied by now, a float32 scalar."""
        return tf.cast(self._trainer.optimizer.scale_loss(tf.constant(1.0)), tf.float32)

    @staticmethod
    def _add(variables, values):
        for variable, value in zip(variables, values, strict=True):
            variable.assign_add(tf.cast(value, variable.dtype))

    def metric_values(self, training, sums=None):
        """(variable, value) for every metric variable, from sums over all workers: those since the last reset, or `sums`."""
        sums = self.sums[training] if sums is None else sums
        return [(v, tf.cast(total, v.dtype)) for v, total in zip(self._trainer.metrics_variables, sums, strict=True)]

    def reset(self, training):
        """Sets the metric sums to zero."""
        for variable in self.sums[training]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))


def _plain_variable(value, dtype):
    # tf.distribute would reduce a metric's own (on-read) variables once more; these hold finished global numbers.
    with parameter_servers.on_coordinator():
        return tf.Variable(value, dtype=dtype, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
