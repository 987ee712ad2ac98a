"""Keras training on any number of workers, with the same result: knows nothing of images or networks.

`Trainer` wraps a Keras model, `run` is a process's part in the cluster, `python -m cluster.launcher` starts several here.
"""

import importlib

from cluster import quiet

_HOME = {"Trainer": "trainer", "run": "runtime", "configure": "runtime", "make_strategy": "runtime", "watch": "watching"}


def __getattr__(name):  # TensorFlow takes seconds to import, and the launcher does not need it
    if name in _HOME:
        with quiet.hushed():
            module = importlib.import_module(f"cluster.{_HOME[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'cluster' has no attribute {name!r}")
