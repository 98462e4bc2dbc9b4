"""What every dataset of labelled images answers, and the two errors that reading images can raise."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mpi4dl.geometry import Interval

Pixels = npt.NDArray[np.uint8]


class DatasetError(ValueError):
    """A source of images cannot be used: the message says what was asked, what is expected, and what to do."""


class BadImage(DatasetError):
    """One image file cannot be decoded; the others may be fine.

    `path` is the file and `reason` says what is wrong with it.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Image(Protocol):
    """One image, of which any box can be read. It is made for one reading thread and dropped after use."""

    @property
    def height(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def tiled(self) -> bool:
        """Whether a small box costs little to read, however large the image is."""

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        """The pixels of a box inside the image: uint8, (rows, columns, channels).

        Raises:
            BadImage: the file cannot be decoded.
        """


class Dataset(Protocol):
    """Labelled images by index. Every rank lists the same ones in the same order, and reads only its own boxes."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def channels(self) -> int: ...

    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        """The class of image `index`, as an index into `classes`. Opens no file."""

    def image(self, index: int) -> Image:
        """Image `index`, its header read and its pixels not.

        Raises:
            BadImage: the file cannot be opened.
        """


class WholeImage:
    """An image whose pixels are all in memory: uint8, (height, width, channels)."""

    tiled = False

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels

    @property
    def height(self) -> int:
        return self._pixels.shape[0]

    @property
    def width(self) -> int:
        return self._pixels.shape[1]

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        return self._pixels[rows.start : rows.stop, cols.start : cols.stop]
