"""Read boxes of slide scanners' formats (SVS, NDPI, MRXS, ...) with OpenSlide."""

from pathlib import Path

import numpy as np

from mpi4dl.datasets.base import BadImage, DatasetError, Pixels
from mpi4dl.datasets.colour import over_white
from mpi4dl.geometry import Interval

# OpenSlide hands out four bytes per pixel; strips keep what is alive beside the result small.
STRIP_ROWS = 1024


class OpenSlideImage:
    """A slide at its full resolution, as RGB bytes; what the scanner left out is white.

    Raises:
        BadImage: OpenSlide does not recognise the file, or cannot decode a tile of it.
    """

    tiled = True

    def __init__(self, path: Path) -> None:
        try:
            import openslide
        except ImportError as error:
            remedy = "run pip install openslide-python openslide-bin"
            raise DatasetError(f"{path}: reading {path.suffix} needs openslide: {remedy}") from error
        self._path = path
        self._error = openslide.OpenSlideError
        try:
            self._slide = openslide.OpenSlide(path)
        except (self._error, OSError) as error:
            reason = "the file is damaged, or its extension is wrong"
            raise BadImage(path, f"is no slide that OpenSlide can open ({error}): {reason}") from error
        self.width, self.height = self._slide.dimensions

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        pixels = np.empty((rows.length, cols.length, 3), np.uint8)
        if pixels.size == 0:
            return pixels
        for top in range(rows.start, rows.stop, STRIP_ROWS):
            height = min(STRIP_ROWS, rows.stop - top)
            try:
                region = self._slide.read_region((cols.start, top), 0, (cols.length, height))
            except self._error as error:
                raise BadImage(self._path, f"cannot be decoded: {error}") from error
            samples = np.asarray(region)
            pixels[top - rows.start : top - rows.start + height] = over_white(samples[..., :3], samples[..., 3])
        return pixels
