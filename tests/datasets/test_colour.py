"""mpi4dl.datasets.colour: whatever a file stores becomes three bytes per pixel."""

import numpy as np
import PIL.Image
import pytest

from mpi4dl.datasets.colour import bytes_of, over_white, rgb_of, rgb_of_pillow


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
