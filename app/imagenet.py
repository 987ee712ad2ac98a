"""ImageNet's TFRecords, read where they lie: one pass over all of them checks every record, and makes a manifest.

The files are train-?????-of-????? and validation-?????-of-?????, of records with `image/encoded`, `image/class/label` and,
if there is one, `image/class/text`. Labels from 1 (0 is background) and from 0 are told apart by what is there.
"""

import concurrent.futures
import dataclasses
import hashlib
import os

import numpy as np
import tensorflow as tf

from app import records
from app.manifest import Manifest, Shard, Split, load, of_files, save
from app.prepare import Progress, versions
from app.records import PrepareError, RecordError
from app.sources.imagenet import manifest_path, raw_files

CLASSES = 1000  # labels of more than so many are those of something else
_TEXT = "image/class/text"
_FEATURES = {
    records.ENCODED: tf.io.FixedLenFeature([], tf.string),
    records.LABEL: tf.io.FixedLenFeature([], tf.int64),
    _TEXT: tf.io.FixedLenFeature([], tf.string, ""),
}
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PN")


@dataclasses.dataclass(eq=False)
class _File:
    """What is in a file of records."""

    shard: Shard
    labels: np.ndarray  # int64 [records], as stored; that of a bad record means nothing
    texts: dict[int, str]  # by label
    bad: dict[int, str]  # by record, why

    @property
    def good(self):
        """int64, the records that are not bad."""
        return np.setdiff1d(np.arange(len(self.labels)), list(self.bad))


def scan_imagenet(
    data_dir: str,
    prepared_dir: str,
    say=print,
    verify_images: bool = False,
    on_bad_record: str = "stop",
    max_bad_records: int = 0,
) -> Manifest:
    """The manifest of the files in data_dir, stored in prepared_dir/imagenet/manifest.

    It is made again only if the names or sizes of the files have changed, or more is asked for than was checked. There are
    as many classes as the highest label says: 1000, or fewer if only a part of ImageNet is there.

    Args:
      say: called with lines for people.
      verify_images: also decode every image, and compute the files' sha256.
      on_bad_record: 'stop' at a record that is no example with an image, or 'skip' it: list it in the manifest. A file that is
        damaged, cut off or lacking is an error in any case: copy it again.
      max_bad_records: more than so many are an error with 'skip' as well.
    Raises:
      PrepareError, SourceError: one line that names the file and the record.
    """
    bad = records.BadRecords(on_bad_record, max_bad_records, say)
    directory = manifest_path(prepared_dir)
    splits = raw_files(data_dir)
    if found := _stored(directory, splits, verify_images, bad):
        say(f"{directory}: made before, of the same files: {found.train.examples:,} + {found.test.examples:,} examples")
        return found
    paths, sizes = zip(*splits["train"], *splits["test"], strict=True)
    say(f"reading {len(paths)} files in {data_dir} once, {sum(sizes) / 1e9:,.1f} GB")
    progress = Progress("reading", len(paths), "files", say)
    files = []
    # TensorFlow reads and parses without holding Python's lock.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for file in pool.map(lambda path: _read(path, verify_images), paths):
                for record, problem in file.bad.items():
                    bad.add(f"{file.shard.path}: record {record} {problem}")
                files.append(file)
                progress.add(1, file.shard.bytes)
        finally:
            pool.shutdown(cancel_futures=True)
    bad.done()
    trained = len(splits["train"])
    manifest = _manifest(files[:trained], files[trained:], say)
    try:
        save(manifest, directory)
    except OSError as error:
        raise PrepareError(f"{directory}: cannot be written: {records.reason(error)}") from None
    return load(directory)


def _stored(directory, files, verify_images, bad):
    """The manifest that is there, if it is of these files, and has been checked for what is asked; else None."""
    if not (manifest := of_files(directory, files)):
        return None
    splits = manifest.train, manifest.test
    verified = all(shard.sha256 for split in splits for shard in split.shards)
    left_out = sum(len(split.bad) for split in splits)
    return manifest if verified >= verify_images and left_out <= bad.most else None


def _read(path, verify_images):
    """All of a file: every checksum, label and text; with verify_images each image is decoded."""
    labels, texts, bad = [], {}, {}

    def visit(first, data):
        try:
            examples = tf.io.parse_example(data, _FEATURES)
        except tf.errors.OpError:
            examples = _one_by_one(first, data, bad)
        labels.append(examples[records.LABEL].numpy())
        for label, text in zip(labels[-1].tolist(), examples[_TEXT].numpy(), strict=True):
            if text:
                texts.setdefault(label, text.decode(errors="replace"))
        images = examples[records.ENCODED]
        for record, head in enumerate(tf.strings.substr(images, 0, 3).numpy(), first):
            if record in bad:
                continue
            if head not in _SIGNATURES:
                bad[record] = "has an image that begins like neither JPEG nor PNG"
            elif verify_images and (problem := records.decoding_problem(images[record - first])):
                bad[record] = f"has an image that {problem}"

    offsets, _ = records.scan(path, visit)
    sha256 = ""
    if verify_images:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    shard = Shard(path, len(offsets), os.path.getsize(path), sha256, offsets)
    return _File(shard, np.concatenate(labels), texts, dict(sorted(bad.items())))


def _one_by_one(first, data, bad):
    """What parse_example gives, with nothing for those that cannot be parsed, which are added to `bad`."""
    nothing = {records.ENCODED: tf.constant(""), records.LABEL: tf.constant(0, tf.int64), _TEXT: tf.constant("")}
    examples = []
    for record, serialized in enumerate(data, first):
        try:
            examples.append(tf.io.parse_single_example(serialized, _FEATURES))
        except tf.errors.OpError as error:
            bad[record] = f"is no example with {records.ENCODED} and one {records.LABEL}: {records.reason(error)}"
            examples.append(nothing)
    return {key: tf.stack([example[key] for example in examples]) for key in nothing}


def _manifest(train, test, say):
    """Of the files that have been read; decides from where labels count."""
    labels = np.concatenate([file.labels[file.good] for file in train])
    if not len(labels):
        raise PrepareError(f"{train[0].shard.path}: there is no good record in all training files")
    lowest, highest = int(labels.min()), int(labels.max())
    offset = int(highest == CLASSES or lowest >= 1)
    for file in (*train, *test):
        for record in file.good:
            if not offset <= (label := int(file.labels[record])) < offset + CLASSES:
                raise RecordError(
                    f"{file.shard.path}: record {record} has label {label}; as those for training go from {lowest} to "
                    f"{highest}, they should go from {offset} to {offset + CLASSES - 1}"
                )
            highest = max(highest, label)
    texts = {label: text for file in reversed((*train, *test)) for label, text in file.texts.items()}  # the first stays
    classes = tuple(texts.get(label) or str(label - offset) for label in range(offset, highest + 1))
    say(f"labels go from {lowest} to {highest}: they count from {offset}, {len(classes)} classes")
    splits = [
        Split(tuple(f.shard for f in files), tuple((i, record) for i, f in enumerate(files) for record in f.bad))
        for files in (train, test)
    ]
    return Manifest("imagenet", classes, None, "encoded", "imagenet", (), (), offset, 0, *splits, versions=versions())
