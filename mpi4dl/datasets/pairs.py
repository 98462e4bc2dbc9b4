"""Pictures as their files store them: inputs and targets of a model that makes images out of images.

Both keep their channels, 1 (grey) or 3 (red, green, blue), and their depth: 8 or 16 bits, or 32 of floating point.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl._files import open_regular
from mpi4dl._wording import counted
from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import BadImage, Image, Values, package, unit_values
from mpi4dl.datasets.colour import TAG, WHITE, upright
from mpi4dl.datasets.files import blaming
from mpi4dl.geometry import Interval

TARGETS = (".png", ".tif", ".tiff")
NAMES = {1: ("grey",), 3: ("red", "green", "blue")}  # of channels
DEPTHS = {"uint8": "8 bits", "uint16": "16 bits", "float32": "32 bits of floating point"}
_CHANNELS = {"1": 1, "L": 1, "I": 1, "I;16": 1, "RGB": 3, "P": 3}  # by Pillow's modes
_PNG = b"\x89PNG"
_BIT_DEPTH = 24  # where a PNG file has it


class StoredPicture:
    """A picture of `channels`, whose values are of the type `depth` in its file."""

    def __init__(self, path: Path, stored: Image, channels: int, depth: str) -> None:
        self.path, self.size, self.channels, self.depth = path, stored.size, channels, depth
        self._stored = stored

    def read(self, *space: Interval) -> Values:
        """A box, (rows, columns, channels): uint8, or float32 that is 0 to 1 of 16 bits, and as stored of 32.

        Raises:
            BadImage: the file cannot be decoded.
        """
        with blaming(self.path):
            return unit_values(self._stored.read(*space))

    def require(self, channels: int, depth: str | None, noun: str) -> None:
        """Raise BadImage if other pictures of this kind have other channels, or another depth."""
        if self.channels != channels:
            has = counted(self.channels, "channel")
            raise BadImage(self.path, f"has {has}, but other {noun}s have {channels}: write all {noun}s alike")
        if depth is not None and self.depth != depth:
            told = f"has {DEPTHS[self.depth]}, but other {noun}s have {DEPTHS[depth]}"
            raise BadImage(self.path, f"{told}: write all {noun}s alike")

    def require_size_of(self, image: Any) -> None:
        """Raise BadImage if the input of this target has another size."""
        if tuple(self.size) != tuple(image.size):
            mine, others = (" x ".join(map(str, each)) for each in (self.size, image.size))
            told = f"is a target of {mine} pixels, but its input {getattr(image, 'path', '')} has {others}"
            raise BadImage(self.path, f"{told}: they must be equal")


def open_stored_picture(path: Path) -> StoredPicture:
    """A picture, its header read and its pixels not.

    Raises:
        BadImage: the file cannot be read, is damaged, or has other channels or another depth.
    """
    with blaming(path):
        with open_regular(path) as file:
            head = file.read(_BIT_DEPTH + 1)
        if not head:
            raise BadImage(path, "is empty (0 bytes)")
        if head[:4] in tiff.MAGIC:
            return StoredPicture(path, *tiff.open_values(path))
        return _open_picture(path, head)


_WANTED = "expected 1 channel (grey) or 3 (RGB), of 8 or 16 bits"


def _open_picture(path: Path, head: bytes) -> StoredPicture:
    wide = head[:4] == _PNG and head[-1] == 16
    with PIL.Image.open(path) as image:
        size, mode, tag = image.size, image.mode, PIL.Image.Image.getexif(image).get(TAG)
        transparent = "transparency" in image.info
    if mode not in _CHANNELS or transparent:
        raise BadImage(path, f"has pixels of {mode}{' with transparency' * transparent}: {_WANTED}")
    stored = upright(_Decoded(path, size, mode, wide), tag)
    return StoredPicture(path, stored, _CHANNELS[mode], "uint16" if wide else "uint8")


class _Decoded:
    """A picture that is decoded whole, at the first `read`; of 16 bits not by Pillow, which has 8 of three channels."""

    def __init__(self, path: Path, size: tuple[int, int], mode: str, wide: bool) -> None:
        self._path, self.size, self._mode, self._wide = path, size[::-1], mode, wide

    @cached_property
    def _pixels(self) -> npt.NDArray[Any]:
        if self._wide:
            codecs = package("imagecodecs", f"{self._path}: reading PNG of 16 bits", "tifffile", "imagecodecs")
            found: npt.NDArray[Any] = codecs.png_decode(self._path.read_bytes())
        else:
            with PIL.Image.open(self._path) as image:
                found = np.asarray(image.convert("RGB" if _CHANNELS[self._mode] == 3 else "L"))
        return found.reshape(*self.size, _CHANNELS[self._mode])

    def read(self, *space: Interval) -> Values:
        return self._pixels[tuple(slice(*interval) for interval in space)]


def planes_of(pixels: Values) -> npt.NDArray[np.float32]:
    """Pixels (rows, columns, channels) as a target: (channels, rows, columns), 0 to 1."""
    values = pixels.astype(np.float32) / np.float32(WHITE) if pixels.dtype == np.uint8 else pixels
    return np.ascontiguousarray(np.moveaxis(values, -1, 0), np.float32)
