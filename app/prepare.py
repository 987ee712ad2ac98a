"""Turns a raw data set into shards of records and a manifest: the same files to the bit on every machine, whole or not at all.

They are written into a folder of this process's own beside the place where they belong, which is then renamed. If two
processes prepare the same set at once, the first rename counts, and the other process uses what is there. A preparation
that was interrupted starts over; the folder that it has left is removed by the next one on the same host.
"""

import concurrent.futures
import hashlib
import json
import os
import platform
import shutil
import sys
import time

import numpy as np
import tensorflow as tf

import app
from app import records, sources
from app.early import UNUSABLE
from app.manifest import Manifest, Split, load, own_folder, prepared_path, publish, save, whole
from app.records import PrepareError

_ORIGIN = "origin.json"
_AHEAD = 256  # examples that are read, and held in memory, at a time
_SAY_EVERY_S = 3


def prepare(
    dataset: str,
    data_dir: str,
    prepared_dir: str,
    shards: int = 64,
    seed: int = 0,
    say=print,
    on_bad_record: str = "stop",
    max_bad_records: int = 0,
) -> Manifest:
    """Writes the data set into prepared_path(...), or uses what is there already.

    The training examples are shuffled once, by the seed, and dealt to shards that differ by one example at most. What is
    held out keeps its order, in an eighth as many shards. Encoded images stay as they are; each is decoded once to see
    that it can be.

    Args:
      dataset, data_dir: as app.sources.open_source takes them.
      prepared_dir: where prepared data sets lie; made if need be.
      shards: of the training examples; at most as many as there are of these.
      seed: of their order, 0 or more.
      say: called with lines for people.
      on_bad_record: 'stop' at an example that cannot be read or decoded, or 'skip' it.
      max_bad_records: more than so many are an error with 'skip' as well.
    Raises:
      PrepareError, SourceError: one line.
    """
    final = prepared_path(dataset, prepared_dir, shards, seed)
    bad = records.BadRecords(on_bad_record, max_bad_records, say)
    wanted = {"dataset": dataset, "shards": shards, "seed": seed, **_origin(dataset, data_dir)}
    if os.path.lexists(final):
        return _used(final, wanted, bad, say)
    if shards < 1 or seed < 0:
        raise PrepareError(f"{dataset}: {shards} shards by seed {seed}; expected 1 or more, and 0 or more")
    source = sources.open_source(dataset, data_dir)
    try:
        folder = own_folder(final)
        try:
            save(_written(source, folder, shards, seed, bad, say), folder)
            with open(os.path.join(folder, _ORIGIN), "w", encoding="utf-8") as file:
                json.dump({**wanted, "left_out": bad.count}, file)
            if not publish(folder, final):
                return _used(final, wanted, bad, say)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise PrepareError(f"{final}: cannot be written: {records.reason(error)}") from None
    return load(final)


def _used(final, wanted, bad, say):
    """The data set that is there already, if it was prepared from the same by the same parameters and its files are whole."""
    try:
        manifest = whole(final)
        with open(os.path.join(final, _ORIGIN), encoding="utf-8") as file:
            found = dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise PrepareError(UNUSABLE.format(final, error)) from None
    for key, value in wanted.items():
        if found.get(key) != value and not (key == "data_dir" and not value):
            raise PrepareError(
                f"{final}: was prepared with {key} {found.get(key)!r}, and now it is {value!r}; remove the folder, or use "
                "another --prepared_dir"
            )
    left_out = found["left_out"]
    if left_out > bad.most:
        raise PrepareError(
            f"{final}: {left_out} bad examples were left out; --on_bad_record=skip --max_bad_records={left_out} allows it"
        )
    without = f", without {left_out} bad ones" if left_out else ""
    say(f"{final}: prepared, {manifest.train.examples:,} + {manifest.test.examples:,} examples{without}")
    return manifest


def _origin(dataset, data_dir):
    """What else a prepared set depends on: where the data lay, and the text of the user's module.

    A user's function that has been edited must not be answered with what it returned before.
    """
    text = ""
    module, _, function = dataset.partition(":")
    if function and module not in sources.NAMES:
        stems = [os.path.join(root or ".", *module.split(".")) for root in (*sys.path, "")]
        files = [stem + ending for stem in stems for ending in ("/__init__.py", ".py")]
        if path := next(filter(os.path.isfile, files), None):
            with open(path, "rb") as file:
                text = hashlib.sha256(file.read()).hexdigest()
    return {"data_dir": data_dir and os.path.abspath(data_dir), "sha256 of the module": text}


class Progress:
    """Says every few seconds how far something is."""

    def __init__(self, what: str, total: int, unit: str, say):
        self._what, self._total, self._unit, self._say = what, total, unit, say
        self._done = self._bytes = 0
        self._begin = self._last = time.monotonic()

    def add(self, done: int, size: int):
        """`done` more units, of `size` bytes together."""
        self._done, self._bytes, now = self._done + done, self._bytes + size, time.monotonic()
        if now - self._last >= _SAY_EVERY_S:
            self._last = now
            left = (now - self._begin) * (self._total - self._done) / self._done
            so_far = f"{self._done:,} of {self._total:,} {self._unit}, {self._bytes / 1e6:,.0f} MB"
            self._say(f"{self._what}: {so_far}, about {left:,.0f} s left")


