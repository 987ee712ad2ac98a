"""Data sets of other layouts, from raw files to trained weights, on one worker and on two."""

import io
import re

import numpy as np
import pytest
from conftest import run_program, sha256

TRAIN = ["--model=small_cnn", "--image_size=16", "--global_batch_size=16", "--logical_replicas=2", "--epochs=2"]


def jpeg(rng, mode="RGB"):
    from PIL import Image

    channels = {"RGB": (3,), "L": (), "CMYK": (4,)}[mode]
    picture = Image.fromarray(rng.integers(0, 256, (24, 20, *channels), np.uint8), mode)
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()


def write_folder(folder):
    """Two classes of 12 pictures, and 4 held out each: RGB, grey and CMYK."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name in ("b", "a"):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in range(count):
                (place / f"{i}.jpg").write_bytes(jpeg(rng, ("RGB", "L", "CMYK")[i % 3]))


def write_imagenet(folder, truncate=None):
    """Four files of 8 training examples and two of 5, in ImageNet's layout, labels from 1.

    truncate: (file, record) of a training example whose JPEG is cut in half, in a record that is whole.
    """
    import tensorflow as tf

    rng = np.random.default_rng(1)
    for split, files, count in (("train", 4, 8), ("validation", 2, 5)):
        for index in range(files):
            with tf.io.TFRecordWriter(str(folder / f"{split}-{index:05d}-of-{files:05d}")) as writer:
                for i in range(count):
                    image = jpeg(rng)
                    if split == "train" and (index, i) == truncate:
                        image = image[: len(image) // 2]
                    features = {
                        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1 + i % 3])),
                    }
                    writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


@pytest.mark.parametrize(
    ("dataset", "write", "shards", "held_out"),
    [pytest.param("folder", write_folder, 4, 8, marks=pytest.mark.soak), ("imagenet", write_imagenet, 4, 10)],
)
def test_pictures_train_the_same_weights_on_two_workers_as_on_one(tensorflow, tmp_path, dataset, write, shards, held_out):
    raw = tmp_path / "raw"
    raw.mkdir()
    write(raw)
    places = [f"--data_dir={raw}", f"--prepared_dir={tmp_path}/prepared", f"--shards={shards}"]
    flags = ["train", f"--dataset={dataset}", *places, *TRAIN, "--eval_at_steps=1"]
    outputs = [run_program(*flags, f"--workers={workers}", f"--run_dir={tmp_path}/{workers}") for workers in (1, 2)]
    assert sha256(outputs[0]) == sha256(outputs[1])
    assert f"[{held_out} examples]" in outputs[1]  # the evaluation after step 1
    assert re.search(rf"of {held_out} right", outputs[1])


@pytest.fixture
def truncated(tensorflow, tmp_path):
    """Flags for a set whose third training file, which worker 1 of 2 reads, has a truncated JPEG in record 5."""
    raw = tmp_path / "raw"
    raw.mkdir()
    write_imagenet(raw, truncate=(2, 5))
    return [
        f"--data_dir={raw}",
        f"--prepared_dir={tmp_path}/prepared",
        "--dataset=imagenet",
        *TRAIN,
    ]


def test_a_truncated_jpeg_is_named_with_file_and_record_by_the_worker_that_reads_it(truncated, tmp_path):
    output = run_program("train", "--workers=2", f"--run_dir={tmp_path}/run", *truncated, status=1)
    assert "CUDA" not in output  # nothing of TensorFlow's own start
    [line] = [line for line in output.splitlines() if "error:" in line]
    assert line.startswith("[1] ")
    assert "train-00002-of-00004, record 5: " in line
    assert "Traceback" not in output


@pytest.mark.soak
def test_a_truncated_jpeg_is_skipped_alike_on_one_and_two_workers(truncated, tmp_path):
    flags = ["train", "--on_bad_record=skip", *truncated]
    outputs = [run_program(*flags, f"--workers={w}", f"--run_dir={tmp_path}/{w}") for w in (1, 2)]
    assert "record 5" in outputs[0]
    assert "31 examples in 4 shards" in outputs[1]
    assert sha256(outputs[0]) == sha256(outputs[1])


@pytest.mark.soak
def test_cifars_six_files_train_on_two_and_four_workers(tmp_path):
    rng = np.random.default_rng(2)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        records = rng.integers(0, 256, (10_000, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n")
    places = [f"--data_dir={tmp_path}", f"--prepared_dir={tmp_path}/prepared"]
    flags = ["train", "--dataset=cifar10", "--global_batch_size=128", "--steps=3", *places]
    two, four = (sha256(run_program(*flags, f"--workers={w}", f"--run_dir={tmp_path}/{w}")) for w in (2, 4))
    assert two == four
