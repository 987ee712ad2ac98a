"""Lockstep, the application: commands, configuration, data, training, reports."""

import os
import platform

__version__ = "0.1.0"

# TensorFlow reads it when it is imported. By default it takes oneDNN's kernels on some processors alone (with AVX-512 VNNI and
# the like), and on the others its own, which take two to three times as long (docs/performance.md).
if platform.machine().lower() in ("x86_64", "amd64"):
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
