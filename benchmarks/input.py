"""Lockstep's ImageNet pipeline against nothing but tf.io.decode_and_crop_jpeg: examples a second, in one line of JSON.

    python -m benchmarks.input --records=1024

JPEGs of 500x375 are made and written as TFRecords of ImageNet's layout. Both sides decode boxes of the same distribution with
as many tf.data threads, and take turns. Lockstep's also reads, checks, shuffles, parses, resizes, flips, scales and batches.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

from app import imagenet, preprocessing, streams
from cluster import runtime, tree

_SHARDS, _DIFFERENT, _DRAIN = 8, 128, 6  # files; different images; batches that lie in buffers when a turn begins


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--records", type=int, default=1024, help="training examples to make, about 0.1 MB each")
    parser.add_argument("--batch", type=int, default=128, help="B")
    parser.add_argument("--image_size", type=int, default=224, help="height and width of the images that come out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="tf.data threads of each side")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--batches", type=int, default=8, help="timed batches of a turn")
    options = parser.parse_args()
    runtime.configure()
    with tempfile.TemporaryDirectory() as folder:
        encoded = write_imagenet(pathlib.Path(folder, "imagenet"), options.records)
        with contextlib.redirect_stdout(sys.stderr):
            manifest = imagenet.scan_imagenet(str(pathlib.Path(folder, "imagenet")), str(pathlib.Path(folder, "prepared")))
        sides = {"lockstep": lockstep(manifest, options), "bare": bare(encoded, options)}
        rates, processor = {name: [] for name in sides}, {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, batches in sides.items():
                examples, seconds, processor_s = turn(batches, options)
                rates[name].append(examples / seconds)
                processor[name].append(processor_s / examples)
    pairs = [a / b for a, b in zip(rates["lockstep"], rates["bare"], strict=True)]
    ratio = statistics.median(rates["lockstep"]) / statistics.median(rates["bare"])
    label = f"examples a second, Lockstep / decode_and_crop_jpeg, {options.threads} threads"
    found = {
        "ratios": {label: {"ratio": ratio, "low": min(pairs), "high": max(pairs)}},
        "examples_per_sec": rates,
        "cpu_s_per_example": processor,
        "threads": options.threads,
        "batch": options.batch,
        "records": options.records,
        "bytes_per_image": sum(map(len, encoded)) / len(encoded),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(found))


def write_imagenet(folder: pathlib.Path, records: int) -> list[bytes]:
    """Writes the files; returns the different JPEGs in them."""
    folder.mkdir()
    images = [picture(seed) for seed in range(min(records, _DIFFERENT))]
    for split, count, shards in (("train", records, _SHARDS), ("validation", 16, 2)):
        for shard in range(shards):
            path = folder / f"{split}-{shard:05d}-of-{shards:05d}"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for index in range(shard, count, shards):
                    writer.write(example(images[index % len(images)], 1 + index % 1000))
    return images


def picture(seed: int) -> bytes:
    """A JPEG of random texture: noise of all sizes, the coarser the stronger, as in photographs."""
    rng = np.random.default_rng(seed)
    pixels = np.full((375, 500, 3), 128, np.float32)
    for octave in range(8):
        grid = rng.standard_normal((3 << octave, 4 << octave, 3), dtype=np.float32)
        pixels += tf.image.resize(grid, [375, 500], "bicubic").numpy() * 50 * 0.83**octave
    return tf.io.encode_jpeg(tf.cast(tf.clip_by_value(pixels, 0, 255), tf.uint8), quality=90).numpy()


def example(image: bytes, label: int) -> bytes:
    def of_bytes(value):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    features = {"image/encoded": of_bytes(image), "image/format": of_bytes(b"JPEG"), "image/class/text": of_bytes(b"texture")}
    features["image/class/label"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
    for name, size in (("height", 375), ("width", 500)):
        features[f"image/{name}"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[size]))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def lockstep(manifest, options):
    """Batches as a worker that is alone gets them (cluster/datasets.py)."""
    replicas = min(tree.default_logical_replicas(options.batch), _SHARDS)
    prepared = preprocessing.make("imagenet", image_size=options.image_size)
    source = streams.TrainingStreams(manifest, prepared, replicas, options.batch, seed=0)
    return iterator(source.examples(0, replicas, options.batch // replicas), options)


def bare(encoded, options):
    """Boxes as the training pipeline cuts them, made beforehand; of each image that is decoded, only the size is kept."""
    keys = tf.constant([[number, 0] for number in range(16 * len(encoded))], tf.int64)
    boxes = tf.map_fn(box, keys, fn_output_signature=tf.int32)
    examples = tf.data.Dataset.from_tensor_slices((tf.constant(encoded * 16), boxes)).repeat()

    def decode(image, window):
        return tf.size(tf.io.decode_and_crop_jpeg(image, window, channels=3))

    return iterator(examples.map(decode, tf.data.AUTOTUNE, deterministic=True), options)


def box(key):
    """A window [y, x, height, width] of 5 % to 100 % of the image, as in app/preprocessing.py."""
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        [375, 500, 3], tf.zeros([1, 0, 4]), key, 0.0, (3 / 4, 4 / 3), (0.05, 1.0), 100, True
    )
    return tf.concat([begin[:2], extent[:2]], 0)


def iterator(examples, options):
    data = tf.data.Options()
    data.threading.private_threadpool_size = options.threads
    return iter(examples.batch(options.batch, drop_remainder=True).prefetch(2).with_options(data))


def turn(batches, options) -> tuple[int, float, float]:
    """Examples, seconds, and seconds of processor time of one turn of a side."""
    settled = time.process_time()
    for _ in range(100):  # the other side fills its buffers first, for a second or so
        time.sleep(0.2)
        before, settled = settled, time.process_time()
        if settled - before < 0.02:
            break
    for _ in itertools.islice(batches, _DRAIN):
        pass
    start, processor = time.perf_counter(), time.process_time()
    for _ in itertools.islice(batches, options.batches):
        pass
    return options.batch * options.batches, time.perf_counter() - start, time.process_time() - processor


if __name__ == "__main__":
    main()
