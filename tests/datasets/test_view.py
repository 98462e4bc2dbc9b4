"""mpi4dl.datasets.transform: the tiles of a varied image are the varied image, bit for bit."""

import re
from itertools import product

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.datasets import Augmentation, Variation, View, transform
from mpi4dl.datasets.base import WholeImage
from mpi4dl.geometry import Interval
from tests.datasets.boxes import cuts, noise_image, tiles, whole


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tiles_join_to_the_whole(data):
    sizes = st.tuples(st.integers(1, 50), st.integers(1, 50))
    source, target = data.draw(sizes), data.draw(sizes)
    image = WholeImage(noise_image(*source))
    augmentation = data.draw(
        st.builds(
            Augmentation,
            crop=st.floats(0.2, 1),
            flip_rows=st.booleans(),
            flip_cols=st.booleans(),
            brightness=st.floats(0, 1),
            contrast=st.floats(0, 1),
            saturation=st.floats(0, 1),
            stains=st.floats(0, 1),
            degrees=st.sampled_from([0, 0, 20]),
            turns=st.sampled_from([1, 2, 4]),
        )
    )
    side = data.draw(st.none() | st.integers(1, 20))
    fit = data.draw(st.sampled_from(["resize", "crop"]))
    view = View(target, fit, data.draw(st.none() | st.just(augmentation)), patch=side)
    variation = view.variation(data.draw(st.integers(0, 99)), data.draw(st.integers(0, 9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "BLOCK_PX", data.draw(st.integers(1, 40)))
        expected = view.tile(image, *whole(*target), variation=variation)
        joined = np.full_like(expected, np.nan)
        for rows, cols in tiles(data.draw(cuts(target[0])), data.draw(cuts(target[1]))):
            joined[:, slice(*rows), slice(*cols)] = view.tile(image, rows, cols, variation=variation)
    assert np.array_equal(joined, expected)


@pytest.mark.parametrize("patch", [None, 4])
def test_turns_and_flips_are_those_of_numpy_and_masks_turn_alike(patch):
    """All eight symmetries: of a square image, or of each patch, whose place in the image is mirrored alone."""
    pixels = noise_image(12, 12 if patch is None else 20)
    size = pixels.shape[:2]
    view, image = View(size, "crop", patch=patch), WholeImage(pixels)
    seen = set()
    for rows, cols, turns in product((False, True), (False, True), range(4)):
        variation = Variation(flip_rows=rows, flip_cols=cols, quarter_turns=turns)
        flipped = pixels[:: -1 if rows else 1, :: -1 if cols else 1]
        shown = view.pixels(image, *whole(*size), variation=variation)
        seen.add(shown.tobytes())
        if patch is None:
            expected = np.rot90(flipped, turns)
        else:
            flips = variation.flips(2)
            expected = np.empty_like(pixels)
            for row, col in np.ndindex(3, 5):
                source = (2 - row if flips[0] else row, 4 - col if flips[1] else col)
                (top, left), (y, x) = ((4 * place[0], 4 * place[1]) for place in (source, (row, col)))
                part = pixels[top : top + 4, left : left + 4][:: -1 if rows else 1, :: -1 if cols else 1]
                expected[y : y + 4, x : x + 4] = np.rot90(part, turns)
        assert np.array_equal(shown, expected)
        assert np.array_equal(view.mask(pixels[..., 0].astype(np.int64), variation), expected[..., 0])
    assert len(seen) == 8


def test_an_image_of_its_own_size_turns_with_its_view():
    pixels, own = noise_image(50, 90), View((1, 1), "own")
    for turns in range(4):
        variation = Variation(flip_rows=True, quarter_turns=turns)
        view = own.for_image((50, 90), variation)
        padded = np.pad(pixels, [(0, 14), (0, 6), (0, 0)], constant_values=255)
        expected = np.rot90(padded[::-1], turns)
        assert view.size == expected.shape[:2]
        assert np.array_equal(view.pixels(WholeImage(pixels), *whole(*view.size), variation=variation), expected)


def test_turns_are_drawn_alike_often():
    drawn = [Augmentation(turns=4).draw(0, 0, index).quarter_turns for index in range(400)]
    assert all(70 < drawn.count(turns) < 130 for turns in range(4))
    assert {Augmentation(turns=2).draw(0, 0, index).quarter_turns for index in range(99)} == {0, 2}


def test_a_small_slide_lies_in_the_middle_of_white():
    pixels = View((11, 12), "crop").pixels(WholeImage(noise_image(4, 5)), *whole(11, 12))
    assert np.array_equal(pixels[3:7, 3:8], noise_image(4, 5))
    pixels[3:7, 3:8] = 255
    assert (pixels == 255).all()


def test_crops_reach_every_place_and_none_outside():
    pixels, view = noise_image(5, 6), View((3, 3), "crop", augmentation=Augmentation(flip_cols=False))
    corners = set()
    for index in range(200):
        variation = view.variation(index, 0)
        window = view.pixels(WholeImage(pixels), *whole(3, 3), variation=variation)
        corners |= {(y, x) for y in range(3) for x in range(4) if np.array_equal(window, pixels[y : y + 3, x : x + 3])}
    assert len(corners) == 12
    last = view.pixels(WholeImage(pixels), *whole(3, 3), variation=Variation(down=1.0, across=1.0))
    assert np.array_equal(last, pixels[2:, 3:])


def test_a_partial_crop_shows_a_part_enlarged():
    pixels = noise_image(40, 40)
    shown = View((20, 20), "resize").pixels(
        WholeImage(pixels), *whole(20, 20), variation=Variation(crop=0.5, down=1.0, across=0)
    )
    assert np.array_equal(shown, pixels[20:, :20])


def test_values_are_normalised_per_channel():
    image = WholeImage(np.array([[[0, 127, 255]]], np.uint8))
    tile = View((1, 1), mean=(0.0, 0.5, 0.2), std=(1.0, 0.5, 0.1)).tile(image, *whole(1, 1))
    assert tile.dtype == np.float32
    assert tile.shape == (3, 1, 1)
    np.testing.assert_allclose(tile.ravel(), [0, (127 / 255 - 0.5) / 0.5, 8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (0, 4)}, "size=(0, 4): each side must be at least 1 pixel"),
        ({"size": (4, 4), "fit": "squeeze"}, "fit='squeeze': expected one of resize, crop"),
        ({"size": (4, 4), "std": (1.0,)}, "one of each per channel, and every std above 0"),
        ({"size": (4, 4), "std": (1.0, 1.0, 0.0)}, "one of each per channel, and every std above 0"),
    ],
)
def test_views_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        View(**wrong)


