"""ImageNet where it lies: labels from 0 or 1 told apart, each record accounted for, and every fault named."""

import pathlib

import pytest
import tensorflow as tf
from test_prepare import picture, record, refusal

from app import imagenet, manifest, records

PICTURES = [picture(i, "PNG" if i == 1 else "JPEG") for i in range(4)]


def example(label, image=PICTURES[0], text=""):
    def feature(value):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    features = {"image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
    features |= {"image/encoded": feature(image), "image/filename": feature(b"unused")}
    if text:
        features["image/class/text"] = feature(text.encode())
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write(folder, train, validation):
    """Two files of each split; the examples are dealt to them in turn."""
    folder.mkdir(exist_ok=True)
    for prefix, datas in (("train", train), ("validation", validation)):
        for index in range(2):
            (folder / f"{prefix}-{index:05d}-of-00002").write_bytes(b"".join(map(record, datas[index::2])))
    return folder


def scan(folder, say=lambda line: None, **options):
    return imagenet.scan_imagenet(str(folder), str(folder.parent / "prepared"), say, **options)


def refused(folder, **options):
    return refusal(scan, folder, **options)


def whole(folder, labels=(3, 1, 2, 1), held_out=(2, 3, 1)):
    return write(
        folder,
        [example(label, PICTURES[i % 4], f"name {label}" if label == 2 else "") for i, label in enumerate(labels)],
        [example(label) for label in held_out],
    )


@pytest.mark.parametrize(
    ("labels", "offset", "classes"),
    [((1, 1000, 5), 1, 1000), ((0, 999, 5), 0, 1000), ((3, 1, 2, 1), 1, 3), ((3, 0, 2, 1), 0, 4), ((7, 8), 1, 8)],
)
def test_labels_from_1_and_from_0_are_told_apart(tmp_path, labels, offset, classes):
    lines = []
    prepared = scan(whole(tmp_path / "data", labels, labels[:2]), lines.append)
    assert (prepared.label_offset, len(prepared.classes)) == (offset, classes)
    assert sum("labels go from" in line and f"count from {offset}" in line for line in lines) == 1
    if 2 in labels:
        assert prepared.classes[2 - offset] == "name 2" and prepared.classes[1 - offset] == str(1 - offset)


def test_the_manifest_finds_every_record_in_the_order_in_which_it_lies(tmp_path):
    prepared = scan(whole(tmp_path / "data"))
    assert manifest.load(str(tmp_path / "prepared" / "imagenet" / "manifest")).digest() == prepared.digest()
    assert (prepared.image_shape, prepared.image_dtype, prepared.preprocessing, prepared.mean) == (
        None,
        "encoded",
        "imagenet",
        (),
    )
    for split, labels in ((prepared.train, [3, 2, 1, 1]), (prepared.test, [2, 1, 3])):
        found = []
        for shard in split.shards:
            content = pathlib.Path(prepared.path(shard)).read_bytes()
            assert (len(content), "") == (shard.bytes, shard.sha256)
            for offset in shard.offsets:
                size = int.from_bytes(content[offset : offset + 8], "little")
                image, label = records.parse(content[offset + 12 : offset + 12 + size], prepared)
                assert image.numpy() in PICTURES
                found.append(int(label) + 1)
        assert found == labels and split.examples == len(labels)


def test_the_manifest_is_used_again_until_names_or_sizes_change_or_more_is_asked(tmp_path):
    lines = []
    folder = whole(tmp_path / "data")
    first, again = scan(folder), scan(folder, lines.append)
    assert again.digest() == first.digest() and len(lines) == 1 and "made before" in lines[0]
    verified = scan(folder, verify_images=True)
    assert all(len(shard.sha256) == 64 for shard in (*verified.train.shards, *verified.test.shards))
    whole(folder, (3, 1, 2, 1, 4))
    assert scan(folder).train.examples == 5
    moved = folder.rename(tmp_path / "moved")
    assert scan(moved).train.shards[0].path == str(moved / "train-00000-of-00002")


def test_a_label_that_is_none_is_named(tmp_path):
    folder = whole(tmp_path / "data", (0, 5, 7, 1000))
    assert "train-00000-of-00002: record 0 has label 0" in (message := refused(folder)) and "from 0 to 1000" in message
    assert "train-00001-of-00002: record 1 has label 1001" in refused(whole(folder, (1, 5, 7, 1001)))
    assert "validation-00001-of-00002: record 0 has label 0" in refused(whole(folder, (1, 5), (1, 0)))
    assert not (tmp_path / "prepared").exists()


def test_a_missing_file_is_named(tmp_path):
    folder = whole(tmp_path / "data")
    (folder / "train-00001-of-00002").rename(folder / "train-00001-of-00003")
    assert "-of-00002 and of -of-00003" in refused(folder)
    (folder / "train-00001-of-00003").unlink()
    assert "lacks train-00001-of-00002" in refused(folder)
    whole(folder)
    for name in ("validation-00000-of-00002", "validation-00001-of-00002"):
        (folder / name).unlink()
    assert "validation-00000-of-..." in refused(folder)
    assert "nowhere" in refused(tmp_path / "nowhere")


def test_a_damaged_file_is_an_error_whatever_may_be_skipped(tmp_path):
    folder = whole(tmp_path / "data")
    path = folder / "validation-00000-of-00002"
    content = path.read_bytes()
    for damaged, says in (
        (content[:-2], "cut off in record 1"),
        (b"", "empty"),
        (content[:20] + b"?" + content[21:], "record 0"),
    ):
        path.write_bytes(damaged)
        assert says in (message := refused(folder, on_bad_record="skip", max_bad_records=9)) and str(path) in message


def test_bad_records_stop_or_are_listed_in_the_manifest(tmp_path):
    lines = []
    cut = PICTURES[0][: len(PICTURES[0]) // 2]
    train = [example(1), b"no example", example(2, b"GIF89a"), example(2), example(1, cut), example(2)]
    folder = write(tmp_path / "data", train, [example(1), example(2)])
    assert "train-00000-of-00002: record 1 has an image that begins" in refused(folder)
    skip = {"on_bad_record": "skip", "max_bad_records": 2}
    prepared = scan(folder, lines.append, **skip)
    assert prepared.train.bad == ((0, 1), (1, 0)) and prepared.train.examples == 4 and len(prepared.classes) == 2
    assert sum("left out: " in line for line in lines) == 2
    assert scan(folder, **skip).digest() == prepared.digest()
    assert "begins like neither" in refused(folder)  # what was skipped before is not passed over in silence
    assert "train-00001-of-00002: record 0 is no example" in refused(folder, verify_images=True, **skip)
    prepared = scan(folder, verify_images=True, on_bad_record="skip", max_bad_records=3)
    assert prepared.train.bad == ((0, 1), (0, 2), (1, 0))
