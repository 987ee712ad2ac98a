"""Finds and reads the files of a data set; what is missing or cannot be read is named in one line."""

import os
import pathlib
from collections.abc import Sequence

from app.sources import SourceError


def find(name: str, folders: Sequence[pathlib.Path], wanted: dict[str, Sequence[str]], hint: str) -> dict[str, pathlib.Path]:
    """The files of a data set that must lie in one folder.

    Args:
      name: of the data set.
      folders: where to look. The first that has any of the files is taken, so that two copies are never mixed.
      wanted: for each file the names that it may have, the preferred one first.
      hint: what to do if they are missing.
    Returns:
      For each of `wanted` its path.
    Raises:
      SourceError: that names all missing files and where they were looked for.
    """
    for folder in folders:
        found = {key: next((folder / n for n in names if os.path.isfile(folder / n)), None) for key, names in wanted.items()}
        if any(found.values()):
            break
    else:
        files = ", ".join(names[0] for names in wanted.values())
        places = " or ".join(map(str, folders)) or "no folder (--data_dir is not given)"
        raise SourceError(f"{name}: looked for {files} in {places} and found none of them; {hint}")
    missing = [wanted[key][0] for key, path in found.items() if path is None]
    if missing:
        raise SourceError(f"{name}: {folder} lacks {', '.join(missing)}; {hint}")
    return found


def entries(folder: pathlib.Path) -> list[os.DirEntry]:
    """What is in a folder and not hidden, sorted by the names' UTF-8 bytes. Raises SourceError."""
    try:
        found = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise SourceError(f"{folder}: cannot be listed: {error.strerror or error}") from None
    return sorted(found, key=lambda entry: entry.name)  # by code point, which is the order of the UTF-8 bytes


def read(path: pathlib.Path) -> bytes:
    """All bytes of a file. Raises SourceError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
