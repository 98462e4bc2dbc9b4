"""Read boxes of slide scanners' formats (SVS, NDPI, MRXS, ...) with OpenSlide, in processes that may die (`child`)."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mpi4dl._wording import to_install
from mpi4dl.datasets.base import BadImage, DatasetError, Pixels
from mpi4dl.datasets.child import ask
from mpi4dl.datasets.colour import over_white
from mpi4dl.geometry import Interval

# OpenSlide hands out four bytes per pixel; strips keep what is alive beside the result small.
STRIP_ROWS = 1024
BYTES_PER_PIXEL = 4


class OpenSlideImage:
    """A slide at its full resolution, as RGB bytes; what the scanner left out is white.

    Raises:
        BadImage: OpenSlide does not recognise the file, or cannot decode a tile of it.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("openslide") is None:
            remedy = to_install("openslide-python", "openslide-bin")
            raise DatasetError(f"{path}: reading {path.suffix} needs openslide; run {remedy}")
        self._path = path
        answer, _ = ask("openslide", path)
        if "error" in answer:
            reason = "the file is damaged, or its extension is wrong"
            raise BadImage(path, f"is no slide that OpenSlide can open ({answer['error']}): {reason}")
        self.size = answer["size"][1], answer["size"][0]

    def read(self, *space: Interval) -> Pixels:
        rows, cols = space
        pixels = np.empty((rows.length, cols.length, 3), np.uint8)
        if pixels.size == 0:
            return pixels
        for top in range(rows.start, rows.stop, STRIP_ROWS):
            height = min(STRIP_ROWS, rows.stop - top)
            answer, content = ask("openslide", self._path, (cols.start, top, cols.length, height))
            if "error" in answer:
                raise BadImage(self._path, f"cannot be decoded: {answer['error']}")
            samples = np.frombuffer(content, np.uint8).reshape(height, cols.length, BYTES_PER_PIXEL)
            pixels[top - rows.start : top - rows.start + height] = over_white(samples[..., :3], samples[..., 3])
        return pixels
