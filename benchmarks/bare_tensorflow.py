"""The work of one step of Lockstep as a bare tf.function, without Lockstep and in one process, in one line of JSON.

    python -m benchmarks.bare_tensorflow --batch=128 --logical_replicas=4

K passes over B/K images each, one after another; the averages of their gradients and of their batch-normalisation statistics;
sums of loss, top-1 and top-5; one momentum update. Threads and determinism are as in Lockstep.
"""

import keras
import tensorflow as tf

from benchmarks import work
from cluster import fused_batch_norm, runtime, tree


def main():
    options = work.parser(__doc__).parse_args()
    work.set_inter_op_threads(options.inter_op_threads)
    runtime.configure(options.identical, options.threads)
    replicas = options.logical_replicas or tree.default_logical_replicas(options.batch)
    model, optimizer = work.network(options.model), work.optimizer()
    optimizer.build(model.trainable_variables)
    step = make_step(model, optimizer, options.batch, replicas, options.jit_compile)
    images, labels = map(tf.constant, work.batch(options.model, options.batch))
    clock, warmup = work.Clock(), max(1, options.warmup)
    for _ in range(warmup + options.steps):
        step(images, labels)[0].numpy()
        clock.tick()
    print(clock.report(options, warmup, side="bare tf.function", workers=1, logical_replicas=replicas))


def make_step(model, optimizer, batch_size, replicas, jit_compile):
    """The function (images, labels) -> sums of loss, top-1 and top-5 since the start."""
    weights, state = model.trainable_variables, model.non_trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    totals = [tf.Variable(0.0) for _ in range(3)]

    @tf.function(jit_compile=jit_compile, autograph=False)
    def one_pass(weight_values, state_values, images, labels):
        with fused_batch_norm.fused(model), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weight_values)
            logits, after, extra = model.stateless_call(weight_values, state_values, images, training=True, return_losses=True)
            loss = loss_of(labels, logits) + tf.add_n(extra)
        size = tf.cast(tf.shape(images)[0], tf.float32)
        top_1 = tf.reduce_sum(tf.cast(tf.argmax(logits, 1, labels.dtype) == labels, tf.float32))
        top_5 = tf.reduce_sum(tf.cast(tf.math.in_top_k(labels, logits, 5), tf.float32))
        return [*tape.gradient(loss, weight_values), *after, loss * size, top_1, top_5]

    @tf.function(autograph=False)
    def step(images, labels):
        weight_values = [tf.convert_to_tensor(v.value) for v in weights]
        state_values = [tf.convert_to_tensor(v.value) for v in state]
        size = batch_size // replicas

        def body(k, sums):
            part = tf.ensure_shape(images[k * size : (k + 1) * size], [size, *images.shape[1:]])
            part_labels = tf.ensure_shape(labels[k * size : (k + 1) * size], [size])
            found = one_pass(weight_values, state_values, part, part_labels)
            return k + 1, [total + value for total, value in zip(sums, found, strict=True)]

        if replicas == 1:
            sums = one_pass(weight_values, state_values, images, labels)
        else:
            zeros = [tf.zeros(v.shape, v.dtype) for v in (*weights, *state, *totals)]
            start = (tf.constant(0), zeros)
            sums = tf.while_loop(lambda k, _: k < replicas, body, start, parallel_iterations=1)[1]
        gradients, statistics = sums[: len(weights)], sums[len(weights) : -3]
        for variable, total in zip(state, statistics, strict=True):
            if variable.dtype.startswith("float"):  # others are the states of random layers
                variable.assign(total / replicas)
        optimizer.apply([g / replicas for g in gradients], weights)
        return [total.assign_add(value) for total, value in zip(totals, sums[-3:], strict=True)]

    return step


if __name__ == "__main__":
    main()
