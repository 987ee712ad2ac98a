"""--init_from: the weights that a run begins with, from a file that Keras has saved, or of keras.applications.

The chief alone reads them and sends them to the others. What has a variable's path and shape is taken; the rest, as a head for
other classes, stays as it is initialised. Optimizer and step begin anew.
"""

import hashlib
import io
import json
import warnings

import keras
import numpy as np
import tensorflow as tf

from app.config import Config, UsageError
from cluster.agreement import bytes_from_chief, from_chief
from cluster.replica_pass import is_seed
from models import NAMES, others

_NAMED = 3  # variables in the line


def put(config: Config, plain, me, build) -> tuple[str, str] | None:
    """Sets the network's weights as --init_from says. Every worker calls it.

    Args:
      plain: the run's network, under the strategy; me: this process in its cluster, or None.
      build: makes the network once more, as build().
    Returns:
      (a line that says what was taken, sha256 of the file, or of ImageNet's weights); None without the flag.
    Raises:
      UsageError: on every worker, if there is no such file, it cannot be opened, or nothing in it fits.
    """
    if not config.init_from:
        return None
    content, problem = None, None
    if me is None or me.is_chief:
        try:
            content = _packed(config, plain, build)
        except UsageError as error:
            problem = str(error)
    if problem := from_chief(me, problem):
        raise UsageError(problem)
    with np.load(io.BytesIO(bytes_from_chief(me, content)), allow_pickle=False) as file:
        line, digest = json.loads(file["told"].tobytes())
        for position, variable in enumerate(_own(plain)):
            if str(position) in file:
                variable.assign(file[str(position)])
    return line, digest


def _packed(config, plain, build):
    """The weights to take, by position in the network, with the line and the digest, as a small .npz file."""
    path = config.init_from
    found = _found(config, plain, build)
    own = [(variable.path, tuple(variable.shape)) for variable in _own(plain)]
    taken, left = {}, []
    for position, (name, shape) in enumerate(own):
        value = found[position]
        if value is not None and value.shape == shape:
            taken[str(position)] = value
        else:
            there = "nothing there that fits" if value is None else f"{list(value.shape)} there"
            left.append(f"{name} ({there}, {list(shape)} here)")
    if not taken:
        raise UsageError(f"--init_from={path} has none of the variables of {config.model}, as {own[0][0]} {list(own[0][1])}")
    more = [f"and {len(left) - _NAMED} more"] if len(left) > _NAMED else []
    line = f"init    {len(taken)} of {len(own)} variables from {path}"
    line += f"; not taken: {', '.join([*left[:_NAMED], *more])}" if left else ""
    digest = hashlib.sha256()
    if path == "imagenet":
        for value in taken.values():
            digest.update(value.tobytes())
    else:
        digest.update(tf.io.gfile.GFile(path, "rb").read())
    file = io.BytesIO()
    np.savez(file, told=np.frombuffer(json.dumps([line, digest.hexdigest()]).encode(), np.uint8), **taken)
    return file.getvalue()


def _found(config, plain, build):
    """For each of the network's variables what there is for it, an array or None."""
    path = config.init_from
    try:
        if path == "imagenet":
            return _in_order(plain, others.pretrained(_builder(config.model)))
        if path.endswith(".keras"):
            loaded = keras.saving.load_model(path, compile=False, safe_mode=True)
            there = {variable.path: _array(variable) for variable in _own(loaded)}
            return [there.get(variable.path) for variable in _own(plain)]
        return _in_order(plain, _loaded(path, build()))
    except Exception as error:  # Keras, h5py, zipfile, json, urllib: each has its own
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UsageError(f"--init_from={path} cannot be used: {reason}") from None


def _builder(model):
    return NAMES[model].builder if model in NAMES else model


def _loaded(path, network):
    """The network with the weights of an .h5 file; NaN where it has none that fit."""
    for variable in _own(network):
        variable.assign(np.full(variable.shape, np.nan if "float" in variable.dtype else -1, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for each layer that does not fit
        network.load_weights(path, skip_mismatch=True)
    return network


def _in_order(plain, network):
    """The values of a network that the same function has made: its names may have other numbers, its order is the same."""
    values = [_array(variable) for variable in _own(network)]
    values += [None] * (len(_own(plain)) - len(values))
    return [None if value is None or np.isnan(value).any() else value for value in values]


def _own(network):
    return [variable for variable in network.weights if not is_seed(variable)]


def _array(variable):
    value = keras.ops.convert_to_numpy(variable)
    return value if value.dtype.kind in "iub" else np.asarray(value, np.float32 if value.itemsize < 8 else np.float64)
