"""Adaptive pooling: means and maxima over bins of rows and columns, which every rank then has in full."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator, collectives
from mpi4dl.geometry import BATCH, COLS, ROWS
from mpi4dl.parallel.spatial.grid import Dims
from mpi4dl.parallel.spatial.rules.reductions import agree_on_extremum, mean, owned_along
from mpi4dl.parallel.spatial.rules.windows import check_image
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap


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
            start, stop = i * pixels // count, -(-(i + 1) * pixels // count)
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
def adaptive_max_pool2d(input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Tensor:
    """Maxima over bins. Of equal pixels the first in reading order gets the gradient, as in PyTorch."""
    if return_indices:
        raise refusal(
            "torch.nn.functional.adaptive_max_pool2d(return_indices=True)", "indices would count within a tile"
        )
    x = check_image(input, "torch.nn.functional.adaptive_max_pool2d")
    rows, cols = _output_size(x, output_size)
    axes = tuple(axis for axis in (ROWS, COLS) if x.layout.dims[axis] is not None)
    part = owned_along(x, axes)
    comm = x.layout.grid.along(axes)
    height, width = x.shape[-2], x.shape[-1]
    mine = [
        x.layout.owned[axis] if x.layout.dims[axis] is not None else (0, x.shape[axis - 3]) for axis in (ROWS, COLS)
    ]
    top, left = mine[0][0], mine[1][0]
    results = []
    for i in range(rows):
        for j in range(cols):
            r0, r1 = max(i * height // rows, top), min(-(-(i + 1) * height // rows), mine[0][1])
            c0, c1 = max(j * width // cols, left), min(-(-(j + 1) * width // cols), mine[1][1])
            block = part[..., max(r0 - top, 0) : max(r1 - top, 0), max(c0 - left, 0) : max(c1 - left, 0)]
            results.append(_first_maximum(block, (r0, c0), width, comm))
    y = torch.stack(results, -1).reshape(*x.local.shape[:-2], rows, cols)
    return wrap(y, x.layout.with_dims((x.layout.dims[BATCH], None, None)))


@register(F.adaptive_max_pool2d_with_indices)
def adaptive_max_pool2d_with_indices(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    return adaptive_max_pool2d(input, 1, return_indices=True)


def _first_maximum(block: Tensor, corner: tuple[int, int], width: int, comm: Communicator) -> Tensor:
    """The maximum over the last two dims of all ranks' blocks, taken from the first pixel that has it."""
    flat = block.flatten(-2)
    none = torch.iinfo(torch.int64).max
    with torch.no_grad():
        if flat.shape[-1]:
            value, at = flat.max(-1)
            row, col = at // block.shape[-1] + corner[0], at % block.shape[-1] + corner[1]
            position = row * width + col
        else:
            value = flat.new_full(flat.shape[:-1], float("-inf"))
            position = torch.full(flat.shape[:-1], none, dtype=torch.int64, device=flat.device)
        best = agree_on_extremum(value, comm, "max")
        strange = best.isnan()
        position = torch.where(value == best, position, none)
        winner = comm.all_reduce(position.clone(), "min") == position
    if not flat.shape[-1]:
        total = collectives.all_reduce(flat.sum(-1), comm)
    else:
        mine = flat.gather(-1, at.unsqueeze(-1)).squeeze(-1)
        total = collectives.all_reduce(torch.where(winner, mine, 0), comm)
    return torch.where(strange, float("nan"), total)
