"""Masks that are written from top to bottom, a few rows at a time, so that nobody has all of a large one.

Pictures become PNG files whose pixels are the numbers of classes, shown in colours of a palette; of more than 256
classes grey ones of 16 bits; anything else arrays of NumPy.
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.trainer.pictures import palette

FOLDER = "masks"
BAND_BYTES = 1 << 24
_PALETTE, _GREY = 3, 0  # types of PNG


def band_height(width: int) -> int:
    """How many rows of so many values are written at once."""
    return max(1, BAND_BYTES // max(1, width))


def path_of(name: str, suffix: str, number: int | None = None) -> Path:
    """Where the mask of an image is, from the folder of masks on; of several its number is in the name."""
    parts = [part for part in Path(name).parts if part not in ("/", "..", "\\")]
    base = Path(*parts)
    return base.with_name(f"{base.stem}{'' if number is None else f'.{number}'}{suffix}")


class PngMask:
    """A PNG file of numbers below `num_classes`, which is there when it is whole. Raises OSError."""

    def __init__(self, path: Path, size: tuple[int, int], num_classes: int) -> None:
        self.path, self._wide = path, num_classes > 256
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.new")
        self._file = self._temporary.open("wb")
        self._packer = zlib.compressobj()
        height, width = size
        kind, bits = (_GREY, 16) if self._wide else (_PALETTE, 8)
        self._file.write(b"\x89PNG\r\n\x1a\n")
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
        if not self._wide:
            self._chunk(b"PLTE", palette(max(2, num_classes)))

    def _chunk(self, name: bytes, data: bytes) -> None:
        self._file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """The next rows, (rows, width)."""
        values = np.ascontiguousarray(rows, ">u2" if self._wide else np.uint8).view(np.uint8).reshape(len(rows), -1)
        data = self._packer.compress(np.insert(values, 0, 0, axis=1).tobytes())  # each row is as it is: filter 0
        if data:
            self._chunk(b"IDAT", data)

    def close(self) -> None:
        self._chunk(b"IDAT", self._packer.flush())
        self._chunk(b"IEND", b"")
        self._file.close()
        self._temporary.rename(self.path)

    def drop(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class ArrayMask:
    """The same as an array in an .npy file, of any number of axes. Raises OSError."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.new")
        self._array: Any = np.lib.format.open_memmap(self._temporary, "w+", dtype=np.dtype(dtype), shape=shape)

    def write(self, where: tuple[slice, ...], rows: npt.NDArray[Any]) -> None:
        """What stands there."""
        self._array[where] = rows

    def close(self) -> None:
        self._array.flush()
        self._array = None
        self._temporary.rename(self.path)

    def drop(self) -> None:
        self._array = None
        self._temporary.unlink(missing_ok=True)


class FailingLater:
    """Goes on without doing what failed once, for a rank that others wait for; `settle` then raises it."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def do(self, action: Callable[[], Any]) -> Any:
        if self.error is not None:
            return None
        try:
            return action()
        except OSError as error:
            self.error = error
            return None

    def settle(self) -> None:
        if self.error is not None:
            raise self.error
