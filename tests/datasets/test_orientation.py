"""mpi4dl.datasets.colour: what was stored turned is read upright, whichever box is wanted, from any format."""

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import tifffile

from mpi4dl.datasets import open_image
from mpi4dl.datasets.base import WholeImage
from mpi4dl.datasets.colour import TAG, upright
from mpi4dl.geometry import Interval
from tests.datasets.boxes import noise_image, smooth_image, whole

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
