"""Reads pickles of plain data and of byte arrays without running what they say: a pickle may name any function to call.

The names that a pickled array needs stand here for objects that only note what they are given; NumPy's own are not used,
since the pickled state of its types decides what memory is taken for a pointer. Every other name is refused.
"""

import io
import pathlib
import pickle

import numpy as np

from app.sources import SourceError


def load(path: pathlib.Path, content: bytes) -> dict[str, object]:
    """The dict in a pickle, of numbers, strings, lists, dicts, and (as its values) arrays of uint8.

    Args:
      path: for messages.
      content: the bytes of the file.
    Returns:
      The dict. Keys are str; other strings of Python 2 are bytes.
    Raises:
      SourceError: if the pickle is damaged, is no such dict, or names anything that one does not need.
    """
    try:
        entries = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        plain = {key: value.array if isinstance(value, _Array) else value for key, value in entries.items()}
        return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in plain.items()}
    except _RefusedError as error:
        raise SourceError(f"{path}: a pickle that names {error}, which no data needs: it may run code; not loaded") from None
    except Exception as error:  # what a damaged pickle raises may be anything
        raise SourceError(f"{path}: not a whole pickle of plain data ({type(error).__name__}); get it again") from None


class _RefusedError(Exception):
    pass


class _Type:
    """Stands for numpy.dtype: called as dtype('u1', 0, 1), then given a state, of which a byte needs nothing."""

    def __init__(self, code, *_):
        self.code = code

    def __setstate__(self, state):
        pass


class _Array:
    """Stands for numpy.ndarray: made without content, then given (version, shape, type, is_fortran, content)."""

    def __init__(self, *_):
        self.array = None

    def __setstate__(self, state):
        _, shape, dtype, is_fortran, content = state
        if dtype.code not in ("u1", b"u1"):
            raise ValueError("not an array of uint8")
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


def _encode(text, _):
    return text.encode("latin1")  # as Python 3 writes bytes for Python 2


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): None,  # an argument of _reconstruct, never called
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise _RefusedError(ascii(f"{module}.{name}"))
        return _ALLOWED[module, name]
