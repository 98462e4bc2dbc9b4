"""mpi4dl.datasets.colour: whatever a file stores becomes three bytes per pixel, upright, whichever box is wanted."""

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tifffile

from mpi4dl.datasets import open_image
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.colour import TAG, bytes_of, over_white, rgb_of, rgb_of_pillow, upright
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, smooth_image, whole


@pytest.mark.parametrize(
    ("samples", "top", "expected"),
    [
        (np.array([0, 2048, 4095, 9999], np.uint16), 4095, [0, 128, 255, 255]),
        (np.array([0, 1], np.uint8), 1, [0, 255]),
        (np.array([False, True]), None, [0, 255]),
        (np.array([0, 128, 129, 32768, 65535], np.uint16), None, [0, 0, 1, 128, 255]),
        (np.array([0, 2**31, 2**32 - 1], np.uint32), None, [0, 128, 255]),
        (np.array([0, 2**24 - 1], np.uint32), 2**24 - 1, [0, 255]),
        (np.array([-(2**15), 0, 2**15 - 1], np.int16), None, [0, 128, 255]),
        (np.array([-128, 127], np.int8), None, [0, 255]),
        (np.array([0, 0.5, 1], np.float32), None, [0, 128, 255]),
        (np.array([-0.0005, 1.0005], np.float16), None, [0, 255]),
        (np.array([0, 2.5, 5]), 5.0, [0, 128, 255]),
    ],
    ids=str,
)
def test_one_rule_scales_all_samples(samples, top, expected):
    assert bytes_of(samples, top).tolist() == expected


@pytest.mark.parametrize("wrong", [[0, 1.1], [-0.1, 1], [0, np.nan], [0, np.inf]])
def test_floating_point_outside_the_range_is_refused(wrong):
    with pytest.raises(ValueError, match=r"stores floating-point values from .* but 0 is black and 1 is white: divide"):
        bytes_of(np.array(wrong, np.float32))


def test_complex_samples_are_refused():
    with pytest.raises(ValueError, match="type complex64: expected integers or floating point"):
        bytes_of(np.zeros(3, np.complex64))


@pytest.mark.parametrize(("alpha", "expected"), [(0, 255), (255, 100), (51, 224)])
def test_transparency_shows_white_paper(alpha, expected):
    assert rgb_of(np.array([[[100, alpha]]], np.uint8), alpha=True).tolist() == [[[expected] * 3]]


def test_premultiplied_colour_is_not_multiplied_twice():
    straight = over_white(np.full((1, 1, 3), 100, np.uint8), np.full((1, 1), 51, np.uint8))
    premultiplied = over_white(np.full((1, 1, 3), 20, np.uint8), np.full((1, 1), 51, np.uint8), premultiplied=True)
    assert np.array_equal(straight, premultiplied)


def test_two_colours_are_refused():
    with pytest.raises(ValueError, match=r"has 2 channels where grey \(1\) or colour \(3\) is expected"):
        rgb_of(np.zeros((1, 1, 2), np.uint8))


NUMBERS = {"I;16": 65535, "I": 65535, "F": 1.0}


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "LA", "RGBA", "I;16", "I", "F"])
def test_every_mode_of_pillow_gives_white_for_white(mode):
    white = PIL.Image.new("RGB", (3, 2), "white")
    image = white.convert(mode) if mode not in NUMBERS else PIL.Image.new(mode, (3, 2), NUMBERS[mode])
    assert rgb_of_pillow(image).tolist() == np.full((2, 3, 3), 255).tolist()


HEIGHT, WIDTH = 40, 50


def as_pillow_turns(pixels: np.ndarray, orientation: int) -> np.ndarray:
    image = PIL.Image.fromarray(pixels)
    image.getexif()[TAG] = orientation
    return np.asarray(PIL.ImageOps.exif_transpose(image))


def save(path, pixels, orientation):
    exif = PIL.Image.Exif()
    exif[TAG] = orientation
    match path.suffix:
        case ".tif":
            tags = [(TAG, "H", 1, orientation, True)]
            tifffile.imwrite(path, pixels, photometric="rgb", tile=(16, 16), extratags=tags)
        case ".tiff":
            PIL.Image.fromarray(pixels).quantize(256).save(path, tiffinfo={TAG: orientation})
        case ".jpg":
            PIL.Image.fromarray(pixels).save(path, quality=95, exif=exif)
        case ".webp":
            PIL.Image.fromarray(pixels).save(path, lossless=True, exif=exif)
        case _:
            PIL.Image.fromarray(pixels).save(path, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
def test_files_are_read_upright(tmp_path, suffix, orientation):
    pixels = noise_image(HEIGHT, WIDTH)
    save(tmp_path / f"a{suffix}", pixels, orientation)
    expected = as_pillow_turns(pixels, orientation)
    image = open_image(tmp_path / f"a{suffix}")
    assert image.size == expected.shape[:2]
    for rows, cols in [whole(*image.size), (Interval(3, 20), Interval(7, 31)), whole(1, 1)]:
        assert np.array_equal(image.read(rows, cols), expected[rows.start : rows.stop, cols.start : cols.stop])


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_a_palette_that_lies_on_its_side_is_read_upright(tmp_path, orientation):
    """Also of a square, where its size tells nothing."""
    pixels = noise_image(HEIGHT, HEIGHT)
    image = PIL.Image.fromarray(pixels).convert("P", palette=PIL.Image.Palette.ADAPTIVE)
    image.save(tmp_path / "a.tif", tiffinfo={274: orientation})
    expected = as_pillow_turns(np.asarray(image.convert("RGB")), orientation)
    assert np.array_equal(open_image(tmp_path / "a.tif").read(*whole(HEIGHT, HEIGHT)), expected)


@pytest.mark.parametrize("suffix", [".jpg", ".tiff"])
def test_lossy_ones_too(tmp_path, suffix):
    pixels = smooth_image(HEIGHT, WIDTH)
    save(tmp_path / f"a{suffix}", pixels, 6)
    expected = as_pillow_turns(pixels, 6)
    assert np.abs(open_image(tmp_path / f"a{suffix}").read(*whole(WIDTH, HEIGHT)).astype(int) - expected).mean() < 4


@pytest.mark.parametrize("nonsense", [None, 0, 1, 9, -1, "6", (6,), 6.0])
def test_what_is_no_orientation_changes_nothing(nonsense):
    image = WholeImage(noise_image(4, 5))
    assert upright(image, nonsense) is image