def versions() -> dict[str, str]:
    """Of the programs that decide what is written."""
    numbers = {"python": platform.python_version(), "numpy": np.__version__, "tensorflow": tf.__version__}
    return {"lockstep": app.__version__, **numbers}


def _written(source, folder, shards, seed, bad, say):
    """Writes all shards into `folder`; returns their manifest."""
    encoded = source.image_shape is None
    dtype = "encoded" if encoded else source.train[0].image.dtype.name
    test = source.test or ()
    # NumPy promises the bits of Philox, but not that a Generator makes the same permutation of them in all versions.
    shuffled = np.argsort(np.random.Philox(seed).random_raw(len(source.train)), kind="stable")
    parts = {"train": (source.train, shuffled, shards), "test": (test, np.arange(len(test)), max(1, shards // 8))}
    if encoded:
        good = {part: _decodable(part, split, bad, say) for part, (split, *_) in parts.items()}
        parts = {part: (split, order[good[part][order]], count) for part, (split, order, count) in parts.items()}
        bad.done()
    if shards > (examples := len(parts["train"][1])):
        raise PrepareError(f"{source.name}: {shards} shards for {examples} training examples; at most one for each")
    moments = None if encoded else _Moments(source.image_shape[-1], dtype)
    splits = {}
    for part, (split, order, count) in parts.items():
        progress = Progress(f"writing {part}", len(order), "examples", say)
        count = min(count, len(order))
        written = []
        for index, piece in enumerate(np.array_split(order, count) if count else []):
            raws = (_checked(raw, source, dtype) for raw in _each(split.__getitem__, piece.tolist(), encoded))
            if moments and part == "train":
                raws = map(moments.add, raws)
            written.append(
                records.write(os.path.join(folder, f"{part}-{index:05d}-of-{count:05d}.tfrecord"), raws, progress.add)
            )
        splits[part] = Split(tuple(written))
    mean, std = moments.mean_and_std() if moments else ((), ())
    return Manifest(
        dataset=source.name,
        classes=tuple(source.classes),
        image_shape=source.image_shape and tuple(source.image_shape),
        image_dtype=dtype,
        preprocessing=source.preprocessing,
        mean=mean,
        std=std,
        label_offset=0,
        seed=seed,
        **splits,
        versions=versions(),
    )


def _decodable(part, split, bad, say):
    """bool [examples]: which can be read and decoded."""
    progress = Progress(f"checking {part}", len(split), "examples", say)

    def look(index):
        try:
            raw = split[index]
        except sources.SourceError as error:
            return str(error), 0
        problem = records.decoding_problem(raw.image)
        return problem and f"{raw.key}: {problem}", len(raw.image)

    good = np.ones(len(split), bool)
    for index, (problem, size) in enumerate(_each(look, range(len(split)), threads=True)):
        if problem:
            bad.add(problem)
            good[index] = False
        progress.add(1, size)
    return good


def _each(function, items, threads):
    """function(item) for each, in order."""
    if not threads:
        yield from map(function, items)
        return
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(items), _AHEAD):
            yield from pool.map(function, items[start : start + _AHEAD])


def _checked(raw, source, dtype):
    if not 0 <= raw.label < len(source.classes):
        raise PrepareError(f"{raw.key}: its label is {raw.label}, but labels go from 0 to {len(source.classes) - 1}")
    if dtype != "encoded" and (raw.image.shape, raw.image.dtype.name) != (tuple(source.image_shape), dtype):
        raise PrepareError(f"{raw.key}: is {raw.image.dtype} {raw.image.shape}, not {dtype} {tuple(source.image_shape)}")
    return raw


class _Moments:
    """Mean and standard deviation of each channel: exact for uint8, and in float64 for float32."""

    def __init__(self, channels, dtype):
        self._whole = dtype == "uint8"
        self._dtype = np.int64 if self._whole else np.float64
        self._count, self._sum, self._squares = 0, np.zeros(channels, self._dtype), np.zeros(channels, self._dtype)

    def add(self, raw):
        """Counts an example in, and returns it."""
        pixels = np.ascontiguousarray(raw.image.reshape(-1, len(self._sum)).T, self._dtype)
        self._count += pixels.shape[1]
        self._sum += pixels.sum(axis=1)
        self._squares += (pixels * pixels).sum(axis=1)
        return raw

    def mean_and_std(self):
        n, white = self._count, 255 if self._whole else 1
        sums = list(zip(self._sum.tolist(), self._squares.tolist(), strict=True))  # Python's whole numbers do not overflow
        mean = tuple(total / n / white for total, _ in sums)
        return mean, tuple(max(n * squares - total**2, 0) ** 0.5 / n / white for total, squares in sums)
