"""Make an image of any size fill a frame of the training size, by cropping or by resizing, one box at a time.

Whatever box is asked for, its pixels are those that the whole frame has there.
"""

from math import ceil, floor
from typing import NamedTuple

import numpy as np
import PIL.Image

from mpi4dl.datasets.base import Image, Pixels
from mpi4dl.datasets.colour import WHITE
from mpi4dl.geometry import Interval, ceil_div

# A block of the resized frame is always computed as a whole, in the same way, so that rounding cannot depend on the box
# that was asked for. It shrinks for large reductions, to bound the source pixels that it is computed from.
BLOCK_PX = 256
BLOCK_SOURCE_PX = 4096


class Frame(NamedTuple):
    """One axis of a frame: `size` pixels that show the source from `start` on, `scale` source pixels for each."""

    size: int
    start: float
    scale: float

    @property
    def block(self) -> int:
        return max(1, min(BLOCK_PX, floor(BLOCK_SOURCE_PX / self.scale)))

    def blocks(self, wanted: Interval) -> list[Interval]:
        """The blocks of the frame that a wanted interval touches."""
        numbers = range(wanted.start // self.block, ceil_div(wanted.stop, self.block))
        return [Interval(n * self.block, min((n + 1) * self.block, self.size)) for n in numbers]

    def source(self, block: Interval) -> tuple[float, float]:
        """Where in the source a block begins and ends."""
        return self.start + block.start * self.scale, self.start + block.stop * self.scale


def crop(image: Image, top: int, left: int, rows: Interval, cols: Interval) -> Pixels:
    """A box of the frame whose corner lies at (top, left) of the image; white where it reaches beyond the image."""
    source_rows, source_cols = rows.shift(top), cols.shift(left)
    inside_rows = source_rows.intersect(Interval(0, image.height))
    inside_cols = source_cols.intersect(Interval(0, image.width))
    part = image.read(inside_rows, inside_cols)
    if part.shape[:2] == (rows.length, cols.length):
        return part
    pixels = np.full((rows.length, cols.length, part.shape[2]), WHITE, np.uint8)
    below, right = inside_rows.start - source_rows.start, inside_cols.start - source_cols.start
    pixels[below : below + part.shape[0], right : right + part.shape[1]] = part
    return pixels


def resize(image: Image, down: Frame, across: Frame, rows: Interval, cols: Interval) -> Pixels:
    """A box of the image resized to a frame: bilinear and antialiased, as `PIL.Image.resize` does."""
    strips = []
    for block_rows in down.blocks(rows):
        blocks = [_resize_block(image, down, across, block_rows, block_cols) for block_cols in across.blocks(cols)]
        strips.append(np.concatenate(blocks, axis=1))
    pixels = np.concatenate(strips, axis=0)
    top, left = down.blocks(rows)[0].start, across.blocks(cols)[0].start
    return pixels[rows.start - top : rows.stop - top, cols.start - left : cols.stop - left]


def _resize_block(image: Image, down: Frame, across: Frame, rows: Interval, cols: Interval) -> Pixels:
    top, bottom = down.source(rows)
    left, right = across.source(cols)
    read_rows = _with_support(top, bottom, down.scale, image.height)
    read_cols = _with_support(left, right, across.scale, image.width)
    part = image.read(read_rows, read_cols)
    box = (
        max(0.0, left - read_cols.start),
        max(0.0, top - read_rows.start),
        min(float(read_cols.length), right - read_cols.start),
        min(float(read_rows.length), bottom - read_rows.start),
    )
    size = (cols.length, rows.length)
    bilinear = PIL.Image.Resampling.BILINEAR
    if part.shape[2] == 3:
        return np.asarray(PIL.Image.fromarray(part).resize(size, bilinear, box))
    planes = [PIL.Image.fromarray(part[..., c]).resize(size, bilinear, box) for c in range(part.shape[2])]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def _with_support(start: float, stop: float, scale: float, limit: int) -> Interval:
    """The source pixels that a triangle filter reads for an output interval: one output pixel more on both sides."""
    reach = max(1.0, scale)
    return Interval(floor(start - reach), ceil(stop + reach)).intersect(Interval(0, limit))
