"""Adaptive pooling: means and maxima over bins of rows and columns, which every rank then has in full."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import collectives
from mpi4dl.geometry import BATCH, COLS, ROWS, Interval, ceil_div
from mpi4dl.parallel.spatial.grid import Dims
from mpi4dl.parallel.spatial.rules.extrema import NOWHERE, first_of, take, worst
from mpi4dl.parallel.spatial.rules.reductions import mean, owned_along
from mpi4dl.parallel.spatial.rules.windows import check_image
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register, wrap


@register(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: SpatialTensor, output_size: Any) -> Tensor:
    """Means over bins of rows and columns; the result is small, and every rank has all of its rows and columns."""
    input = check_image(input, "torch.nn.functional.adaptive_avg_pool2d")
    size = _output_size(input, output_size)
    if size == (1, 1):
        return mean(input, (-2, -1), True)
    return _over_bins(input, _bins(input, size))


def _output_size(x: Tensor, asked: Any) -> tuple[int, int]:
    rows, cols = (asked, asked) if isinstance(asked, int) or asked is None else asked
    return x.shape[-2] if rows is None else rows, x.shape[-1] if cols is None else cols


def _bins(x: SpatialTensor, size: tuple[int, int]) -> list[Tensor]:
    """For rows and for columns, the weight (bins, owned) of each owned one in each bin's mean."""
    weights = []
    for axis, dim, count in ((ROWS, -2, size[0]), (COLS, -1, size[1])):
        pixels = x.shape[dim]
        mine = x.layout.owned[axis] if x.layout.dims[axis] is not None else (0, pixels)
        weight = torch.zeros(count, pixels, dtype=_wide_dtype(x), device=x.device)
        for i in range(count):
            start, stop = _bin(i, pixels, count)
            weight[i, start:stop] = 1 / (stop - start)
        weights.append(weight[:, mine[0] : mine[1]])
    return weights


def _wide_dtype(x: Tensor) -> torch.dtype:
    """What to add up in: not in 16 bits, as PyTorch does not either."""
    return torch.float32 if x.itemsize < 4 else x.dtype


def _over_bins(x: SpatialTensor, weights: list[Tensor]) -> Tensor:
    axes = tuple(axis for axis in (ROWS, COLS) if x.layout.dims[axis] is not None)
    with torch.autocast(x.device.type, enabled=False) if not x.is_meta else nullcontext():
        y = weights[0] @ owned_along(x, axes).to(weights[0].dtype) @ weights[1].mT
    if any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = collectives.all_reduce(y, x.layout.grid.along(axes))
    dims: Dims = (x.layout.dims[BATCH], None, None)
    return wrap(y.to(x.dtype), x.layout.with_dims(dims))


@register(*named("adaptive_max_pool2d"))
def adaptive_max_pool2d(input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima over bins, of equal pixels the first in reading order as in PyTorch; indices are those of the whole."""
    x = check_image(input, "torch.nn.functional.adaptive_max_pool2d")
    size, image = _output_size(x, output_size), (x.shape[-2], x.shape[-1])
    F.adaptive_max_pool2d(torch.empty(x.shape, dtype=x.dtype, device="meta"), size)  # raises what PyTorch raises
    axes = tuple(axis for axis in (ROWS, COLS) if x.layout.dims[axis] is not None)
    comm, part = x.layout.grid.along(axes), owned_along(x, axes)
    rows, cols = (
        x.layout.owned[axis] if x.layout.dims[axis] is not None else Interval(0, image[axis - ROWS])
        for axis in (ROWS, COLS)
    )
    with torch.no_grad():
        found = []
        for i in range(size[0]):
            for j in range(size[1]):
                box = _bin(i, image[0], size[0]).intersect(rows), _bin(j, image[1], size[1]).intersect(cols)
                found.append(_first_in(part, box, (rows.start, cols.start), image[1]))
        shape = (*part.shape[:-2], *size)
        values, places = (torch.cat(list(each), -1).reshape(shape) for each in zip(*found, strict=True))
        # The last of what is no number is to come first.
        places = torch.where(values.isnan(), -1 - places, places)
        best, first = first_of(values, places, image[0] * image[1] + 1, comm)
        first = torch.where(first < 0, -1 - first, first)

    def hand_out(gradient: Tensor) -> Tensor:
        given = part.new_zeros(part.shape)
        if rows.empty or cols.empty:
            return given
        row, col = first // image[1] - rows.start, first % image[1] - cols.start
        mine = (row >= 0) & (row < rows.length) & (col >= 0) & (col < cols.length)
        index = (row * cols.length + col).where(mine, 0).flatten(-2)
        return given.flatten(-2).scatter_add_(-1, index, gradient.where(mine, 0).flatten(-2)).view(given.shape)

    layout = x.layout.with_dims((x.layout.dims[BATCH], None, None))
    y = wrap(take(part, best, hand_out, comm), layout)
    return (y, wrap(first, layout)) if return_indices else y


def _bin(number: int, pixels: int, bins: int) -> Interval:
    """The pixels of one of so many bins, which may overlap."""
    return Interval(number * pixels // bins, ceil_div((number + 1) * pixels, bins))


def _first_in(
    part: Tensor, box: tuple[Interval, Interval], corner: tuple[int, int], width: int
) -> tuple[Tensor, Tensor]:
    """The maximum over a box of rows and columns of a part that begins at `corner`, and its index in an image that is
    so wide: of equal ones the first, but of those that are no numbers the last, as PyTorch has it.
    """
    (rows, cols), shape = box, (*part.shape[:-2], 1, 1)
    if rows.empty or cols.empty:
        places = part.new_full(shape, NOWHERE, dtype=torch.int64)
        return part.new_full(shape, worst(part, maximum=True)), places
    block = part.narrow(-2, rows.start - corner[0], rows.length).narrow(-1, cols.start - corner[1], cols.length)
    values, places = F.adaptive_max_pool2d(block, 1, True)
    return values, (rows.start + places // cols.length) * width + cols.start + places % cols.length


@register(F.adaptive_max_pool2d_with_indices)
def adaptive_max_pool2d_with_indices(
    input: SpatialTensor, output_size: Any, return_indices: bool = False
) -> tuple[Tensor, Tensor]:
    return adaptive_max_pool2d(input, output_size, True)
