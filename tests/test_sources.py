"""Raw data sets: each byte where its format says, against files written here by hand; and mistakes in one line each."""

import gzip
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

from app import sources
from app.sources import mnist

CIFAR10_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def refusal(name, folder=""):
    """The message with which a data set is refused: one line."""
    with pytest.raises(sources.SourceError) as error:
        source = sources.open_source(name, str(folder))
        for split in (source.train, source.test):
            list(split)
    assert "\n" not in str(error.value)
    return str(error.value)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_mnist(folder, write=lambda path, content: path.write_bytes(content)):
    folder.mkdir(parents=True, exist_ok=True)
    rng, arrays = np.random.default_rng(1), {}
    for part, count in (("train", 7), ("t10k", 3)):
        arrays[part] = rng.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8)
        for what, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            write(folder / f"{part}-{what}-ubyte", idx(array))
    return arrays


def test_the_digits_are_scikit_learns_with_every_fifth_held_out():
    from sklearn.datasets import load_digits

    bunch, source = load_digits(), sources.open_source("digits")
    assert (len(source.train), len(source.test), source.image_shape) == (1437, 360, (8, 8, 1))
    for split, places in ((source.train, [i for i in range(1797) if i % 5]), (source.test, range(0, 1797, 5))):
        assert [example.label for example in split] == [bunch.target[i] for i in places]
        assert all(np.array_equal(example.image[..., 0], bunch.images[i]) for example, i in zip(split, places, strict=True))
        assert split[1].key == f"digits[{places[1]}]"


@pytest.mark.parametrize("form", ["plain", "gz", "dotted", "folder"])
def test_idx_files_are_read_byte_by_byte_under_any_of_their_names(tmp_path, form):
    def write(path, content):
        if form == "gz":
            path, content = path.with_name(path.name + ".gz"), gzip.compress(content)
        elif form == "dotted":
            path = path.with_name(path.name.replace("-idx", ".idx"))
        path.write_bytes(content)

    arrays = write_mnist(tmp_path / "mnist" if form == "folder" else tmp_path, write)
    source = sources.open_source("mnist", str(tmp_path))
    for split, (images, labels) in ((source.train, arrays["train"]), (source.test, arrays["t10k"])):
        assert np.array_equal(np.stack([example.image for example in split])[..., 0], images)
        assert [example.label for example in split] == labels.tolist()
    assert source.train[2].key.startswith("train-images") and source.train[2].key.endswith("[2]")


def test_a_folder_named_as_the_set_comes_before_the_other_set_beside_it(tmp_path):
    write_mnist(tmp_path)
    arrays = write_mnist(tmp_path / "fashion_mnist")
    (tmp_path / "fashion_mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([9, 9, 9], np.uint8)))
    source = sources.open_source("fashion_mnist", str(tmp_path))
    assert len(source.train) == len(arrays["train"][0])
    assert [source.classes[example.label] for example in source.test] == ["Ankle boot"] * 3


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], "5,503 bytes, but the shape [7, 28, 28] in its header makes 5,504"),
        ("train-images-idx3-ubyte", lambda b: b + b"\0", "5,505 bytes"),
        ("train-images-idx3-ubyte", lambda b: b[:9], "begins with 00000803"),
        ("train-images-idx3-ubyte", lambda b: b"", "begins with ,"),
        ("train-images-idx3-ubyte", lambda b: b"\0\0\x0d\x03" + b[4:], "begins with 00000d03"),
        ("train-images-idx3-ubyte", gzip.compress, "compressed without .gz"),
        ("train-images-idx3-ubyte", lambda b: idx(np.zeros((7, 32, 32), np.uint8)), "[7, 32, 32]; expected ['any', 28, 28]"),
        ("train-images-idx3-ubyte", lambda b: idx(np.zeros((0, 28, 28), np.uint8)), "0 images, but 7 labels"),
        ("t10k-labels-idx1-ubyte", lambda b: idx(np.zeros(4, np.uint8)), "3 images, but 4 labels"),
        (
            "t10k-labels-idx1-ubyte",
            lambda b: idx(np.array([1, 10, 11], np.uint8)),
            "t10k-images-idx3-ubyte[1]: its label is 10",
        ),
        ("t10k-labels-idx1-ubyte", lambda b: idx(np.zeros((3, 1), np.uint8)), "begins with 00000802"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, file, damage, says):
    write_mnist(tmp_path)
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    message = refusal("mnist", tmp_path)
    assert says in message
    assert file in message or "t10k-images" in message


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-9], lambda b: b[:60] + bytes([b[60] ^ 255]) + b[61:], lambda b: gzip.decompress(b), lambda b: b + b"more"],
    ids=["truncated", "a wrong byte", "not compressed", "appended"],
)
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    write_mnist(tmp_path, lambda path, content: path.with_name(path.name + ".gz").write_bytes(gzip.compress(content)))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path}: not a whole gzip file" in refusal("mnist", tmp_path)


