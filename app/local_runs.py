"""Whole runs as processes of this machine, for commands that make several of them: `verify` and `repeat`."""

import os
import subprocess
import sys

from app.config import Config
from cluster import launcher


def prepare(config: Config) -> int:
    """Prepares the data once, instead of in each run. Returns the exit status."""
    if os.path.exists(config.prepared_path()):
        return 0
    return subprocess.run([sys.executable, "-m", "app", "prepare", "--for_training=yes", *config.to_flags()]).returncode


def run(config: Config, workers: int, command: str = "train") -> int:
    """Runs a command of this program on so many worker processes. Returns the exit status, as `cluster.launcher.run` does."""
    return launcher.run([sys.executable, "-m", "app", command, *config.to_flags()], workers)
