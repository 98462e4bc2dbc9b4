"""mpi4dl.datasets.transform: frames cut from or resized from images of any size."""

import numpy as np
import PIL.Image
import pytest

from mpi4dl.datasets import transform
from mpi4dl.datasets.base import WholeImage
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, whole


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
