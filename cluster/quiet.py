"""Keeps back what TensorFlow's C++ prints while it starts, unless the start fails. Python's own output is not touched."""

import contextlib
import os
import sys
import tempfile


@contextlib.contextmanager
def hushed(enabled=True):
    """Within the block, what C++ writes to standard error is kept; if the block raises, it is printed.

    TF_CPP_MIN_LOG_LEVEL alone does not do: some lines are printed before TensorFlow reads it, and a machine without a GPU
    is told at error level that it has none.
    """
    if not enabled:
        yield
        return
    sys.stderr.flush()
    python_stderr, real = sys.stderr, os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        sys.stderr = os.fdopen(os.dup(real), "w", buffering=1)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(real, kept.read())
            raise
        finally:
            sys.stderr.flush()  # not closed: what was imported meanwhile logs to it (TensorFlow's Python logger does)
            sys.stderr = python_stderr
            os.dup2(real, 2)
            os.close(real)
