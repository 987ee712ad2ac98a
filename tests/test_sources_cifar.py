"""CIFAR as published: the binary version byte by byte, the pickled one without running what a pickle may contain."""

import os
import pathlib
import pickle

import numpy as np
import pytest
from test_sources import refusal

from app import sources

CIFAR10_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def picture(place):
    """A picture [32, 32, 3] and its record's 3,072 bytes, pixel by pixel as the format describes them."""
    image = np.random.default_rng(place).integers(0, 256, (32, 32, 3), np.uint8)
    return image, bytes(int(image[y, x, c]) for c in range(3) for y in range(32) for x in range(32))


def sparse(path, start, size):
    """A file of `size` bytes: `start`, then zeros, which are records of label 0."""
    path.write_bytes(start)
    os.truncate(path, size)


def write_cifar_binary(folder, files, label_bytes, examples):
    folder.mkdir()
    for number, file in enumerate(files):
        records = b"".join(bytes([9] * (label_bytes - 1) + [number + k]) + picture(10 * number + k)[1] for k in range(2))
        sparse(folder / f"{file}.bin", records, examples[number] * (label_bytes + 3072))


def test_cifar10_binary_files_are_read_byte_by_byte(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    write_cifar_binary(folder, CIFAR10_FILES, 1, [10_000] * 6)
    (folder / "batches.meta.txt").write_text("".join(f"{c}\n" for c in "abcdefghij") + "\n")
    source = sources.open_source("cifar10", str(tmp_path))
    assert (len(source.train), len(source.test), source.classes) == (50_000, 10_000, tuple("abcdefghij"))
    for number in range(6):
        split, start = (source.test, 0) if number == 5 else (source.train, number * 10_000)
        for k in range(2):
            example = split[start + k]
            assert np.array_equal(example.image, picture(10 * number + k)[0])
            assert (example.label, example.key) == (number + k, f"{CIFAR10_FILES[number]}.bin[{k}]")


def test_cifar100_has_the_fine_label_after_the_coarse_one(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    write_cifar_binary(folder, ["train", "test"], 2, [50_000, 10_000])
    (folder / "fine_label_names.txt").write_text("\n".join(f"class_{i}" for i in range(100)))
    source = sources.open_source("cifar100", str(folder))
    assert [source.train[1].label, source.test[1].label, source.test[2].label] == [1, 2, 0]
    assert np.array_equal(source.test[1].image, picture(11)[0])
    os.truncate(folder / "test.bin", 9_999 * 3074)
    assert "test.bin: 30,736,926 bytes, but 10,000 records of 3,074 make 30,740,000" in refusal("cifar100", folder)


def old_pickle(value):
    """As Python 2 and the NumPy of its day wrote it: byte strings throughout, and the array's old module name."""
    if isinstance(value, dict):
        return b"}(" + b"".join(map(old_pickle, (x for pair in value.items() for x in pair))) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(old_pickle, value)) + b"e"
    if isinstance(value, int):
        return b"K" + bytes([value])
    if isinstance(value, np.ndarray):
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + old_pickle("b") + b"tR"
        dtype = (
            b"cnumpy\ndtype\n("
            + old_pickle("u1")
            + b"K\0K\1tR(K\3"
            + old_pickle("|")
            + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        )
        shape = b"(" + b"".join(b"J" + n.to_bytes(4, "little") for n in value.shape) + b"t"
        return made + b"(K\1" + shape + dtype + b"I00\n" + b"T" + value.nbytes.to_bytes(4, "little") + value.tobytes() + b"tb"
    return b"U" + bytes([len(value)]) + value.encode()


@pytest.fixture(scope="module")
def cifar_python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-py"
    folder.mkdir()
    for number, file in enumerate(CIFAR10_FILES):
        data = np.zeros((10_000, 3072), np.uint8)
        data[7] = np.frombuffer(picture(number)[1], np.uint8)
        content = {"batch_label": file, "labels": [number] * 10_000, "data": data, "filenames": ["a.png"] * 3}
        # The half of the files as published, the others written anew by Python 3, with str and with bytes for keys.
        anew = content if number % 2 else {key.encode(): value for key, value in content.items()}
        (folder / file).write_bytes(
            b"\x80\2" + old_pickle(content) + b"." if number < 3 else pickle.dumps(anew, protocol=2 if number < 5 else 4)
        )
    (folder / "batches.meta").write_bytes(b"\x80\2" + old_pickle({"label_names": list("abcdefghij")}) + b".")
    return folder


def test_cifar_python_files_are_read_byte_by_byte(cifar_python):
    source = sources.open_source("cifar10", str(cifar_python.parent))
    assert (len(source.train), len(source.test), source.classes) == (50_000, 10_000, tuple("abcdefghij"))
    for number in range(6):
        example = source.test[7] if number == 5 else source.train[number * 10_000 + 7]
        assert np.array_equal(example.image, picture(number)[0])
        assert (example.label, example.key) == (number, f"{CIFAR10_FILES[number]}[7]")


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (lambda mark: pickle.dumps(Malicious(os.system, f"touch {mark}")), "posix.system"),
        (lambda mark: pickle.dumps({"label_names": [Malicious(eval, f"open({str(mark)!r}, 'w')")]}), "builtins.eval"),
        (lambda mark: pickle.dumps(Malicious(pathlib.Path.touch, mark)), "touch"),
        (lambda mark: pickle.dumps({"label_names": np.array([object])}), "builtins.object"),
        (lambda mark: b"cnumpy\nndarray.tofile\n.", "numpy.ndarray.tofile"),
        (lambda mark: b"cnumpy\nndarray\n(K\1tR.", "not a whole pickle"),
        (lambda mark: b"cnumpy\nload\n(S'" + str(mark).encode() + b"'tR.", "numpy.load"),
        (lambda mark: pickle.dumps({"label_names": list("abc")})[:-4], "not a whole pickle"),
        (lambda mark: pickle.dumps({"label_names": list("abc")}), "names 3 classes"),
        (lambda mark: pickle.dumps({"names": list("abc")}), "'label_names'"),
        (lambda mark: pickle.dumps(["label_names"]), "not a whole pickle"),
        (lambda mark: b"", "not a whole pickle"),
    ],
)
def test_a_pickle_that_calls_anything_is_refused_and_not_run(cifar_python, tmp_path, meta, says):
    for file in CIFAR10_FILES:
        os.symlink(cifar_python / file, tmp_path / file)
    (tmp_path / "batches.meta").write_bytes(meta(tmp_path / "mark"))
    message = refusal("cifar10", tmp_path)
    assert says in message
    assert str(tmp_path / "batches.meta") in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"data": np.zeros((10_000, 3072), np.uint8)}, "'labels'"),
        ({"data": np.zeros((10_000, 3072), np.uint8), "labels": [1.5] * 10_000}, "'labels'"),
        ({"data": np.zeros((9_999, 3072), np.uint8), "labels": [0] * 9_999}, "'data' of 10,000 x 3,072"),
        ({"data": np.zeros((10, 3072), np.int64), "labels": [0] * 10}, "not a whole pickle"),
        ({"data": np.zeros((10_000, 3072), np.uint8), "labels": [0] * 9_999 + [10]}, "data_batch_1[9999]: its label is 10"),
    ],
)
def test_a_batch_that_is_not_cifars_is_refused(cifar_python, tmp_path, entries, says):
    for file in [*CIFAR10_FILES[1:], "batches.meta"]:
        os.symlink(cifar_python / file, tmp_path / file)
    assert f"{tmp_path} lacks data_batch_1.bin" in refusal("cifar10", tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(entries, protocol=2))
    message = refusal("cifar10", tmp_path)
    assert says in message
    assert "data_batch_1" in message
