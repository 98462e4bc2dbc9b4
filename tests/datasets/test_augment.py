"""mpi4dl.datasets.augment: decisions by seed, epoch and sample, and colours pixel by pixel."""

import re
from dataclasses import replace

import numpy as np
import pytest

from mpi4dl.datasets import Augmentation, Variation
from mpi4dl.datasets.augment import vary_colour
from tests.datasets.boxes import noise_image

ALL = Augmentation(crop=0.5, flip_rows=True, flip_cols=True, brightness=0.3, contrast=0.3, saturation=0.3)


def test_the_same_seed_epoch_and_sample_vary_alike_and_others_do_not():
    assert ALL.draw(1, 2, 3) == ALL.draw(1, 2, 3)
    assert len({ALL.draw(1, 2, 3), ALL.draw(0, 2, 3), ALL.draw(1, 0, 3), ALL.draw(1, 2, 0)}) == 4


def test_values_stay_in_their_ranges_and_flips_happen_half_of_the_time():
    drawn = [ALL.draw(0, 0, index) for index in range(400)]
    assert all(0.5 <= v.crop <= 1 and 0 <= v.down <= 1 and 0 <= v.across <= 1 for v in drawn)
    assert all(0.7 <= factor <= 1.3 for v in drawn for factor in (v.brightness, v.contrast, v.saturation))
    assert 140 < sum(v.flip_rows for v in drawn) < 260
    assert 140 < sum(v.flip_cols for v in drawn) < 260
    assert 60 < sum(v.flip_rows and v.flip_cols for v in drawn) < 140


def test_turning_one_option_off_leaves_the_others_as_they_were():
    assert replace(ALL, flip_rows=False).draw(0, 0, 1) == replace(ALL.draw(0, 0, 1), flip_rows=False)
    assert replace(ALL, crop=1.0).draw(0, 0, 1) == replace(ALL.draw(0, 0, 1), crop=1.0)


def test_nothing_to_vary_is_the_identity_but_for_the_place_of_crops():
    drawn = Augmentation(flip_cols=False).draw(0, 0, 0)
    assert replace(drawn, down=0.5, across=0.5, deep=0.5) == Variation()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"crop": 0.0}, "crop=0.0: the smallest share of a side to keep must be in (0, 1]"),
        ({"crop": 1.5}, "crop=1.5: the smallest share of a side to keep must be in (0, 1]"),
        ({"contrast": -0.1}, "contrast=-0.1: a strength must be in [0, 1]"),
        ({"saturation": 2}, "saturation=2: a strength must be in [0, 1]"),
    ],
)
def test_wrong_strengths(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Augmentation(**wrong)


def test_colours_follow_their_definitions():
    pixels = np.array([[[100, 150, 50]]], np.uint8)
    grey = 0.299 * 100 + 0.587 * 150 + 0.114 * 50
    varied = vary_colour(pixels, Variation(brightness=1.1, contrast=0.8, saturation=0.5)).ravel()
    expected = [1.1 * (127.5 + 0.8 * (0.5 * value + 0.5 * grey - 127.5)) for value in (100, 150, 50)]
    np.testing.assert_allclose(varied, expected, rtol=1e-5)


def test_colours_are_limited():
    pixels = np.array([[[0, 255, 128]]], np.uint8)
    assert vary_colour(pixels, Variation(brightness=2, contrast=2)).ravel().tolist() == [0, 255, 255]


def test_saturation_of_grey_images_is_refused():
    with pytest.raises(ValueError, match=r"saturation needs images of 3 channels, these have 1: set saturation=0"):
        vary_colour(noise_image(3, 3, 1), Variation(saturation=0.5))
