"""Read PNG, JPEG and other images that have to be decoded whole, with Pillow."""

import warnings
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL.Image

from mpi4dl.datasets.base import BadImage, Image, Pixels
from mpi4dl.datasets.colour import rgb_of_pillow
from mpi4dl.datasets.orientation import TAG, upright
from mpi4dl.geometry import Interval

_TOO_LARGE = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
_STRIP_ROWS = 256  # what is converted at a time, so that little is alive beside the decoded image and the result

# Pillow warns of a large picture, or of odd metadata, at each reading on each rank. What matters is raised.
warnings.filterwarnings("ignore", module=r"PIL\.")


def open_picture(path: Path) -> Image:
    """An image file whose header is read at once, and whose pixels are decoded, all of them, at the first `read`.

    Raises:
        BadImage: not an image, or larger than Pillow's own limit. Damaged ones raise what Pillow raises.
    """
    try:
        with PIL.Image.open(path) as image:
            size, tiff = image.size, image.format == "TIFF"
            # Not the override for PNG, which decodes all pixels to find what may stand behind them.
            orientation = None if tiff else PIL.Image.Image.getexif(image).get(TAG)
    except _TOO_LARGE as error:
        reason = f"is too large to be decoded whole ({error})"
        raise BadImage(path, f"{reason}: convert it to a tiled TIFF, of which boxes can be read") from error
    except PIL.UnidentifiedImageError as error:
        reason = "is not an image of a kind that Pillow knows: the file is damaged, or its extension is wrong"
        raise BadImage(path, reason) from error
    return upright(_Picture(path, size), orientation)  # Pillow itself turns what is in a TIFF file


class _Picture:
    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        self._path = path
        self.size = size[::-1]

    @cached_property
    def _decoded(self) -> PIL.Image.Image:
        with PIL.Image.open(self._path) as image:
            image.load()
        if image.size != self.size[::-1]:
            raise BadImage(self._path, f"has {image.size} pixels where its header says {self.size[::-1]}")
        return image

    def read(self, *space: Interval) -> Pixels:
        rows, cols = space
        pixels = np.empty((rows.length, cols.length, 3), np.uint8)
        if pixels.size == 0:
            return pixels
        for top in range(rows.start, rows.stop, _STRIP_ROWS):
            bottom = min(top + _STRIP_ROWS, rows.stop)
            strip = self._decoded.crop((cols.start, top, cols.stop, bottom))
            pixels[top - rows.start : bottom - rows.start] = rgb_of_pillow(strip)
        return pixels