def test_missing_files_are_named_with_where_they_were_looked_for(tmp_path, monkeypatch):
    message = refusal("mnist", tmp_path)
    assert all(name in message for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", str(tmp_path / "mnist")))
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert f"{tmp_path} lacks t10k-labels-idx1-ubyte" in refusal("mnist", tmp_path)
    assert "--data_dir" in refusal("mnist")
    monkeypatch.setattr(mnist, "DEBIAN", tmp_path / "none")
    assert "dataset-fashion-mnist" in refusal("fashion_mnist")
    assert "cannot be read" in refusal("mnist", unreadable(tmp_path / "unreadable"))


def unreadable(folder):
    write_mnist(folder)
    (folder / "train-images-idx3-ubyte").unlink()
    os.symlink("/proc/self/mem", folder / "train-images-idx3-ubyte")  # a file that even root cannot read from its start
    return folder


@pytest.mark.skipif(not mnist.DEBIAN.exists(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_of_debian_is_found_without_a_folder():
    source = sources.open_source("fashion_mnist")
    assert (len(source.train), len(source.test)) == (60_000, 10_000)
    assert np.bincount(source.train.labels).tolist() == [6000] * 10
    # The first ten labels, as the set's README shows them, and the mean over the training pixels that is published for it.
    assert [source.classes[example.label] for _, example in zip(range(2), source.train, strict=False)] == [
        "Ankle boot",
        "T-shirt/top",
    ]
    assert abs(source.train.images.mean() / 255 - 0.2860) < 5e-5


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


JPEG, PNG = b"\xff\xd8\xff\xe0 one", b"\x89PNG\r\n\x1a\n two"


def write(root, *paths, content=JPEG):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content + path.encode())


@pytest.mark.parametrize("held_out", ["test", "val", "validation", None])
def test_a_folder_per_class_in_the_order_of_utf8_bytes(tmp_path, held_out):
    write(
        tmp_path,
        "train/é/2.jpg",
        "train/é/10.JPEG",
        "train/B/x.JPG",
        "train/a/x.png",
        "train/\U0001f600/x.jpg",
        "train/\ufb01/x.jpg",
    )
    write(tmp_path, "train/B/notes.txt", "train/B/.hidden.jpg", "train/.git/x.jpg", "train/B/deeper/x.jpg", "train/readme.jpg")
    os.symlink(tmp_path / "train" / "a", tmp_path / "train" / "link")
    if held_out:
        write(tmp_path, f"{held_out}/é/1.jpg", content=PNG)
    source = sources.open_source("folder", str(tmp_path))
    assert source.classes == ("B", "a", "link", "é", "\ufb01", "\U0001f600")
    assert list(source.classes) == sorted(source.classes, key=lambda name: name.encode())
    keys = ["B/x.JPG", "a/x.png", "link/x.png", "é/10.JPEG", "é/2.jpg", "\ufb01/x.jpg", "\U0001f600/x.jpg"]
    assert [example.key for example in source.train] == [f"train/{key}" for key in keys]
    assert [example.label for example in source.train] == [0, 1, 2, 3, 3, 4, 5]
    assert source.train[0].image == JPEG + b"train/B/x.JPG"
    assert source.train.ignored == 2
    if held_out:
        assert [(e.key, e.label, e.image[:4]) for e in source.test] == [(f"{held_out}/é/1.jpg", 3, PNG[:4])]
    else:
        assert source.test is None


def test_without_a_split_every_tenth_file_of_each_class_is_held_out(tmp_path):
    write(tmp_path, *(f"a/{i:03}.jpg" for i in range(21)), *(f"b/{i:03}.jpg" for i in range(9)))
    source = sources.open_source("folder", str(tmp_path))
    assert [(e.key, e.label) for e in source.test] == [("a/000.jpg", 0), ("a/010.jpg", 0), ("a/020.jpg", 0), ("b/000.jpg", 1)]
    assert len(source.train) == 26
    assert {e.key for e in source.train}.isdisjoint(e.key for e in source.test)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([], "has no folders"),
        (["a/x.gif", "a/y.txt"], "a: has no .jpg, .jpeg, .png among its 2 files"),
        (["train/a/x.jpg", "train/b/.x.jpg"], "b: has no .jpg, .jpeg, .png among its 0 files"),
        (["train/a/x.jpg", "test/b/x.jpg"], "'b' is not among the classes"),
        (["train/x.jpg"], "train: has no folders"),
        (["a/x.jpg", "a/y.jpg", "b/x.jpg"], "b: a single picture"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, paths, says):
    write(tmp_path, *paths)
    message = refusal("folder", tmp_path)
    assert says in message
    assert str(tmp_path) in message


def test_a_file_that_is_no_picture_is_named_when_it_is_read(tmp_path):
    write(tmp_path, "train/a/1.jpg")
    (tmp_path / "test/a").mkdir(parents=True)
    bad = tmp_path / "test/a/2.jpg"
    for content, says in ((b"", "is empty"), (b"GIF89a", "neither JPEG nor PNG")):
        bad.write_bytes(content)
        assert refusal("folder", tmp_path).startswith(f"{bad}: ") and says in refusal("folder", tmp_path)
    bad.unlink()
    os.symlink("nowhere", bad)
    assert f"{bad}: cannot be read: No such file" in refusal("folder", tmp_path)
    assert "no folder" in refusal("folder", tmp_path / "none")
    assert "--data_dir" in refusal("folder")


def test_synthetic_examples_are_functions_of_their_place_alone():
    small, large = (sources.open_source(f"synthetic:9x7x3:5:{n}") for n in (40, 400))
    images = {example.image.tobytes() for split in (large.train, large.test) for example in split}
    assert len(images) == 500
    assert (len(small.train), len(small.test), small.image_shape) == (40, 10, (9, 7, 3))
    assert all(np.array_equal(small.train[i].image, large.train[i].image) for i in reversed(range(40)))
    assert np.array_equal(
        sources.open_source("synthetic").test[3].image, sources.open_source("synthetic:32x32x3:10:1024").test[3].image
    )
    assert sources.open_source("synthetic").train[1].image[0, 0].tolist() == [89, 101, 136]  # on any machine, for ever


def test_synthetic_examples_can_be_learned():
    source = sources.open_source("synthetic:8x8x3:10:200")
    images = np.stack([example.image for example in source.train]).astype(float)
    labels = np.array([example.label for example in source.train])
    means = np.stack([images[labels == c].mean(0) for c in range(10)])
    nearest = [np.square(means - example.image).sum((1, 2, 3)).argmin() for example in source.test]
    assert nearest == [example.label for example in source.test]


@pytest.mark.parametrize(
    "name", ["synthetic:", "synthetic:32x32:10:5", "synthetic:0x8x3:10:5", "synthetic:8x8x3:10:-5", "synthetic:8x8x3:0:5"]
)
def test_a_synthetic_set_of_another_form_is_refused(name):
    assert "synthetic:HxWxC:classes:examples" in refusal(name)


USER = """
import numpy as np
x, y = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1), np.array([0, 1])
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a module of the user's in the current folder; mine('return ...') is the name of its function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def name(body, parameters=""):
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        module = f"mine_{abs(hash((body, parameters)))}"
        (tmp_path / f"{module}.py").write_text(f"{USER}\ndef load({parameters}):\n{lines}")
        return f"{module}:load"

    return name


@pytest.mark.parametrize(
    "returned",
    [
        "(x, y), (x[:1], y[:1])",
        "[[x, y], [x[:1], y[:1]]]",
        "{'train': (x, y), 'test': (x[:1], y[:1])}",
        "(x[..., 0], y[:, None]), (x[:1, ..., 0], y[:1].astype(float))",
        "(x.tolist and np.array(x), y.tolist()), (x[:1], [0])",
    ],
)
def test_a_users_arrays_become_examples(mine, returned):
    name = mine(f"return {returned}")
    source = sources.open_source(name)
    assert (source.image_shape, source.classes, len(source.test)) == ((3, 4, 1), ("0", "1"), 1)
    assert [example.image.reshape(-1).tolist() for example in source.train] == [list(range(12)), list(range(12, 24))]
    assert [example.label for example in source.train] == [0, 1]
    assert source.train[1].key == f"{name} train[1]"


def test_a_user_may_hold_nothing_out_and_be_given_the_folder(mine):
    source = sources.open_source(mine("return {'train': (x + int(data_dir), y)}", "data_dir=None"), "100")
    assert source.test is None
    assert source.train[0].image[0, 0, 0] == 100


@pytest.mark.parametrize(
    "returned",
    [
        "{'train': tf.data.Dataset.from_tensor_slices((x, y))}",
        "tf.data.Dataset.from_tensor_slices((x, y)), None",
        "tf.data.Dataset.from_tensor_slices((x[..., 0], y[:, None])), (x, y)",
        "{'train': tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True)}",
    ],
)
def test_a_users_finite_dataset_becomes_examples(tensorflow, mine, returned):
    source = sources.open_source(mine(f"import tensorflow as tf\nreturn {returned}"))
    assert [example.image.reshape(-1).tolist() for example in source.train] == [list(range(12)), list(range(12, 24))]
    assert [example.label for example in source.train] == [0, 1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return x, y", "train: is ndarray, not (images, labels)"),
        ("return x", "returned ndarray"),
        ("return {'training': (x, y)}", "a dict of ['training']"),
        ("return {'train': (x, [0.5, 1.0])}", "train[0]: its label is 0.5"),
        ("return {'train': (x, [0, -1])}", "train[1]: its label is -1"),
        ("return {'train': (x, [0, float('nan')])}", "train[1]: its label is nan"),
        ("return {'train': (x, [float('inf'), 0])}", "train[0]: its label is inf"),
        ("return {'train': (x, [0, 10**9])}", "train[1]: its label is 1000000000"),
        ("return {'train': (x, ['cat', 'dog'])}", "labels are <U3"),
        ("return {'train': (x, np.eye(2))}", "labels float64 [2, 2] for 2 images"),
        ("return {'train': (x, [0])}", "labels int64 [1] for 2 images"),
        ("return {'train': ([x[0], x[1][:2]], y)}", "differing shape"),
        ("return {'train': (x / 255, y)}", "float64 [2, 3, 4, 1]; expected uint8 or float32"),
        ("return {'train': (x.reshape(2, -1), y)}", "uint8 [2, 12]; expected"),
        ("return {'train': (np.where(x == 12, np.nan, x).astype('float32'), y)}", "train[1]: a pixel is NaN"),
        ("return (x, y), (x[:, :2], y)", "test: images uint8 [2, 2, 4, 1], but those of train are uint8 [2, 3, 4, 1]"),
        ("return (x, y), (x.astype('float32'), y)", "test: images float32"),
        ("return (x, y), (x, y + 1)", "test[1]: its label is 2, but labels go from 0 to 1"),
        ("return {'train': (x[:0], y[:0])}", "the train split has no examples"),
    ],
)
def test_what_a_user_returns_wrongly_is_refused(mine, body, says):
    name = mine(body)
    message = refusal(name)
    assert says in message
    assert message.startswith(name)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("from_tensor_slices((x, y)).repeat()", "endless"),
        ("from_tensor_slices((x, y)).batch(2)", "no (image, label)"),
        ("from_tensor_slices({'image': x, 'label': y})", "no (image, label)"),
        ("from_tensor_slices(x)", "no (image, label)"),
        (
            "from_tensor_slices((x, y)).map(lambda x, y: (x[:y + 1], y))",
            "train[1]: an image of shape [2, 4, 1] after [1, 4, 1]",
        ),
        ("from_tensor_slices((x, y)).filter(lambda x, y: True).repeat()", "endless"),
    ],
)
def test_a_users_dataset_that_cannot_be_held_is_refused(tensorflow, mine, dataset, says):
    assert says in refusal(mine(f"import tensorflow as tf\nreturn {{'train': tf.data.Dataset.{dataset}}}"))


def test_a_users_dataset_of_unknown_length_stops_at_the_limit(tensorflow, mine, monkeypatch):
    monkeypatch.setattr("app.sources.user.MOST_BYTES", 1000)
    endless = "tf.data.Dataset.from_generator(lambda: iter(lambda: (x[0], 0), 1), (tf.uint8, tf.int32))"
    assert "more than 0 GiB" in refusal(mine(f"import tensorflow as tf\nreturn {{'train': {endless}}}"))


def test_a_function_that_cannot_be_called_is_refused(mine):
    assert "cannot import it: ModuleNotFoundError: No module named 'nobodys'" in refusal("nobodys.module:load")
    name = mine("return x")
    assert "cannot import it: AttributeError" in refusal(name.replace("load", "lode"))
    assert "is ndarray, not a function" in refusal(name.replace("load", "x"))
    assert "missing a required argument: 'where'" in refusal(mine("return x", "where"))
    assert "cannot import it: ZeroDivisionError" in refusal(mine("pass", "x=1 / 0"))


def test_what_a_users_function_raises_is_left_to_be_seen(mine):
    with pytest.raises(KeyError, match="mistake"):
        sources.open_source(mine("raise KeyError('mistake')"))


def test_an_unknown_name_is_answered_with_a_near_one():
    assert "did you mean cifar10?" in refusal("cifar-10")
    assert "package.module:function" in refusal("nothing like it")


def test_opening_a_set_needs_no_tensorflow():
    code = (
        "import sys; from app import sources; sources.open_source('synthetic').train[0]; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
