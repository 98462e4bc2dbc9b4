"""Pictures that a model makes, written a few rows at a time: PNG of 8 bits, TIFF of more."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl._files import Replacement, naming
from mpi4dl.datasets.base import package
from mpi4dl.inference.masks import GREY, RGB, PngFile

FOLDER = "images"
BYTES = "uint8"


def suffix_of(depth: str | None) -> str:
    """How files of pictures of this depth end."""
    return ".png" if depth == BYTES else ".tif"


class TiffFile:
    """An uncompressed TIFF file, written from top to bottom, which is there when it is whole. Raises OSError."""

    def __init__(self, path: Path, size: tuple[int, int], channels: int, depth: str) -> None:
        tifffile = package("tifffile", f"{path}: writing TIFF", "tifffile", "imagecodecs")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._new = Replacement(path)
        shape, shown = ((*size, 3), "rgb") if channels == 3 else (size, "minisblack")
        try:
            with naming(path):
                tifffile.imwrite(self._new.temporary, shape=shape, dtype=depth, photometric=shown)
                with tifffile.TiffFile(self._new.temporary) as file:
                    offset = file.pages[0].dataoffsets[0]
                self._file = self._new.temporary.open("r+b")
                self._file.seek(offset)
        except OSError:
            self._new.drop()
            raise
        self.path = path

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """The next rows, (rows, width, channels)."""
        with naming(self.path):
            self._file.write(np.ascontiguousarray(rows).tobytes())

    def close(self) -> None:
        with naming(self.path):
            self._file.close()
        self._new.keep()

    def drop(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._new.drop()


class PictureFile:
    """The picture that a model made of one image of this `size`, from rows that come from top to bottom.

    Values below 0 and above 1 become 0 and 1, unless `depth` is of floating point. `undefined`: some are no numbers.
    """

    def __init__(self, path: Path, size: tuple[int, int], channels: int, depth: str | None) -> None:
        self.path, self._size, self._depth, self.undefined = path, size, depth or "float32", False
        self._file: PngFile | TiffFile
        if depth == BYTES:
            self._file = PngFile(path, size, RGB if channels == 3 else GREY)
        else:
            self._file = TiffFile(path, size, channels, self._depth)

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """Rows (channels, rows, width) of what the model sees, of which the image is the upper left corner."""
        height, width = self._size
        values = np.moveaxis(rows[:, : max(0, height - where[-2].start), :width], 0, -1)
        self.undefined |= bool(np.isnan(values).any())
        if self.undefined or not values.size:
            return
        if self._depth != "float32":
            values = np.rint(values.clip(0, 1) * np.float64(np.iinfo(self._depth).max))
        self._file.write(where, values.astype(self._depth))

    def close(self) -> None:
        """The file is there when this returns, unless some outputs are not numbers: then there is none."""
        self._file.drop() if self.undefined else self._file.close()

    def drop(self) -> None:
        self._file.drop()
