"""Prepared data: every example once, the same bytes everywhere, whole or not there; and damage named with file and record."""

import dataclasses
import io
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from app import manifest, prepare, records, sources

SYNTHETIC = "synthetic:6x5x3:4:50"  # 50 + 13 examples


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def table_entry(value):
    for _ in range(8):
        value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value


TABLE = [table_entry(byte) for byte in range(256)]
assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value


def record(data):
    """A TFRecord, written here by hand."""

    def masked(part):
        crc = crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def quiet(dataset, folder, data_dir="", shards=8, **options):
    return prepare.prepare(dataset, str(data_dir), str(folder), shards, say=lambda line: None, **options)


def refusal(call, *arguments, **options):
    """The message with which something is refused: one line."""
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def examples(prepared, split):
    """(image, label) of a split, by the offsets in the manifest."""
    for shard in split.shards:
        content = pathlib.Path(prepared.path(shard)).read_bytes()
        for offset in shard.offsets:
            (length,) = struct.unpack_from("<Q", content, offset)
            image, label = records.parse(content[offset + 12 : offset + 12 + length], prepared)
            yield image.numpy(), int(label)


def files(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir() if path.name != "origin.json"}


def picture(seed, kind="JPEG", size=(12, 9)):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder_of_pictures(tmp_path):
    for part, count in (("train", 6), ("test", 3)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            for i in range(count):
                path = tmp_path / "pictures" / part / name / f"{i}.jpg"
                path.write_bytes(picture(100 * label + i, "PNG" if i == 1 else "JPEG"))
    return tmp_path / "pictures"


@pytest.mark.parametrize("shards", [1, 7, 50])
def test_each_example_is_there_once_and_shards_differ_by_one_at_most(tmp_path, shards):
    prepared, source = quiet(SYNTHETIC, tmp_path, shards=shards), sources.open_source(SYNTHETIC)
    for name, split, raws in (("train", prepared.train, source.train), ("test", prepared.test, source.test)):
        found = [(image.tobytes(), label) for image, label in examples(prepared, split)]
        expected = [(raws[i].image.tobytes(), raws[i].label) for i in range(len(raws))]
        assert sorted(found) == sorted(expected) and len(set(found)) == len(raws) == split.examples
        assert (found == expected) == (name == "test")  # what is held out keeps its order
        counts = [shard.examples for shard in split.shards]
        assert len(counts) == {"train": shards, "test": min(max(1, shards // 8), 13)}[name]
        assert max(counts) - min(counts) <= 1
    assert prepared.image_shape == (6, 5, 3) and prepared.image_dtype == "uint8" and len(prepared.classes) == 4


def test_mean_and_std_are_numpys_over_the_training_images(tmp_path, monkeypatch):
    images = np.stack([raw.image for raw in sources.open_source(SYNTHETIC).train])
    prepared = quiet(SYNTHETIC, tmp_path)
    assert np.allclose(prepared.mean, (images / 255).mean((0, 1, 2)), rtol=1e-13)
    assert np.allclose(prepared.std, (images / 255).std((0, 1, 2)), rtol=1e-12)
    (tmp_path / "my_floats.py").write_text(
        "import numpy as np\n"
        "x = np.random.default_rng(0).normal(3, 2, (40, 4, 5, 2)).astype(np.float32)\n"
        "def load():\n    return {'train': (x, np.arange(40) % 3)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    prepared = quiet("my_floats:load", tmp_path)
    import my_floats

    assert prepared.image_dtype == "float32" and prepared.test.examples == 0 == len(prepared.test.shards)
    assert np.allclose(prepared.mean, my_floats.x.astype(float).mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(prepared.std, my_floats.x.astype(float).std((0, 1, 2)), rtol=1e-12)
    assert sorted(image.tobytes() for image, _ in examples(prepared, prepared.train)) == sorted(
        x.tobytes() for x in my_floats.x
    )
    with open(tmp_path / "my_floats.py", "a") as file:
        file.write("# edited\n")
    assert "sha256 of the module" in refusal(quiet, "my_floats:load", tmp_path)


def test_two_preparations_give_the_same_bytes_and_another_seed_another_order(tmp_path):
    first, second = quiet(SYNTHETIC, tmp_path / "a"), quiet(SYNTHETIC, tmp_path / "b")
    other = quiet(SYNTHETIC, tmp_path / "a", seed=1)
    assert files(first.directory) == files(second.directory)
    assert first.digest() == second.digest() != other.digest()
    assert sorted(x.tobytes() for x, _ in examples(first, first.train)) == sorted(
        x.tobytes() for x, _ in examples(other, other.train)
    )
    # As it was when this was written: another one means that machines with other versions would not share a data set.
    assert first.train.shards[0].sha256.startswith("96d29f793c9caa7d")


def test_what_is_there_is_used_if_it_fits_and_its_files_are_whole(tmp_path):
    lines = []
    first = quiet(SYNTHETIC, tmp_path, "somewhere")
    again = prepare.prepare(SYNTHETIC, "somewhere", str(tmp_path), 8, say=lines.append)
    assert again.digest() == first.digest() and len(lines) == 1 and "50 + 13" in lines[0]
    assert "elsewhere" in refusal(quiet, SYNTHETIC, tmp_path, "elsewhere")
    shard = pathlib.Path(first.path(first.test.shards[0]))
    shard.write_bytes(shard.read_bytes()[:-7])
    message = refusal(quiet, SYNTHETIC, tmp_path)
    assert shard.name in message and str(shard.stat().st_size) in message and str(first.test.shards[0].bytes) in message
    shard.unlink()
    assert shard.name in refusal(manifest.check_files, first, first.test)
    manifest.check_files(first, first.train)
    manifest.check_files(first, first.test, [])
    os.remove(pathlib.Path(first.directory) / "manifest.json")
    assert "remove the folder" in refusal(quiet, SYNTHETIC, tmp_path)


def test_more_shards_than_examples_and_no_shards_are_refused(tmp_path):
    assert "51 shards for 50" in refusal(quiet, SYNTHETIC, tmp_path, shards=51)
    assert "0 shards" in refusal(quiet, SYNTHETIC, tmp_path, shards=0)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_read_back_as_it_was_written_or_refused(tmp_path):
    prepared = quiet(SYNTHETIC, tmp_path)
    marked = dataclasses.replace(prepared, train=manifest.Split(prepared.train.shards, ((0, 1), (3, 0))))
    assert marked.train.examples == 48 and marked.digest() != prepared.digest()
    assert dataclasses.replace(prepared, versions={}, directory="").digest() == prepared.digest()
    manifest.save(marked, str(tmp_path / "m"))
    loaded = manifest.load(str(tmp_path / "m"))
    assert loaded.digest() == marked.digest() and loaded.train.bad == ((0, 1), (3, 0))
    for field in ("classes", "image_shape", "mean", "std", "seed", "versions", "preprocessing"):
        assert getattr(loaded, field) == getattr(marked, field)
    path = tmp_path / "m" / "manifest.json"
    good = path.read_text()
    content = json.loads(good)
    for damaged, says in (
        (good[:100], "damaged"),
        ("[]", "damaged"),
        (json.dumps({**content, "format": 2}), "format 2"),
        (json.dumps({k: v for k, v in content.items() if k != "classes"}), "classes"),
        (json.dumps({**content, "offsets_sha256": "0"}), "offsets.npy"),
    ):
        path.write_text(damaged)
        assert says in (message := refusal(manifest.load, str(tmp_path / "m"))) and str(path) in message
    path.unlink()
    assert "./run.sh prepare" in refusal(manifest.load, str(tmp_path / "m"))


PROGRAM = """
import os, pathlib, signal, sys, time
from app import prepare, records
what, dataset, folder = sys.argv[1:]
if what == "dies":
    write = records.write
    def killed(path, *arguments):
        if "train-00005" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *arguments)
    records.write = killed
else:
    publish = prepare.publish
    def meets(*arguments):
        pathlib.Path(f"{folder}.{os.getpid()}.ready").touch()
        deadline = time.monotonic() + 60
        while len(list(pathlib.Path(folder).parent.glob("*.ready"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        return publish(*arguments)
    prepare.publish = meets
digest = prepare.prepare(dataset, "", folder, 8).digest()
from tensorflow.python.eager import context
print(digest, context.context()._initialized)
"""


def start(what, folder):
    command = [sys.executable, "-c", PROGRAM, what, SYNTHETIC, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_preparation_leaves_nothing_under_its_name_and_the_next_completes_it(tmp_path):
    process = start("dies", tmp_path / "p")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    final = pathlib.Path(prepare.prepared_path(SYNTHETIC, str(tmp_path / "p"), 8, 0))
    (left,) = (tmp_path / "p").iterdir()
    assert left != final and len(list(left.iterdir())) == 5
    alive = left.with_name(left.name.replace(str(process.pid), str(os.getppid())))
    alive.mkdir()  # of a process that lives: to be left alone
    assert quiet(SYNTHETIC, tmp_path / "p").directory == str(final)
    assert set((tmp_path / "p").iterdir()) == {final, alive}
    assert files(final) == files(quiet(SYNTHETIC, tmp_path / "q").directory)


def test_of_two_at_once_the_first_counts_and_both_use_it(tmp_path):
    processes = [start("meets", tmp_path / "p") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (final,) = (tmp_path / "p").iterdir()
    said = sorted(out.splitlines() for out, _ in outputs)
    assert sum(": prepared, " in line for lines in said for line in lines) == 1
    # Arrays are prepared without starting TensorFlow's runtime, which a worker may not do before its cluster is set up.
    assert {lines[-1] for lines in said} == {f"{manifest.load(str(final)).digest()} False"}
    assert files(final) == files(quiet(SYNTHETIC, tmp_path / "q").directory)


def test_encoded_pictures_stay_as_they_lie(tmp_path, folder_of_pictures):
    prepared = quiet("folder", tmp_path / "p", folder_of_pictures, shards=3)
    assert (prepared.image_shape, prepared.image_dtype, prepared.mean, prepared.std) == (None, "encoded", (), ())
    for part, split in (("train", prepared.train), ("test", prepared.test)):
        expected = [
            (path.read_bytes(), label)
            for label, name in enumerate(prepared.classes)
            for path in sorted((folder_of_pictures / part / name).iterdir())
        ]
        assert sorted(examples(prepared, split)) == sorted(expected)


def test_a_picture_that_cannot_be_decoded_stops_or_is_left_out_and_counted(tmp_path, folder_of_pictures):
    whole = (folder_of_pictures / "train" / "dog" / "3.jpg").read_bytes()
    (folder_of_pictures / "train" / "dog" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    assert "train/dog/3.jpg: cannot be decoded" in refusal(quiet, "folder", tmp_path, folder_of_pictures, 3)
    (folder_of_pictures / "test" / "cat" / "0.jpg").write_bytes(b"")
    skip = {"on_bad_record": "skip", "data_dir": str(folder_of_pictures), "shards": 3}
    assert "test/cat/0.jpg" in refusal(quiet, "folder", tmp_path, **skip, max_bad_records=1)
    lines = []
    prepared = prepare.prepare("folder", prepared_dir=str(tmp_path), say=lines.append, **skip, max_bad_records=2)
    assert (prepared.train.examples, prepared.test.examples) == (11, 5)
    assert sum("left out: " in line for line in lines) == 2 and any(line.startswith("2 bad examples") for line in lines)
    assert whole[: len(whole) // 2] not in [image for image, _ in examples(prepared, prepared.train)]
    assert "2 bad examples were left out" in refusal(quiet, "folder", tmp_path, folder_of_pictures, 3)
    assert quiet("folder", tmp_path, **skip, max_bad_records=2).digest() == prepared.digest()


WHOLE = [record(bytes([i]) * (20 + i)) for i in range(4)]
START = len(b"".join(WHOLE[:2]))  # of record 2
LAST = len(b"".join(WHOLE[:3]))


def flipped(place):
    content = bytearray(b"".join(WHOLE))
    content[place] ^= 0x40
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "number", "says"),
    [
        (b"", 0, "empty"),
        (b"".join(WHOLE)[:-1], 3, "cut off"),
        (b"".join(WHOLE)[:-4], 3, "cut off"),  # the footer: TensorFlow says nothing
        (b"".join(WHOLE)[:-7], 3, "cut off"),
        (b"".join(WHOLE)[: LAST + 5], 3, "cut off"),
        (b"".join(WHOLE)[: LAST + 12], 3, "cut off"),
        (flipped(START + 14), 2, "checksum"),
        (flipped(START - 2), 1, "checksum"),
        (flipped(START + 1), 2, "length"),
        (flipped(START + 9), 2, "length"),
        (b"".join(WHOLE) + bytes(40), 4, "length"),
    ],
)
def test_a_damaged_file_is_named_with_the_record(tmp_path, content, number, says):
    path = tmp_path / "train-00000-of-00001"
    path.write_bytes(content)
    message = refusal(records.scan, str(path))
    assert str(path) in message and f"record {number}" in message and says in message


def test_a_whole_file_gives_the_place_of_every_record_and_visits_each_in_order(tmp_path):
    path, visited = tmp_path / "many", []
    datas = [bytes([i]) * i for i in range(150)]
    path.write_bytes(b"".join(map(record, datas)))
    offsets, sizes = records.scan(str(path), lambda first, data: visited.extend(enumerate(data.numpy(), first)))
    assert offsets.dtype == np.int64 and offsets.tolist() == np.cumsum([0, *(16 + i for i in range(149))]).tolist()
    assert sizes.tolist() == list(range(150)) and visited == list(enumerate(datas))
    assert "No such file" in refusal(records.scan, str(path) + "x")
