"""Finds what a network draws from random numbers that no run keys: they would be others on every worker, or always the same.

A logical replica's pass is a function of weights, state, examples and key (`cluster/replica_pass.py`). Keras's random layers
draw from their own `keras.random.SeedGenerator`, whose state is handed in. A layer that calls `tf.random.normal` draws from
TensorFlow's state, which moves on as often as a process asks; one that gives `keras.random` no seed draws from a generator
that Keras does not count among the layer's variables, and no pass can move it on. Both are seen in the traced pass, and so is
a variable that a layer changes behind Keras's back.
"""

import re

import keras

from app.config import UsageError

# The operations that keep a state of their own, by what TensorFlow's op definitions call them; StatelessRandom* do not match.
_DRAWS = re.compile(
    r"Random(Uniform|UniformInt|StandardNormal|Gamma|GammaGrad|Poisson|PoissonV2|Shuffle|Crop)|TruncatedNormal|"
    r"ParameterizedTruncatedNormal|Multinomial|Stateful(Uniform|UniformInt|UniformFullInt|StandardNormal|StandardNormalV2|"
    r"TruncatedNormal|RandomBinomial)|RandomBinomial|RngReadAndSkip|RngSkip|SampleDistortedBoundingBox(V2)?|"
    r"(Uniform|LogUniform|LearnedUnigram|FixedUnigram|ThreadUnsafeUnigram|All)CandidateSampler"
)
_CHANGES = re.compile(r"Assign(Add|Sub)?VariableOp|ResourceScatter\w+|ResourceStridedSliceAssign")
_KEYLESS = "keras.random without a seed"


class Unkeyed(UsageError):
    """A layer whose results are no function of weights, state, examples and key."""


class Keyed(keras.callbacks.Callback):
    """Ends `fit` before its first step, with `Unkeyed`, if the network draws what no run keys."""

    def on_train_begin(self, logs=None):
        check(self.model)


def check(trainer):
    """Raises Unkeyed, with a line for each layer, if the traced passes of a `cluster.Trainer` are no pure functions."""
    found = {}
    for _, one_pass in trainer._step._passes.values():
        for path, operation in _impure(one_pass._concrete.graph):
            found.setdefault(_layer(trainer.model, path), operation)
    if found:
        raise Unkeyed("\n".join(f"{layer} {_why(operation)}" for layer, operation in found.items()))


def _why(operation):
    keyed = "use keras.random with a keras.random.SeedGenerator that the layer keeps as an attribute"
    if operation == _KEYLESS:
        return f"draws from {operation}: the same numbers at every step and in every logical replica; {keyed}"
    if _CHANGES.fullmatch(operation):
        return f"changes a variable that Keras does not know ({operation}), as often as a worker calls it; use self.add_weight"
    return f"draws random numbers that follow no seed of the run ({operation}), other ones on every worker; {keyed}"


def _impure(graph):
    """Yields (path, what it is) for each draw or change in a function's graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    library = {function.signature.name: function.node_def for function in definition.library.function}

    def of(nodes, caller):
        for node in nodes:
            path = f"{caller}/{node.name}"
            if _DRAWS.fullmatch(node.op) or _CHANGES.fullmatch(node.op):
                yield path, node.op
            called = {node.op, *(value.func.name for value in node.attr.values() if value.HasField("func"))}
            called |= {function.name for value in node.attr.values() for function in value.list.func}
            for name in called & library.keys():
                yield from of(library[name], path)

    yield from of(definition.node, "")
    seeds = [v.handle for v in graph.variables if "seed_generator_state" in v.name]
    for variable, inner in graph.captures:
        if any(variable is seed for seed in seeds):
            yield from ((consumer.name, _KEYLESS) for consumer in inner.consumers())


def _layer(model, path):
    """The layer in whose name scope an operation lies, the innermost one, with its class; or the operation's own name."""
    layers = {layer.name: layer for layer in model._flatten_layers(include_self=False)}
    for part in reversed(path.split("/")):
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in layers:
                return f"layer {name} ({type(layers[name]).__name__})"
    return f"the network, at {path},"
