"""Read PNG, JPEG and other images that have to be decoded whole, with Pillow."""

from functools import cached_property
from pathlib import Path

import PIL.Image

from mpi4dl.datasets.base import BadImage, Pixels
from mpi4dl.datasets.colour import rgb_of_pillow
from mpi4dl.geometry import Interval

# What Pillow raises for damaged files, by format: OSError (truncated, unidentified), SyntaxError (PNG chunks), and the
# others from inside its parsers of headers. A "decompression bomb" is an image larger than MAX_IMAGE_PIXELS.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, TypeError, OverflowError)
_TOO_LARGE = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)


class PillowImage:
    """An image file whose header is read at once, and whose pixels are decoded, all of them, at the first `read`.

    Raises:
        BadImage: empty, truncated, not an image, or larger than Pillow's own limit.
    """

    tiled = False

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with PIL.Image.open(path) as image:
                self.width, self.height = image.size
        except _TOO_LARGE as error:
            reason = f"is too large to be decoded whole ({error})"
            raise BadImage(path, f"{reason}: convert it to a tiled TIFF, of which boxes can be read") from error
        except _DAMAGED as error:
            raise BadImage(path, _describe(path, error)) from error

    @cached_property
    def _pixels(self) -> Pixels:
        try:
            with PIL.Image.open(self._path) as image:
                return rgb_of_pillow(image)
        except _DAMAGED as error:
            raise BadImage(self._path, _describe(self._path, error)) from error

    def read(self, rows: Interval, cols: Interval) -> Pixels:
        return self._pixels[rows.start : rows.stop, cols.start : cols.stop]


def _describe(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    if path.stat().st_size == 0:
        return "is empty (0 bytes)"
    if isinstance(error, PIL.UnidentifiedImageError):
        return "is not an image of a kind that Pillow knows: the file is damaged, or its extension is wrong"
    return f"cannot be decoded: {error}"
