"""Runs the tests: those of one process side by side; those with real processes two at a time; those with deadlines alone.

Paths and `-k` run just that, in one go: python -m tests -k tree
"""

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Returns pytest's exit status, the worse of the two parts'."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    if not all(argument.startswith("--") for argument in arguments):
        return subprocess.run(pytest).returncode
    parts = (
        ["-m", "not processes and not alone", "-n", str(min(4, os.cpu_count() or 1)), "--dist=worksteal"],
        ["-m", "processes and not alone", "-n", "2", "--dist=loadfile"],
        ["-m", "alone"],
    )
    return max(subprocess.run([*pytest, *part]).returncode for part in parts)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
