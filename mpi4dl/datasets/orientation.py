"""Pictures that were stored turned or mirrored, as their EXIF or TIFF tag says, shown upright."""

from mpi4dl.datasets.base import Image, Values
from mpi4dl.geometry import Interval

TAG = 274  # of EXIF and of TIFF

# The value of the tag: are rows and columns exchanged, and is the result then flipped top to bottom, left to right?
_STEPS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def upright(image: Image, orientation: object) -> Image:
    """The image as it is meant to be seen; what is no orientation changes nothing."""
    steps = _STEPS.get(orientation) if isinstance(orientation, int) else None
    return image if steps is None or not any(steps) else _Upright(image, *steps)


class _Upright:
    def __init__(self, stored: Image, exchanged: bool, flip_rows: bool, flip_cols: bool) -> None:
        self._stored, self._exchanged = stored, exchanged
        self._flip_rows, self._flip_cols = flip_rows, flip_cols
        self.size = stored.size[::-1] if exchanged else stored.size

    def read(self, *space: Interval) -> Values:
        (height, width), (rows, cols) = self.size, space
        if self._flip_rows:
            rows = Interval(height - rows.stop, height - rows.start)
        if self._flip_cols:
            cols = Interval(width - cols.stop, width - cols.start)
        pixels = self._stored.read(cols, rows).swapaxes(0, 1) if self._exchanged else self._stored.read(rows, cols)
        return pixels[:: -1 if self._flip_rows else 1, :: -1 if self._flip_cols else 1]
