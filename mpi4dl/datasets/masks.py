"""Masks: files that say of each pixel of an image which class it is, read box by box."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl._files import open_regular
from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import IGNORED, BadImage, FunctionImage, Image, blaming
from mpi4dl.datasets.files import ZARR_SUFFIXES, is_zarr, picture
from mpi4dl.datasets.volumes import VOLUME_SUFFIXES, open_volume
from mpi4dl.geometry import Interval

PICTURES = (".png", ".tif", ".tiff", ".bmp", ".gif", *ZARR_SUFFIXES)
IGNORE_INDEX = 255  # as in the masks of PASCAL VOC and Cityscapes
_MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")
_WHITE = 255
BLACK_AND_WHITE = ({0, _WHITE}, {_WHITE})  # values of masks whose white may be a class, or ignored
_STRETCHED = {"L;2": 85, "L;4": 17}  # by which Pillow multiplies grey of few bits
_STRIP = 1024


class Mask:
    """The classes of the pixels of an image, from 0 to `num_classes` - 1, and -100 where `ignored` is stored.

    Where nothing is ignored (None), white is class 1 of black and white masks.
    """

    def __init__(self, path: Path, stored: Image, num_classes: int, ignored: int | None = IGNORE_INDEX) -> None:
        self.path, self.size = path, stored.size
        self.axes, self.affine = getattr(stored, "axes", ""), getattr(stored, "affine", None)
        self._stored, self._num_classes, self._ignored = stored, num_classes, ignored

    def read(self, *space: Interval) -> npt.NDArray[np.int64]:
        """A box of it. Raises BadImage for what cannot be decoded, and for an index beyond the classes."""
        found = _integers(self.path, self._stored, space)
        if self._ignored is None and self._num_classes == 2:
            found = np.where(found == _WHITE, 1, found)
        ignored = np.zeros(found.shape, bool) if self._ignored is None else found == self._ignored
        beyond = found[((found < 0) | (found >= self._num_classes)) & ~ignored]
        if beyond.size:
            more = "" if self._ignored is None else f", and {self._ignored} is ignored"
            known = f"there are {self._num_classes} classes, from 0 on{more}"
            raise BadImage(self.path, f"has a pixel of class {beyond[0]}, but {known}")
        return np.where(ignored, IGNORED, found)


def open_stored(path: Path, volumes: bool = False) -> Image:
    """A file of a mask, its header read and its pixels not. Raises BadImage."""
    with blaming(path):
        if is_zarr(path) and not volumes:
            from mpi4dl.datasets import zarrs

            image = zarrs.ZarrImage(path)
            return _one_channel(path, image, len(image.bands), image.read)
        magic = b""
        if not is_zarr(path):
            with open_regular(path) as file:
                magic = file.read(4)
            if not magic:
                raise BadImage(path, "is empty (0 bytes)")
        if volumes:
            volume = open_volume(path)
            return _one_channel(path, volume, volume.channels, volume.stored)
        if magic in tiff.MAGIC:
            return tiff.open_tiff(path, indices=True)
        return _open_picture(path)


def pixels_of(mask: Any) -> Iterator[npt.NDArray[Any]]:
    """The classes of all pixels of a dataset's mask, an array or an object with `size` and `read`, some rows at a time.

    Raises BadImage.
    """
    if not hasattr(mask, "read"):
        yield np.asarray(mask)
        return
    first, *others = (Interval(0, size) for size in mask.size)
    yield from (mask.read(part, *others) for part in first.strips(_STRIP))


def values_in(path: Path, volumes: bool = False) -> npt.NDArray[np.int64]:
    """Which numbers a mask holds, in order. Raises BadImage."""
    stored = open_stored(path, volumes)
    first, *others = (Interval(0, size) for size in stored.size)
    found = [np.unique(_integers(path, stored, (part, *others))) for part in first.strips(_STRIP)]
    return np.unique(np.concatenate(found))


def _integers(path: Path, stored: Image, space: tuple[Interval, ...]) -> npt.NDArray[np.int64]:
    with blaming(path):
        found = stored.read(*space)
        whole = found.astype(np.int64)
        if found.dtype.kind not in "bui" and not np.array_equal(whole, found):
            raise BadImage(path, "has values that are no whole numbers: a mask has the number of a class in each pixel")
        return whole


def _open_picture(path: Path) -> Image:
    with PIL.Image.open(path) as image:
        kind, mode = image.format, image.mode
        if mode == "LA":  # which is grey where nothing is transparent
            opaque = image.getchannel("A").getextrema() == (_WHITE, _WHITE)
            mode = "L" if opaque else mode
        if kind not in ("PNG", "BMP", "GIF"):
            told = "masks are PNG, TIFF, BMP or GIF, which keep the number of each pixel"
            raise BadImage(path, f"is a {kind} file: {told}")
        if mode not in _MODES:
            told = "a mask is grey or has a palette, of numbers of classes"
            raise BadImage(path, f"is a picture in colours ({mode}): {told}")
        return picture(path, image, indices_of)


def indices_of(image: PIL.Image.Image) -> npt.NDArray[Any]:
    """The numbers that a picture of Pillow stores, (height, width): of palettes, or of grey.

    Pillow stretches grey of 2 and 4 bits to that of 8, as soon as the pixels are loaded.
    """
    raw = [tile[3] for tile in getattr(image, "tile", ())]
    names = {each if isinstance(each, str) else each[0] for each in raw if each}
    pixels = np.asarray(image.getchannel("L") if image.mode == "LA" else image)
    return pixels // next((step for name, step in _STRETCHED.items() if name in names), 1)


def _one_channel(path: Path, image: Any, channels: int, stored: Callable[..., npt.NDArray[Any]]) -> Image:
    """A mask in an image that must have one channel, of which `stored` reads boxes. Raises BadImage."""
    if channels != 1:
        raise BadImage(path, f"has {channels} channels: a mask has one number in each place, that of its class")
    where = getattr(image, "axes", ""), getattr(image, "affine", None)
    return FunctionImage(image.size, lambda *space: stored(*space)[..., 0], *where)


def mask_suffixes(volumes: bool) -> tuple[str, ...]:
    """How files of masks end."""
    return tuple(VOLUME_SUFFIXES) if volumes else PICTURES
