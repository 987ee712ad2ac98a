"""The whole state of a training run between two steps, as one file's bytes: what makes a resumed run the uninterrupted one.

A checkpoint says nothing of workers, so that a run goes on with any number of them: position, order, augmentation and random
layers follow from the step, and everything else is the same on all. The bytes are those of a NumPy .npz file without pickled
objects: every array as raw bytes, and one entry of JSON that says what they are. Its checksums tell a damaged file.
"""

import dataclasses
import io
import json

import keras
import numpy as np

FORMAT = "lockstep checkpoint 1"
_JSON = "facts.json"

# What Keras's callbacks remember between epochs, and set back in on_train_begin.
_REMEMBERED = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_current_epoch", "_batches_seen_since_last_saving"),
}


class Damaged(ValueError):
    """No checkpoint, or not a whole one: one line that says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run's state.

    Attributes:
      step: t, steps made.
      epoch: epochs finished, their evaluation included.
      in_epoch: steps made in the epoch that has begun; as many as it has, if only its evaluation is missing.
      arrays: by name: weights/0, statistics/0, optimizer/0, sums/0 and so on, in the trainer's order; and callbacks' arrays.
      facts: JSON values: callbacks' states, and whatever was given to `take`.
    """

    step: int
    epoch: int
    in_epoch: int
    arrays: dict[str, np.ndarray]
    facts: dict

    def to_bytes(self) -> bytes:
        """A file's content."""
        described = {name: [str(array.dtype), array.shape] for name, array in self.arrays.items()}
        head = {"format": FORMAT, "step": self.step, "epoch": self.epoch, "in_epoch": self.in_epoch, "facts": self.facts}
        text = json.dumps({**head, "arrays": described}).encode()
        file = io.BytesIO()
        raw = {name: np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8) for name, array in self.arrays.items()}
        np.savez(file, **{_JSON: np.frombuffer(text, np.uint8)}, **raw)
        return file.getvalue()


def from_bytes(content: bytes) -> Checkpoint:
    """The checkpoint in a file's content. Raises Damaged."""
    try:
        found = _parsed(content)
    except Damaged:
        raise
    except Exception as error:  # zipfile, zlib, tokenize, json, NumPy: each has its own for bytes that are not what they expect
        reason = next(iter(str(error).splitlines()), "")[:80] or type(error).__name__
        raise Damaged(f"it is cut off, damaged, or no checkpoint ({reason})") from None
    numbers = [found.step, found.epoch, found.in_epoch]
    callbacks = found.facts["callbacks"] if isinstance(found.facts, dict) else None
    if any(type(n) is not int or n < 0 for n in numbers) or not isinstance(callbacks, list):
        raise Damaged("its facts are no checkpoint's")
    return found


def _parsed(content):
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        head = json.loads(file[_JSON].tobytes())
        if head["format"] != FORMAT:
            raise Damaged(f"its format is {head['format']!r}, not {FORMAT!r}")
        arrays = {
            name: np.frombuffer(file[name].tobytes(), _dtype(dtype)).reshape(shape)
            for name, (dtype, shape) in head["arrays"].items()
        }
    facts = head["facts"]
    facts["callbacks"], facts["stopped"]  # `take` puts them there
    return Checkpoint(head["step"], head["epoch"], head["in_epoch"], arrays, facts)


def take(trainer, epoch: int, in_epoch: int, callbacks=(), facts=None) -> Checkpoint:
    """The state of a `cluster.Trainer` now, between two steps; copies everything. No worker but this one takes part.

    Args:
      trainer: built: its `fit` has begun.
      epoch, in_epoch: see `Checkpoint`.
      callbacks: whose states are kept: Keras's that remember something, and those with `get_state() -> dict` and
        `set_state(dict)`; the values are numbers, text, arrays, lists and dicts of them.
      facts: JSON values to keep with it.
    """
    variables = _variables(trainer)
    arrays = {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}
    states = [_without_arrays(_state(callback), f"callbacks/{i}", arrays) for i, callback in enumerate(callbacks)]
    kept = {"callbacks": [[type(c).__name__, state] for c, state in zip(callbacks, states, strict=True)]}
    kept |= {"stopped": bool(trainer.stop_training), "paths": _paths(variables)}
    return Checkpoint(trainer.step, epoch, in_epoch, arrays, {**(facts or {}), **kept})


