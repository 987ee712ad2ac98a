"""What a network is given, against crops and boxes that are recovered from images whose pixels tell where they are."""

import io

import numpy as np
import pytest
from PIL import Image

KEYS = 400


@pytest.fixture(scope="module")
def make(tensorflow):
    from app import preprocessing

    return preprocessing.make


@pytest.fixture(scope="module")
def trained(tensorflow):
    """trained(preprocessing, image): what becomes of one image under the keys (0, 7), (1, 7) and so on, through tf.data."""
    tf = tensorflow

    def outputs(preprocessing, image, keys=KEYS, parallel=2):
        image = tf.constant(image)
        dataset = tf.data.Dataset.range(keys).map(
            lambda i: preprocessing.train(image, tf.stack([i, 7])), num_parallel_calls=parallel, deterministic=True
        )
        assert dataset.element_spec == tf.TensorSpec(preprocessing.shape, tf.float32)
        return np.stack(list(dataset.as_numpy_iterator()))

    return outputs


def file_of(image, kind="PNG", mode="RGB", **options):
    stream = io.BytesIO()
    Image.fromarray(image).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def blocks(height, width):
    """An image that JPEG keeps well: areas of 8x8 pixels of one colour."""
    colours = np.random.default_rng(3).integers(40, 216, (height // 8, width // 8, 3), np.uint8)
    return np.kron(colours, np.ones((8, 8, 1), np.uint8))


def ramps(height, width):
    """An image whose red and green are its pixels' y and x."""
    y, x = np.mgrid[:height, :width]
    return np.stack([y, x, np.zeros_like(x)], -1).astype(np.uint8)


def crops(image, pad):
    """All crops of a padded image [h, w, c], by their offsets, and their mirror images."""
    height, width, _ = image.shape
    padded = np.zeros((height + 2 * pad, width + 2 * pad, image.shape[2]), np.float32)
    padded[pad:-pad, pad:-pad] = image
    found = {}
    for y in range(2 * pad + 1):
        for x in range(2 * pad + 1):
            crop = padded[y : y + height, x : x + width]
            found[y, x, False], found[y, x, True] = crop, crop[:, ::-1]
    return found


@pytest.mark.parametrize(("name", "pad", "flips"), [("gray", 2, False), ("fashion", 2, True), ("cifar", 4, True)])
def test_training_gives_every_crop_of_the_padded_image_and_nothing_else(make, trained, name, pad, flips):
    shape = (32, 32, 3) if name == "cifar" else (28, 28, 1)
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    mean, std = np.float32([0.4, 0.5, 0.6][: shape[2]]), np.float32([0.2, 0.25, 0.3][: shape[2]])
    preprocessing = make(name, shape, mean, std)
    expected = (np.float32(image) / 255 - mean) / std
    np.testing.assert_allclose(preprocessing.evaluate(image), expected, rtol=1e-5, atol=1e-6)
    candidates = {offset: crop for offset, crop in crops(expected, pad).items() if flips or not offset[2]}
    corners = np.stack([crop[8:20, 8:20] for crop in candidates.values()])  # tell all crops apart, and have no padding
    counts = dict.fromkeys(candidates, 0)
    for output in trained(preprocessing, image, keys=2000):
        nearest = list(candidates)[np.abs(corners - output[8:20, 8:20]).max((1, 2, 3)).argmin()]
        np.testing.assert_allclose(output, candidates[nearest], rtol=1e-5, atol=1e-5)
        counts[nearest] += 1
    # 2,000 draws of n equally likely crops: each count within five standard deviations, and so none is 0 where n is 50.
    likely = 2000 / len(counts)
    assert all(abs(count - likely) < 5 * likely**0.5 for count in counts.values())
    if flips:
        assert abs(sum(count for offset, count in counts.items() if offset[2]) - 1000) < 5 * 500**0.5


def test_without_a_mean_pixels_stay_in_0_to_1(make):
    image = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28, 1)
    np.testing.assert_allclose(make("gray", image.shape).evaluate(image), np.float32(image) / 255, rtol=1e-6)


def test_none_changes_nothing_but_the_scale_of_bytes(make, trained):
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    floats = np.linspace(-3, 300, 24, dtype=np.float32).reshape(2, 4, 3)
    preprocessing = make("none", (2, 4, 3))
    for given, expected in ((image, np.float32(image) / 255), (floats, floats)):
        np.testing.assert_allclose(preprocessing.evaluate(given), expected, rtol=1e-6)
        np.testing.assert_allclose(trained(preprocessing, given, keys=2), [expected] * 2, rtol=1e-6)


def test_digits_are_shifted_by_about_a_pixel_at_most(make, trained):
    image = np.zeros((8, 8, 1), np.uint8)
    image[3:5, 3:5] = 16
    preprocessing = make("digits", (8, 8, 1))
    assert np.array_equal(preprocessing.evaluate(image), np.float32(image) / 16)
    outputs = trained(preprocessing, image)[..., 0]
    assert outputs.min() >= 0 and outputs.max() <= 1
    centres = np.einsum("nyx,y->n", outputs, np.arange(8)) / outputs.sum((1, 2)) - 3.5
    # One pixel down and one to the right, of a picture shrunk to 0.9 and turned by 10 degrees, are 1.29 pixels.
    assert 0.9 < np.abs(centres).max() < 1.29 and abs(centres.mean()) < 5 * 0.6 / KEYS**0.5


def test_evaluation_shows_the_middle_seven_eighths(make):
    image = np.random.default_rng(1).integers(0, 256, (32, 45, 3), np.uint8)
    shown = make("imagenet", image_size=28).evaluate(file_of(image))
    np.testing.assert_allclose(shown, np.float32(image[2:30, 8:36]) / 127.5 - 1, atol=1e-6)
    tall = make("imagenet", image_size=28).evaluate(file_of(image.transpose(1, 0, 2)))
    np.testing.assert_allclose(tall, shown.numpy().transpose(1, 0, 2), atol=1e-6)


def test_a_smaller_evaluation_image_is_resized_bilinearly(make):
    # Between the centres of pixels a bilinear picture of a ramp is that ramp: 56 pixels from 4 on, shown at 28 points.
    shown = (make("imagenet", image_size=28).evaluate(file_of(ramps(64, 64))).numpy() + 1) * 127.5
    places = 4 + (np.arange(28) + 0.5) * 2 - 0.5
    np.testing.assert_allclose(shown[:, :, 0], np.tile(places[:, None], 28), atol=1e-3)
    np.testing.assert_allclose(shown[:, :, 1], np.tile(places, (28, 1)), atol=1e-3)


def boxes(outputs):
    """(height, width, y, x, mirrored) of the boxes that were resized to `outputs` [n, s, s, 3], from pictures of ramps."""
    size = outputs.shape[1]
    places = (outputs + 1) * 127.5
    middle = slice(size // 2 - 2, size // 2 + 2)  # away from the edges, where the ramp ends
    down = (places[:, middle.stop - 1, :, 0] - places[:, middle.start, :, 0]).mean(1) * size / 3
    right = (places[:, :, middle.stop - 1, 1] - places[:, :, middle.start, 1]).mean(1) * size / 3
    y = places[:, middle, :, 0].mean((1, 2)) - down / 2 + 0.5
    x = places[:, :, middle, 1].mean((1, 2)) - np.abs(right) / 2 + 0.5
    return down, np.abs(right), y, x, right < 0


def test_training_boxes_have_the_published_areas_and_aspects(make, trained):
    height, width = 200, 250
    down, right, y, x, mirrored = boxes(trained(make("imagenet", image_size=32), file_of(ramps(height, width)), 1000))
    area, aspect = down * right / (height * width), right / down
    assert 0.045 < area.min() < 0.08 and 0.85 < area.max() < 1.01
    assert 3 / 4 - 0.03 < aspect.min() < 0.78 and 1.28 < aspect.max() < 4 / 3 + 0.03
    assert y.min() > -0.5 and (y + down).max() < height + 0.5 and x.min() > -0.5 and (x + right).max() < width + 0.5
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / 1000**0.5
    assert abs((y + down / 2).mean() - height / 2) < 5 and abs((x + right / 2).mean() - width / 2) < 5


def test_a_jpeg_is_cut_where_a_png_of_the_same_picture_is(make, trained):
    image, preprocessing = blocks(96, 120), make("imagenet", image_size=24)
    png = trained(preprocessing, file_of(image), 40)
    jpeg = trained(preprocessing, file_of(image, "JPEG", quality=100, subsampling=0), 40)
    assert np.abs(png - jpeg).max() < 0.2 and np.abs(png - jpeg).mean() < 0.02


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {"quality": 95}),
        ("JPEG", "RGB", {"progressive": True, "quality": 95}),
        ("PNG", "L", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
    ],
)
def test_other_kinds_of_files_become_three_channels(make, trained, kind, mode, options):
    image, preprocessing = blocks(64, 64), make("imagenet", image_size=56)
    encoded = file_of(image, kind, mode, **options)
    expected = np.float32(Image.open(io.BytesIO(encoded)).convert("RGB"))[4:60, 4:60] / 127.5 - 1
    assert np.abs(preprocessing.evaluate(encoded) - expected).mean() < 0.03
    assert trained(preprocessing, encoded, 3).shape == (3, 56, 56, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("lost", [2, 500, 10**6])
def test_a_truncated_file_raises_even_if_the_box_lies_before_the_end(tensorflow, make, kind, lost):
    encoded = file_of(np.random.default_rng(4).integers(0, 256, (64, 64, 3), np.uint8), kind)[:-lost]
    preprocessing = make("imagenet", image_size=8)
    with pytest.raises(tensorflow.errors.InvalidArgumentError):
        preprocessing.evaluate(encoded)
    for i in range(10):
        with pytest.raises(tensorflow.errors.InvalidArgumentError):
            preprocessing.train(encoded, tensorflow.constant([i, 7], tensorflow.int64))


def test_a_jpeg_with_bytes_after_its_end_is_whole(make):
    encoded, preprocessing = file_of(blocks(64, 64), "JPEG", subsampling=0), make("imagenet", image_size=56)
    assert np.array_equal(preprocessing.evaluate(encoded + b"\0\0"), preprocessing.evaluate(encoded))


SOURCES = [("digits", (8, 8, 1)), ("gray", (28, 28, 1)), ("fashion", (28, 28, 1)), ("cifar", (32, 32, 3)), ("imagenet", None)]


@pytest.mark.parametrize(("name", "shape"), SOURCES)
def test_pixels_follow_from_the_key_alone(tensorflow, make, trained, name, shape):
    preprocessing = make(name, shape, image_size=16)
    image = np.random.default_rng(5).integers(0, 17, shape, np.uint8) if shape else file_of(blocks(64, 80), "JPEG")
    outputs = trained(preprocessing, image, 60, parallel=1)
    assert np.array_equal(outputs, trained(preprocessing, image, 60, parallel=8))
    assert len({output.tobytes() for output in outputs}) > 20
    for key in ([0, 7], [59, 7]):
        alone = preprocessing.train(tensorflow.constant(image), tensorflow.constant(key, tensorflow.int64))
        np.testing.assert_allclose(alone, outputs[key[0]], rtol=1e-6, atol=1e-6)


def test_a_mistake_is_told(make):
    with pytest.raises(ValueError, match="'cifer' is unknown; one of digits, gray"):
        make("cifer", (32, 32, 3))
    with pytest.raises(ValueError, match="std is"):
        make("cifar", (32, 32, 3), 0.0, [1, 0, 1])
