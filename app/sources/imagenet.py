"""ImageNet's TFRecord files by their names: all of each split, of one set. Needs no TensorFlow."""

import os
import re

from app.sources import SourceError

_PARTS = {"train": "train", "test": "validation"}


def manifest_path(prepared_dir: str) -> str:
    """The folder of the manifest that a scan of the files makes."""
    return os.path.join(prepared_dir, "imagenet", "manifest")


def raw_files(data_dir: str) -> dict[str, list[tuple[str, int]]]:
    """{"train": [(path, size), ...], "test": ...} of the files train-?????-of-????? and validation-?????-of-?????.

    Raises:
      SourceError: if there are none, one is missing, or two sets are mixed.
    """
    return {part: _files(os.path.abspath(data_dir), prefix) for part, prefix in _PARTS.items()}


def _files(data_dir, prefix):
    try:
        entries = sorted(os.listdir(data_dir))
        found = [match for entry in entries if (match := re.fullmatch(prefix + r"-(\d{5})-of-(\d{5})", entry))]
        if not found:
            raise SourceError(
                f"imagenet: looked for {prefix}-00000-of-... in {data_dir} and found no such file; --data_dir names the folder"
            )
        totals = sorted({match[2] for match in found})
        if len(totals) > 1:
            raise SourceError(f"{data_dir}: has {prefix} files of -of-{' and of -of-'.join(totals)}; leave one set there")
        wanted = [f"{prefix}-{index:05d}-of-{totals[0]}" for index in range(int(totals[0]))]
        if missing := sorted(set(wanted) - {match[0] for match in found}):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise SourceError(f"{data_dir}: lacks {missing[0]}{more}; expected {len(wanted)} {prefix} files")
        paths = [os.path.join(data_dir, name) for name in wanted]
        return [(path, os.path.getsize(path)) for path in paths]
    except OSError as error:
        reason = error.strerror or error
        raise SourceError(f"imagenet: {error.filename} cannot be read: {reason}; --data_dir names the folder") from None
