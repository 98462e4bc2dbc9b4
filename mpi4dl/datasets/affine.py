"""Small rotations and changes of scale of an image, box by box.

    a block of the output -> where its pixels come from -> the box around these -> bilinear, or nearest of masks

Places are absolute and in float64, and each pixel is computed by itself. So a box has the pixels of the whole image bit
by bit, however the image is tiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import cos, radians, sin
from typing import Any

import numpy as np
import numpy.typing as npt

from mpi4dl.datasets.base import Values
from mpi4dl.geometry import Interval

BLOCK_PX = 256  # sides of blocks of pixels, which bound the boxes that are read around them

Places = npt.NDArray[np.float64]
Read = Callable[[Interval, Interval], Any]


@dataclass(frozen=True)
class Affine:
    """Rotation by `degrees` counterclockwise, and scale, about the middle of the image, or of each patch.

    `size` (height, width) is that of the image, and `patch` the side of its patches in pixels, if they turn in place. A
    `scale` above 1 enlarges what is shown.
    """

    degrees: float
    scale: float
    size: tuple[int, ...]
    patch: int | None = None

    def places(self, rows: Interval, cols: Interval) -> tuple[Places, Places]:
        """From which row and column each pixel of a block comes, (rows, columns) each; the first pixel is at (0, 0)."""
        middle = [
            (side - 1) / 2 if self.patch is None else interval.start // self.patch * self.patch + (self.patch - 1) / 2
            for side, interval in zip(self.size, (rows, cols), strict=True)
        ]
        down = np.arange(*rows, dtype=np.float64)[:, None] - middle[0]
        across = np.arange(*cols, dtype=np.float64) - middle[1]
        turned = radians(self.degrees)
        along, aside = cos(turned) / self.scale, sin(turned) / self.scale
        return middle[0] + (along * down + aside * across), middle[1] + (along * across - aside * down)

    def pixels(self, space: Sequence[Interval], read: Read, pick: Callable[[Places, Places, Read], Any]) -> Any:
        """A box of the turned image, block by block within patches, as `pick` takes pixels at places, such as bilinear.

        `read` gives boxes of the image, also beyond its sides.
        """
        first = tuple(interval.start for interval in space)
        found: Any = None
        cut = ([block.intersect(each) for block in each.blocks(self.patch or BLOCK_PX)] for each in space)
        for rows, cols in product(*cut):
            made = pick(*self.places(rows, cols), read)
            if found is None:
                found = np.empty((*(interval.length for interval in space), made.shape[-1]), made.dtype)
            found[rows.start - first[0] : rows.stop - first[0], cols.start - first[1] : cols.stop - first[1]] = made
        return read(space[0], space[1]) if found is None else found


def at_nearest(down: Places, across: Places, read: Read) -> Any:
    """The nearest pixels."""
    top, left = (np.floor(each + 0.5).astype(np.int64) for each in (down, across))
    rows, cols = (Interval(int(each.min()), int(each.max()) + 1) for each in (top, left))
    return read(rows, cols)[top - rows.start, left - cols.start]


def bilinear(down: Places, across: Places, read: Read) -> Values:
    """Means of the four pixels around."""
    top, left = np.floor(down).astype(np.int64), np.floor(across).astype(np.int64)
    rows, cols = (Interval(int(each.min()), int(each.max()) + 2) for each in (top, left))
    part = read(rows, cols)
    values = part.astype(np.float32)
    below, right = ((place - whole).astype(np.float32)[..., None] for place, whole in ((down, top), (across, left)))
    y, x = top - rows.start, left - cols.start
    upper = values[y, x] * (1 - right) + values[y, x + 1] * right
    lower = values[y + 1, x] * (1 - right) + values[y + 1, x + 1] * right
    made = (upper * (1 - below) + lower * below).astype(np.float32, copy=False)
    return np.rint(made).astype(np.uint8) if part.dtype == np.uint8 else made