def test_boxes_outside_the_frame_are_refused():
    message = r"the box .*start=0, stop=5.* x .* lies outside the frame of 4 x 4 pixels"
    with pytest.raises(ValueError, match=message):
        View((4, 4)).tile(WholeImage(noise_image(9, 9)), Interval(0, 5), Interval(0, 4))


def test_mean_and_std_must_fit_the_channels():
    with pytest.raises(ValueError, match=r"is for 3 channels, the image has 1"):
        View((4, 4)).tile(WholeImage(noise_image(4, 4, 1)), *whole(4, 4))


def test_beyond_a_mask_of_bytes_pixels_are_ignored():
    found = View((4, 4), "crop").mask(np.ones((2, 2), np.uint8))
    assert (found.dtype, (found == 1).sum(), (found == -100).sum()) == (np.int64, 4, 12)


def frames(source, target):
    return [transform.Frame(n, 0.0, s / n) for s, n in zip(source, target, strict=True)]


@pytest.mark.parametrize(
    ("source", "target"),
    [((60, 80), (60, 80)), ((60, 80), (31, 17)), ((60, 80), (130, 90)), ((300, 40), (200, 256)), ((1, 1), (5, 7))],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_small_frames_are_exactly_what_pillow_makes(source, target, channels):
    pixels = noise_image(*source, channels)
    resized = transform.resize(WholeImage(pixels), frames(source, target), whole(*target))
    pictures = [PIL.Image.fromarray(pixels[..., c]) for c in range(channels)]
    expected = [np.asarray(picture.resize(target[::-1], PIL.Image.Resampling.BILINEAR)) for picture in pictures]
    assert np.array_equal(resized, np.stack(expected, axis=2))


@pytest.mark.parametrize(("source", "target"), [((700, 900), (600, 520)), ((150, 170), (640, 700))])
def test_large_frames_differ_from_pillow_by_rounding_only(source, target):
    pixels = noise_image(*source)
    resized = transform.resize(WholeImage(pixels), frames(source, target), whole(*target))
    expected = np.asarray(PIL.Image.fromarray(pixels).resize(target[::-1], PIL.Image.Resampling.BILINEAR))
    assert np.abs(resized.astype(int) - expected).max() <= 1


def test_a_large_reduction_reads_a_bounded_window_at_a_time():
    class Endless:
        size = (100_000, 100_000)
        largest = 0

        def read(self, rows, cols):
            self.largest = max(self.largest, rows.length, cols.length)
            return np.zeros((rows.length, cols.length, 3), np.uint8)

    image = Endless()
    transform.resize(image, frames((100_000, 100_000), (512, 512)), (Interval(100, 130), Interval(0, 30)))
    assert image.largest < 1.2 * transform.BLOCK_SOURCE_PX
