"""Runs the tests: first those of one process, side by side; then those with real processes, one after the other.

The latter measure deadlines and use all cores themselves. Paths and `-k` run just that, in one go: python -m tests -k tree
"""

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Returns pytest's exit status, the worse of the two parts'."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if not all(argument.startswith("--") for argument in arguments):
        return subprocess.run(pytest).returncode
    workers = ["-n", str(min(4, os.cpu_count() or 1)), "--dist=worksteal"]
    side_by_side = subprocess.run([*pytest, "-m", "not processes", *workers]).returncode
    return max(side_by_side, subprocess.run([*pytest, "-m", "processes"]).returncode)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
