"""A user's function by name, 'package.module:function': found, imported and looked at, with one line for what is wrong."""

import importlib
import importlib.util
import inspect
import os
import re
import sys


def absent(name: str) -> str | None:
    """Why 'package.module:function' cannot be there, in one line, without importing anything; None if it may be."""
    package = name.partition(":")[0].partition(".")[0]
    _look_in_current_folder()
    try:
        if importlib.util.find_spec(package):
            return None
    except (ImportError, ValueError):
        return None  # importing it will tell
    return f"{name}: cannot import it: ModuleNotFoundError: No module named {package!r}"


def function(name: str, refused: type[ValueError]):
    """The function, looked for in the current folder, on PYTHONPATH and among installed packages.

    Raises:
      refused: one line, if it cannot be imported or is no function.
    """
    module, _, attribute = name.partition(":")
    _look_in_current_folder()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code
        raise refused(f"{name}: cannot import it: {type(error).__name__}: {first_line(error)}") from error
    if not callable(found):
        raise refused(f"{name}: is {type(found).__name__}, not a function")
    return found


def fits(called, *arguments, **keywords) -> str | None:
    """Why a function cannot be called with these; None if it can."""
    try:
        inspect.signature(called).bind(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def takes(called, parameter: str) -> bool:
    """Whether a function has a parameter of that name."""
    try:
        return parameter in inspect.signature(called).parameters
    except (TypeError, ValueError):
        return False


def first_line(error: BaseException) -> str:
    """What an error says in one line. Of an error in a layer that is the second: Keras puts the layer's name before it."""
    lines = re.sub("\x1b\\[[0-9]*m", "", str(error)).splitlines()  # and has it printed in bold
    return next((line for line in lines if line and not line.startswith("Exception encountered when calling")), "")


def _look_in_current_folder():
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides nothing of ours
