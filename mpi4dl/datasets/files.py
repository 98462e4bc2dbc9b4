"""Which reader opens an image file; whatever a reader stumbles over becomes one kind of error here."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpi4dl.datasets import tiff
from mpi4dl.datasets.base import BadImage, DatasetError, Image, Values
from mpi4dl.datasets.pillow import open_picture
from mpi4dl.datasets.tiff_colour import Unsupported
from mpi4dl.datasets.vendor import OpenSlideImage
from mpi4dl.geometry import Interval

SLIDE_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SUFFIXES = PICTURE_SUFFIXES + SLIDE_SUFFIXES


def open_image(path: Path) -> Image:
    """Open an image file: scanners' formats by their extension, TIFF and the rest by their first bytes.

    Raises:
        BadImage: the file cannot be read, is empty, damaged, or no image; so does `read` of what this returns.
        DatasetError: the package that reads this format is not installed.
    """
    with blaming(path):
        with open_regular(path) as file:
            magic = file.read(4)
        if not magic:
            raise BadImage(path, "is empty (0 bytes)")
        return _ImageFile(path, _reader(path, magic))


def _reader(path: Path, magic: bytes) -> Image:
    if path.suffix.lower() in SLIDE_SUFFIXES:
        return OpenSlideImage(path)
    if magic not in tiff.MAGIC:
        return open_picture(path)
    try:
        return tiff.open_tiff(path)
    except Unsupported:
        return open_picture(path)


class _ImageFile:
    """What a reader made of a file; its errors are `BadImage`, with the name of the file."""

    def __init__(self, path: Path, image: Image) -> None:
        self._path, self._image = path, image
        self.size = image.size

    def read(self, *space: Interval) -> Values:
        with blaming(self._path):
            pixels = self._image.read(*space)
            if pixels.dtype != np.uint8 or pixels.shape != (*(interval.length for interval in space), 3):
                asked = " x ".join(map(str, space))
                raise BadImage(self._path, f"gives {pixels.dtype} pixels of shape {pixels.shape} for {asked}")
        return pixels


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Whatever goes wrong in here becomes a `BadImage` of this file, but for what is no fault of its.

    Readers and codecs stumble over damaged bytes in every way that there is: OSError, SyntaxError, struct.error,
    ZeroDivisionError, MemoryError for a size that nothing has, RecursionError, and errors of their own.
    """
    try:
        yield
    except DatasetError:
        raise
    except MemoryError as error:
        raise BadImage(path, "needs more memory than there is: it is damaged, or too large") from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror}" if error.strerror else f"cannot be decoded: {error}"
        raise BadImage(path, reason) from error
    except Exception as error:
        raise BadImage(path, f"cannot be decoded: {str(error) or type(error).__name__}") from error


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading. Pipes, sockets and devices, at which a reader could wait for ever, are refused.

    Raises:
        OSError: it cannot be opened, or is none of the regular files.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file, but a pipe, a device or a folder", str(path))
    return os.fdopen(descriptor, "rb")
