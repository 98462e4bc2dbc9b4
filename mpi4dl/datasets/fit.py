"""Make an image of any size fill a frame of the training size, by cropping or by resizing, one box at a time.

Whatever box is asked for, its pixels are those that the whole frame has there. Pillow resizes pictures; volumes and
sequences are resized here, by the same filter.
"""

from collections.abc import Sequence
from math import ceil, floor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import PIL.Image

from mpi4dl.datasets.base import Image, Values
from mpi4dl.datasets.colour import WHITE
from mpi4dl.geometry import Interval, ceil_div

# A block of the resized frame is always computed as a whole, in the same way, so that rounding cannot depend on the box
# that was asked for. It shrinks for large reductions, to bound the source pixels that it is computed from.
BLOCK_PX = 256
BLOCK_SOURCE_PX = 4096
SLAB = 16  # of a volume, so many slices are resized at once


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


def crop(image: Image, corner: Sequence[int], space: Sequence[Interval]) -> Values:
    """A box of the frame whose first pixel lies at `corner` of the image.

    Where it reaches beyond the image, pictures are white, and anything else is 0.
    """
    sources = [interval.shift(first) for interval, first in zip(space, corner, strict=True)]
    inside = [source.intersect(Interval(0, size)) for source, size in zip(sources, image.size, strict=True)]
    part = image.read(*inside)
    lengths = tuple(interval.length for interval in space)
    if part.shape[:-1] == lengths:
        return part
    pixels = np.full((*lengths, part.shape[-1]), WHITE if _is_picture(part) else 0, part.dtype)
    pixels[tuple(slice(i.start - s.start, i.stop - s.start) for i, s in zip(inside, sources, strict=True))] = part
    return pixels


def _is_picture(pixels: npt.NDArray[Any]) -> bool:
    return pixels.dtype == np.uint8 and pixels.ndim == 3


def resize(image: Image, frames: Sequence[Frame], space: Sequence[Interval]) -> Values:
    """A box of the image resized to a frame: linear along each axis and antialiased, as `PIL.Image.resize` does."""
    if len(frames) == 2:
        return _resize_picture(image, frames, space)
    first, *others = space
    starts = range(first.start, first.stop, SLAB)
    slabs = [Interval(start, min(start + SLAB, first.stop)) for start in starts] or [first]
    return np.concatenate([_resize_slab(image, frames, (slab, *others)) for slab in slabs])


def _resize_slab(image: Image, frames: Sequence[Frame], space: Sequence[Interval]) -> npt.NDArray[np.float32]:
    taps = [_taps(*each) for each in zip(frames, space, image.size, strict=True)]
    part = image.read(*(Interval(int(where.min(initial=size)), int(where.max(initial=0)) + 1)
                        if where.size else Interval(0, 0)
                        for (where, _), size in zip(taps, image.size, strict=True)))  # fmt: skip
    values = part.astype(np.float32) / np.float32(WHITE) if part.dtype == np.uint8 else part.astype(np.float32)
    for axis, (where, weights) in enumerate(taps):
        values = _weighted(values, axis, where - where.min(initial=1 << 62), weights)
    return values


def _taps(frame: Frame, wanted: Interval, limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """For each pixel of the frame the source pixels that it is made of, and their weights; the same in any box."""
    reach = max(1.0, frame.scale)
    centre = frame.start + (np.arange(*wanted, dtype=np.float64) + 0.5) * frame.scale
    where = np.floor(centre - reach).astype(np.int64)[:, None] + np.arange(ceil(2 * reach) + 1)
    weights = np.maximum(0.0, 1.0 - np.abs(where + 0.5 - centre[:, None]) / reach) * ((where >= 0) & (where < limit))
    weights /= weights.sum(1, keepdims=True)
    return np.clip(where, 0, limit - 1), weights.astype(np.float32)


def _weighted(
    values: npt.NDArray[np.float32], axis: int, where: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Sums of values along an axis, tap by tap: a product of matrices may round differently for other boxes."""
    shape = [1] * values.ndim
    shape[axis] = -1
    total = np.zeros((*values.shape[:axis], len(where), *values.shape[axis + 1 :]), np.float32)
    for tap in range(where.shape[1]):
        total += values.take(where[:, tap], axis) * weights[:, tap].reshape(shape)
    return total


def _resize_picture(image: Image, frames: Sequence[Frame], space: Sequence[Interval]) -> Values:
    (down, across), (rows, cols) = frames, space
    strips = []
    for block_rows in down.blocks(rows):
        blocks = [_resize_block(image, down, across, block_rows, block_cols) for block_cols in across.blocks(cols)]
        strips.append(np.concatenate(blocks, axis=1))
    pixels = np.concatenate(strips, axis=0)
    top, left = down.blocks(rows)[0].start, across.blocks(cols)[0].start
    return pixels[rows.start - top : rows.stop - top, cols.start - left : cols.stop - left]


def _resize_block(image: Image, down: Frame, across: Frame, rows: Interval, cols: Interval) -> Values:
    top, bottom = down.source(rows)
    left, right = across.source(cols)
    read_rows = _with_support(top, bottom, down.scale, image.size[0])
    read_cols = _with_support(left, right, across.scale, image.size[1])
    part = image.read(read_rows, read_cols)
    box = (
        max(0.0, left - read_cols.start),
        max(0.0, top - read_rows.start),
        min(float(read_cols.length), right - read_cols.start),
        min(float(read_rows.length), bottom - read_rows.start),
    )
    size = (cols.length, rows.length)
    bilinear = PIL.Image.Resampling.BILINEAR
    if part.shape[2] == 3 and part.dtype == np.uint8:
        return np.asarray(PIL.Image.fromarray(part).resize(size, bilinear, box))
    planes = [PIL.Image.fromarray(part[..., c]).resize(size, bilinear, box) for c in range(part.shape[2])]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def _with_support(start: float, stop: float, scale: float, limit: int) -> Interval:
    """The source pixels that a triangle filter reads for an output interval: one output pixel more on both sides."""
    reach = max(1.0, scale)
    return Interval(floor(start - reach), ceil(stop + reach)).intersect(Interval(0, limit))
