"""Raw data sets: each byte where its format says, against files written here by hand; and mistakes in one line each."""

import gzip
import os
import subprocess
import sys

import numpy as np
import pytest

from app import sources
from app.sources import mnist


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


def test_an_unknown_name_is_answered_with_a_near_one():
    assert "did you mean cifar10?" in refusal("cifar-10")
    assert "package.module:function" in refusal("nothing like it")


def test_opening_a_set_needs_no_tensorflow():
    code = (
        "import sys; from app import sources; sources.open_source('synthetic').train[0]; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