def not_finite(trainer) -> str | None:
    """The path of the first of the trainer's weights and moving statistics that holds an infinity or NaN."""
    variables = [*trainer._step.variables["weights"], *trainer._step.variables["statistics"]]
    return next((v.path for v in variables if not np.isfinite(keras.ops.convert_to_numpy(v)).all()), None)


def problem(checkpoint: Checkpoint, trainer) -> str | None:
    """Why the trainer cannot go on from there: another network or optimizer. None if it can."""
    variables = _variables(trainer)
    ours = {name: (tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for name, v in variables.items()}
    theirs = {n: (a.shape, str(a.dtype)) for n, a in checkpoint.arrays.items() if not n.startswith("callbacks/")}
    paths = {**checkpoint.facts.get("paths", {}), **_paths(variables)}
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            there, here = (_shown(described.get(name)) for described in (theirs, ours))
            return f"{paths.get(name, name)} is {there} there and {here} here"
    return None


def put_back(checkpoint: Checkpoint, trainer):
    """Sets the trainer's variables: weights, moving statistics, the optimizer's, metric sums, the number of steps.

    Raises:
      Damaged: if they are another network's or another optimizer's.
    """
    if why := problem(checkpoint, trainer):
        raise Damaged(f"it is another network's or optimizer's: {why}")
    for name, variable in _variables(trainer).items():
        variable.assign(checkpoint.arrays[name])


def put_back_weights(checkpoint: Checkpoint, trainer):
    """Sets weights and moving statistics alone, for an evaluation. Raises Damaged if they are another network's."""
    kinds = ("weights", "statistics")
    ours = {name: variable for name, variable in _variables(trainer).items() if name.partition("/")[0] in kinds}
    theirs = {name: array.shape for name, array in checkpoint.arrays.items() if name.partition("/")[0] in kinds}
    if theirs != {name: tuple(variable.shape) for name, variable in ours.items()}:
        raise Damaged("it is another network's")
    for name, variable in ours.items():
        variable.assign(checkpoint.arrays[name])


def put_back_callbacks(checkpoint: Checkpoint, callbacks):
    """Sets the callbacks' states; to be called after their `on_train_begin`. Raises Damaged if they are others."""
    kept = checkpoint.facts["callbacks"]
    if [name for name, _ in kept] != [type(callback).__name__ for callback in callbacks]:
        raise Damaged(f"it is of a run with other callbacks: {', '.join(name for name, _ in kept) or 'none'}")
    for callback, (_, state) in zip(callbacks, kept, strict=True):
        state = _with_arrays(state, checkpoint.arrays)
        if hasattr(callback, "set_state"):
            callback.set_state(state)
        else:
            vars(callback).update(state)
        if isinstance(callback, keras.callbacks.History):
            callback.model.history = callback  # Keras does so at an epoch's end, and `fit` returns it


def _variables(trainer):
    step = trainer._step
    kinds = {**step.variables, "sums": step.sums[True], "count": [step.count]}
    return {f"{kind}/{i}": variable for kind, of_kind in kinds.items() for i, variable in enumerate(of_kind)}


def _paths(variables):
    """Of those that have one, to tell people."""
    return {name: variable.path for name, variable in variables.items() if hasattr(variable, "path")}


def _shown(described):
    return f"{described[1]} {list(described[0])}" if described else "missing"


def _state(callback):
    if hasattr(callback, "get_state"):
        return callback.get_state()
    names = next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _without_arrays(value, name, arrays):
    """The value as JSON; its arrays go to `arrays`, under names of their own that stand in their places."""
    if isinstance(value, dict):
        return {key: _without_arrays(item, f"{name}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(item, f"{name}/{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic):
        arrays[name] = np.asarray(value)
        return {"array": name}
    return value


def _with_arrays(value, arrays):
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            array = arrays[value["array"]]
            return array if array.ndim else array[()]
        return {key: _with_arrays(item, arrays) for key, item in value.items()}
    return [_with_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def _dtype(name):
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # TensorFlow's own: bfloat16, float8

        return np.dtype(getattr(ml_dtypes, name))
