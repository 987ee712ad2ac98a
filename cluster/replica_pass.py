"""One logical replica's pass as a pure function, and the sum of several such passes in the order of the tree.

Weights, state, examples and a key go in; gradients, new statistics and metric sums come out. `keras.Model.stateless_call`
makes that possible: nothing is assigned, every logical replica starts from the same state, and the state of random layers
is handed in as a key made from (seed, step, logical replica, layer). Everything else in training is addition.
"""

import keras
import tensorflow as tf

from cluster import fused_batch_norm, global_batch_norm, losses, reduction


class ReplicaPass:
    """The pass of one logical replica, traced once, outside the strategy.

    Traced there because Keras divides every loss by the number of replicas of the strategy it finds itself in
    (keras/src/losses/loss.py, `scale_loss_for_distribution`), which would make the loss depend on N.

    Args:
      trainer: the compiled and built `cluster.Trainer`; its plain model, loss and metrics are used.
      element_spec: the structure (x, y[, sample_weight]) of tf.TensorSpecs, batch dimension included.
      training: with gradients and statistics, or (False) metric sums alone.
      jit_compile: compile the pass with XLA.
      totals: {replica of the strategy in this process: the function that adds a tensor over all replicas}: for each, the pass
        is traced with the statistics of batch normalisation taken over all; None: over the pass's own examples.
    """

    def __init__(self, trainer, element_spec, training, jit_compile=False, totals=None):
        self._trainer = trainer
        self._model = trainer.model
        self.training = training
        self.batch_size = tf.nest.flatten(element_spec)[0].shape[0]
        model = self._model
        self.weights = model.trainable_variables
        self.seeds = [v for v in model.non_trainable_variables if is_seed(v)]
        self.state = [v for v in model.non_trainable_variables if not is_seed(v)]
        self.differentiable = []  # positions in `weights` that the loss depends on
        self.moving = []  # positions in `state` that a pass changes
        if any(not v.dtype.startswith(("float", "bfloat", "int")) for v in self.state):
            raise ValueError(f"{model.name} keeps state that is not numeric; it cannot be averaged over replicas.")
        specs = [
            [tf.TensorSpec(v.shape, v.dtype) for v in self.weights],
            [tf.TensorSpec(v.shape, v.dtype) for v in self.state],
            [tf.TensorSpec(v.shape, v.dtype) for v in self.seeds],
            tf.TensorSpec([], tf.float32),
            tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype), tuple(element_spec)),
        ]
        self._by_replica = {}
        for replica, total in (totals or {None: None}).items():
            function = tf.function(self._pass, jit_compile=jit_compile, autograph=False)
            with global_batch_norm.moments_over(model, total) if totals else fused_batch_norm.fused(model) as normalised:
                self._by_replica[replica] = self._concrete = function.get_concrete_function(*specs)
        if totals:
            global_batch_norm.check_layers(model)  # once more: some models make their layers when they are built
            global_batch_norm.check_state(model, [self.state[i] for i in self.moving], normalised)
        self.output_specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._concrete.outputs]

    def __call__(self, weights, state, seeds, loss_scale, data, replica=None) -> list[tf.Tensor]:
        """Flat list: gradients (`differentiable`), new statistics (`moving`), metric sums (all metric variables).

        With `totals`, every replica of the strategy has to call it, with its number.
        """
        return list(self._by_replica.get(replica, self._concrete)(weights, state, seeds, loss_scale, data))

    def split(self, flat):
        """Takes a list like the call's apart: gradients, statistics, metric sums."""
        gradients, statistics = len(self.differentiable), len(self.differentiable) + len(self.moving)
        return flat[:gradients], flat[gradients:statistics], flat[statistics:]

    def _pass(self, weights, state, seeds, loss_scale, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        values = {id(v): value for v, value in zip(self.state + self.seeds, state + seeds, strict=True)}
        before = [values[id(v)] for v in self._model.non_trainable_variables]
        trainer, metric_variables = self._trainer, self._trainer.metrics_variables
        zeros = [tf.zeros(v.shape, v.dtype) for v in metric_variables]
        with (
            keras.StatelessScope(list(zip(metric_variables, zeros, strict=True))) as scope,
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(weights)
            mode = {"training": self.training} if self._model._call_has_training_arg else {}
            y_pred, after, extra_losses = self._model.stateless_call(weights, before, x, return_losses=True, **mode)
            loss = losses.total(trainer, y, y_pred, sample_weight, extra_losses)
            scaled_loss = loss * tf.cast(loss_scale, loss.dtype)
            trainer._loss_tracker.update_state(loss, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
            trainer.compute_metrics(x, y, y_pred, sample_weight)
        sums = [scope.get_current_value(v) for v in metric_variables]
        if not self.training:
            return sums
        gradients = tape.gradient(scaled_loss, weights)
        after = {id(v): value for v, value in zip(self._model.non_trainable_variables, after, strict=True)}
        self.differentiable = [i for i, g in enumerate(gradients) if g is not None]
        self.moving = [i for i, v in enumerate(self.state) if after[id(v)] is not values[id(v)]]
        return [
            *(tf.convert_to_tensor(gradients[i]) for i in self.differentiable),  # an embedding's slices become dense
            *(after[id(self.state[i])] for i in self.moving),
            *sums,
        ]


def is_seed(variable) -> bool:
    """Whether a Keras variable is the state of a random layer (keras.random.SeedGenerator)."""
    return variable.path.endswith("seed_generator_state")


def layer_keys(seed: int, step: tf.Tensor, logical_replica: tf.Tensor, seeds) -> list[tf.Tensor]:
    """The states of all random layers for one pass: a function of (seed, step, logical replica, layer) alone.

    Args:
      seed: the run's seed.
      step: scalar int64 tensor.
      logical_replica: scalar integer tensor, 0 <= k < K.
      seeds: the model's seed variables, in the model's order.
    Returns:
      One [2] tensor a seed variable, full-range random integers (Philox, Salmon et al. 2011), so that the counter
      which Keras adds at every draw of a layer meets no other key.
    """
    if not seeds:
        return []
    key = tf.constant([seed & 0x7FFFFFFF, 0x10C57E9], tf.int64)
    key = tf.random.experimental.stateless_fold_in(key, step, alg="philox")
    key = tf.random.experimental.stateless_fold_in(key, tf.cast(logical_replica, tf.int64), alg="philox")
    dtype = seeds[0].dtype
    states = tf.random.stateless_uniform([len(seeds), 2], key, None, None, dtype=dtype, alg="philox")
    return tf.unstack(states)


def node_sum(one_pass, start: int, size: int, output_specs, last_apart=False) -> list[tf.Tensor]:
    """The sum of the passes of the tree node (start, size), in the order of the tree.

    One `tf.while_loop` over the leaves with a stack of partial sums, one a level, that works as a binary counter: a leaf
    merges with the levels below the lowest zero bit of its number. At most log2(size) + 1 lists of tensors are held, and
    the graph does not grow with the size.

    Args:
      one_pass: maps a logical replica (an int or a scalar int32 tensor) to its list of tensors.
      start, size: the node; size is a power of two.
      output_specs: the tf.TensorSpecs of that list.
      last_apart: the last leaf comes after the loop, in a pass of its own: each tensor of the sum is there as soon as that pass
        has it, and can be on its way while the pass goes on. (A loop gives all of them at its end.)
    """
    if size == 1:
        return one_pass(start)
    levels = size.bit_length()
    empty = [tf.zeros(spec.shape, spec.dtype) for spec in output_specs]

    def body(leaf, stack):
        stack, value, carry = list(stack), one_pass(start + leaf), tf.constant(True)
        for level, left in enumerate(stack):
            with tf.device("CPU:0"):  # a condition computed on a GPU would make the host wait for it
                occupied = tf.bitwise.bitwise_and(leaf, 1 << level) > 0
            stack[level] = tf.cond(carry & ~occupied, lambda: value, lambda: left)
            value = tf.cond(carry & occupied, lambda: reduction.add_lists(left, value), lambda: value)
            carry = carry & occupied
        return leaf + 1, stack

    loop_variables = (tf.constant(0), [empty] * levels)
    leaves = size - 1 if last_apart else size
    _, stack = tf.while_loop(lambda leaf, _: leaf < leaves, body, loop_variables, parallel_iterations=1)
    if not last_apart:
        return stack[-1]
    with tf.control_dependencies(stack[0]):  # one pass at a time: the activations of two would need twice the memory
        value = one_pass(start + leaves)
    for left in stack[:-1]:  # before the last leaf all levels below the root's are occupied
        value = reduction.add_lists(left, value)
    return value
