"""mpi4dl.datasets.arrays: tiles agree with the whole, and the label can be seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.datasets import DatasetError
from mpi4dl.datasets.arrays import Synthetic
from mpi4dl.geometry import Interval
from tests.datasets.boxes import cuts, tiles, whole


@given(st.data())
def test_tiles_are_parts_of_the_whole(data):
    height, width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    dataset = Synthetic(
        20, (height, width), num_classes=data.draw(st.integers(2, 12)), seed=data.draw(st.integers(0, 9))
    )
    image = dataset.image(data.draw(st.integers(0, 19)))
    pixels = image.read(*whole(height, width))
    assert pixels.dtype == np.uint8
    for rows, cols in tiles(data.draw(cuts(height)), data.draw(cuts(width))):
        tile = image.read(rows, cols)
        assert np.array_equal(tile, pixels[rows.start : rows.stop, cols.start : cols.stop])


def test_a_far_corner_of_an_enormous_image():
    image = Synthetic(1, (10**6, 10**6)).image(0)
    corner = image.read(Interval(10**6 - 3, 10**6), Interval(10**6 - 2, 10**6))
    assert np.array_equal(corner[2:, 1:], image.read(Interval(10**6 - 1, 10**6), Interval(10**6 - 1, 10**6)))


def test_images_depend_on_seed_and_index():
    def pixels(seed, index):
        return Synthetic(20, (16, 16), seed=seed).image(index).read(*whole(16, 16)).tobytes()

    assert pixels(0, 3) == pixels(0, 3)
    assert len({pixels(0, 3), pixels(0, 13), pixels(1, 3)}) == 3


def test_the_mean_colours_of_the_classes_differ():
    dataset = Synthetic(6, (64, 64), num_classes=3)
    assert [dataset.label(i) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    means = [dataset.image(i).read(*whole(64, 64)).mean(axis=(0, 1)) for i in range(6)]
    for i in range(3):
        assert np.abs(means[i] - means[i + 3]).max() < 4
        assert np.abs(means[i] - means[(i + 1) % 3]).max() > 20


@pytest.mark.parametrize(("length", "size", "num_classes"), [(0, (8, 8), 2), (4, (0, 8), 2), (4, (8, 8), 1)])
def test_images_that_cannot_be(length, size, num_classes):
    message = rf"{length} synthetic images of {size[0]} x 8 pixels in {num_classes} classes: needs at least 1 image"
    with pytest.raises(DatasetError, match=message):
        Synthetic(length, size, num_classes)
