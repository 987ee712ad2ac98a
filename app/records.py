"""Examples as TFRecords: written the same to the bit everywhere, parsed in a graph, and checked record by record.

A record is the length of its data (uint64, little-endian), that length's masked CRC-32C, the data, and the data's masked
CRC-32C. The data is a tf.train.Example of `image/raw` (an array in C order, little-endian) or `image/encoded` (a JPEG or
PNG file), and `image/class/label` (int64).
"""

import hashlib
import os
import re
import struct

import numpy as np
import tensorflow as tf

from app.manifest import Shard

RAW, ENCODED, LABEL = "image/raw", "image/encoded", "image/class/label"
OVERHEAD = 16  # bytes of a record that are not its data
_BATCH = 64


class PrepareError(ValueError):
    """Data that cannot be made ready for training: one line that says what, why, and what to do."""


class RecordError(PrepareError):
    """A damaged file of records; names the file, the record (from 0) and what is wrong."""


class BadRecords:
    """What to do with examples that cannot be used: stop at the first, or leave out so many at most.

    Attributes:
      most: how many may be left out.
      count: how many have been.
    """

    def __init__(self, on_bad_record: str, most: int, say):
        if on_bad_record not in ("stop", "skip"):
            raise PrepareError(f"on_bad_record={on_bad_record!r}; expected 'stop' or 'skip'")
        self._skip, self._say = on_bad_record == "skip", say
        self.most, self.count = most if self._skip else 0, 0

    def add(self, what: str):
        """Takes note of one; `what` says which and why. Raises PrepareError unless it may be left out."""
        if not self._skip:
            raise PrepareError(f"{what}. Repair or remove it, or leave such out: --on_bad_record=skip --max_bad_records=10")
        self.count += 1
        if self.count > self.most:
            raise PrepareError(f"{what}. That is bad example {self.count}, and --max_bad_records={self.most}")
        if self.count <= 5:
            self._say(f"left out: {what}")

    def done(self):
        """Says how many there were."""
        if self.count:
            self._say(f"{self.count} bad examples are left out (--max_bad_records={self.most})")


def serialize(raw) -> bytes:
    """The data of an example's record; `raw` is an app.sources.Raw, or anything with its `image` and `label`."""
    if isinstance(raw.image, bytes):
        image = {ENCODED: _bytes(raw.image)}
    else:
        image = {RAW: _bytes(raw.image.astype(raw.image.dtype.newbyteorder("<"), copy=False).tobytes())}
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[raw.label]))
    return tf.train.Example(features=tf.train.Features(feature={**image, LABEL: label})).SerializeToString(deterministic=True)


def parse(serialized, manifest):
    """An example as it was stored; made for tf.data's map.

    Args:
      serialized: scalar string, the data of a record.
      manifest: app.manifest.Manifest of the set.
    Returns:
      image: of manifest.image_shape and image_dtype; or scalar string, the bytes of a JPEG or PNG file.
      label: int32, from 0. That it is one of the classes has been seen to when the manifest was made.
    """
    encoded = manifest.image_dtype == "encoded"
    key = ENCODED if encoded else RAW
    features = {key: tf.io.FixedLenFeature([], tf.string), LABEL: tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(serialized, features)
    image = example[key]
    if not encoded:
        image = tf.reshape(tf.io.decode_raw(image, tf.as_dtype(manifest.image_dtype)), manifest.image_shape)
    return image, tf.cast(example[LABEL], tf.int32) - manifest.label_offset


def write(path: str, raws, wrote) -> Shard:
    """Writes a file of records.

    Args:
      raws: app.sources.Raw, in order.
      wrote: called as wrote(examples, bytes) with what has been written since the last call.
    Raises:
      PrepareError: if not all of it has arrived in the file.
    """
    offsets, size = [], 0
    try:
        with tf.io.TFRecordWriter(path) as writer:
            for raw in raws:
                data = serialize(raw)
                writer.write(data)
                offsets.append(size)
                size += len(data) + OVERHEAD
                wrote(1, len(data))
        with open(path, "rb") as file:
            digest, on_disk = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except tf.errors.OpError as error:
        raise PrepareError(f"{path}: cannot be written: {reason(error)}") from None
    if on_disk != size:
        raise PrepareError(f"{path}: {on_disk} of {size} bytes were written. Is the disk full?")
    return Shard(os.path.basename(path), len(offsets), size, digest, np.array(offsets, np.int64))


def decoding_problem(encoded) -> str:
    """Why an encoded image cannot be decoded, or ''. It is decoded whole: some parts of a cut off JPEG always can be."""
    try:
        tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return ""
    except tf.errors.OpError as error:
        return f"cannot be decoded: {reason(error)}"


def scan(path: str, visit=None) -> tuple[np.ndarray, np.ndarray]:
    """Reads the whole of a file of records once, and checks every checksum and that it ends with a record.

    Args:
      path: of the file.
      visit: called as visit(first, data) for successive runs of records: the number of the first, and string [n].
    Returns:
      offsets: int64 [records], where each record starts, in bytes.
      sizes: int64 [records], of their data, in bytes.
    Raises:
      RecordError: if it cannot be read, is empty, cut off or damaged.
    """
    try:
        total = os.path.getsize(path)
        sizes = [np.zeros(0, np.int64)]
        records = 0
        for data in tf.data.TFRecordDataset(path, buffer_size=8 << 20).batch(_BATCH):
            sizes.append(tf.strings.length(data).numpy().astype(np.int64))
            if visit:
                visit(records, data)
            records += len(sizes[-1])
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError):
        raise RecordError(_damage(path)) from None
    except (OSError, tf.errors.OpError) as error:
        raise RecordError(f"{path}: cannot be read: {reason(error)}") from None
    sizes = np.concatenate(sizes)
    ends = np.cumsum(sizes + OVERHEAD)
    # TensorFlow takes a file that ends within a record for one that ends before it.
    if not records or ends[-1] != total:
        raise RecordError(_damage(path))
    return ends - sizes - OVERHEAD, sizes


def reason(error: Exception) -> str:
    """What an error of TensorFlow's, or of the system's, says to a person: one line, without names of operations."""
    text = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    return re.sub(r"^\{\{.*?\}\} ?| \[Op:.*$", "", text.partition("\n")[0]).strip() or type(error).__name__


def _damage(path):
    """What is wrong with a file, and in which record: the first that TensorFlow does not give, or that is not whole."""
    total = os.path.getsize(path)
    if not total:
        return f"{path}: is empty: 0 bytes, no record 0"
    intact = 0
    try:
        for _ in tf.data.TFRecordDataset(path):
            intact += 1
    except tf.errors.OpError:
        pass
    record = start = 0
    with open(path, "rb") as file:
        while True:
            file.seek(start)
            head = file.read(12)
            if len(head) == 12 and struct.unpack("<I", head[8:])[0] != _masked_crc(head[:8]):
                return f"{path}: the length of record {record} (at byte {start}) is damaged: its checksum is wrong"
            end = start + int.from_bytes(head[:8], "little") + OVERHEAD
            if len(head) < 12 or end > total:
                return f"{path}: is cut off in record {record} (at byte {start}): it has {total} bytes. Was it copied in full?"
            if record == intact:
                return f"{path}: the checksum of record {record} (at byte {start}) is wrong: its data is damaged"
            record, start = record + 1, end


def _masked_crc(data):
    """The CRC-32C of a few bytes, bit by bit, as TFRecords mask it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _bytes(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
