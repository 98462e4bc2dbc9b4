"""Adaptive pooling: means and maxima over bins of pixels, which every rank then has in full. In 1, 2 and 3 dims."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import collectives
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.rules.extrema import NOWHERE, first_of, take, worst
from mpi4dl.parallel.spatial.rules.reductions import mean, owned_along
from mpi4dl.parallel.spatial.rules.windows import axes_of, check_image, flat_index, places_of
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register, wrap


def _means(count: int, input: SpatialTensor, output_size: Any) -> Tensor:
    """Means over bins; the result is small, and every rank has all of its pixels."""
    input = check_image(input, f"torch.nn.functional.adaptive_avg_pool{count}d", count, True)
    size = _output_size(input, output_size, count)
    if set(size) == {1}:
        return mean(input, tuple(range(-count, 0)), True)
    return _over_bins(input, _bins(input, size))


def _output_size(x: Tensor, asked: Any, count: int) -> tuple[int, ...]:
    sizes = (asked,) * count if isinstance(asked, int) or asked is None else tuple(asked)
    return tuple(n if size is None else size for n, size in zip(x.shape[-count:], sizes, strict=True))


def _mine(x: SpatialTensor, count: int) -> list[Interval]:
    """What this rank owns along each of the last dims."""
    sizes = zip(axes_of(x, count), x.shape[-count:], strict=True)
    return [Interval(0, pixels) if axis is None else x.layout.owned[axis] for axis, pixels in sizes]


def _bins(x: SpatialTensor, size: Sequence[int]) -> list[Tensor]:
    """For each of the last dims, the weight (bins, owned) of each owned pixel in each bin's mean."""
    weights = []
    for pixels, count, mine in zip(x.shape[-len(size) :], size, _mine(x, len(size)), strict=True):
        weight = torch.zeros(count, pixels, dtype=_wide_dtype(x), device=x.device)
        for i in range(count):
            start, stop = _bin(i, pixels, count)
            weight[i, start:stop] = 1 / (stop - start)
        weights.append(weight[:, slice(*mine)])
    return weights


def _wide_dtype(x: Tensor) -> torch.dtype:
    """What to add up in: not in 16 bits, as PyTorch does not either."""
    return torch.float32 if x.itemsize < 4 else x.dtype


def _axes(x: SpatialTensor, count: int) -> tuple[int, ...]:
    return tuple(axis for axis in axes_of(x, count) if axis is not None)


def _pooled(layout: Layout, axes: Sequence[int]) -> Layout:
    return layout.with_dims(None if axis in axes else dim for axis, dim in enumerate(layout.dims))


def _over_bins(x: SpatialTensor, weights: list[Tensor]) -> Tensor:
    axes = _axes(x, len(weights))
    with torch.autocast(x.device.type, enabled=False) if not x.is_meta else nullcontext():
        y = owned_along(x, axes).to(weights[0].dtype) @ weights[-1].mT
        for after, weight in enumerate(reversed(weights[:-1]), 1):  # so many dims come after this one
            rest = y.shape[-after:]
            y = (weight @ y.reshape(*y.shape[:-after], math.prod(rest))).view(
                *y.shape[: -after - 1], len(weight), *rest
            )
    if any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = collectives.all_reduce(y, x.layout.grid.along(axes))
    return wrap(y.to(x.dtype), _pooled(x.layout, axes))


def _maxima(count: int, input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    """Maxima over bins, of equal pixels the first in reading order as in PyTorch; indices are those of the whole."""
    x = check_image(input, f"torch.nn.functional.adaptive_max_pool{count}d", count, True)
    size, image = _output_size(x, output_size, count), x.shape[-count:]
    pool = getattr(F, f"adaptive_max_pool{count}d")
    pool(torch.empty(x.shape, dtype=x.dtype, device="meta"), size)  # raises what PyTorch raises
    axes = _axes(x, count)
    comm, part, mine = x.layout.grid.along(axes), owned_along(x, axes), _mine(x, count)
    with torch.no_grad():
        found = []
        for numbers in product(*map(range, size)):
            bins = [_bin(*of_axis).intersect(span) for *of_axis, span in zip(numbers, image, size, mine, strict=True)]
            found.append(_first_in(pool, part, bins, mine, image))
        shape = (*part.shape[:-count], *size)
        values, places = (torch.cat(list(each), -1).reshape(shape) for each in zip(*found, strict=True))
        # The last of what is no number is to come first.
        places = torch.where(values.isnan(), -1 - places, places)
        best, first = first_of(values, places, math.prod(image) + 1, comm)
        first = torch.where(first < 0, -1 - first, first)

    def hand_out(gradient: Tensor) -> Tensor:
        given = part.new_zeros(part.shape)
        if any(span.empty for span in mine):
            return given
        here = [at - span.start for at, span in zip(places_of(first, image), mine, strict=True)]
        inside = torch.ones_like(first, dtype=torch.bool)
        for at, span in zip(here, mine, strict=True):
            inside &= (at >= 0) & (at < span.length)
        index = flat_index(here, [span.length for span in mine]).where(inside, 0).flatten(-count)
        values = gradient.where(inside, 0).flatten(-count)
        return given.flatten(-count).scatter_add_(-1, index, values).view(given.shape)

    layout = _pooled(x.layout, axes)
    y = wrap(take(part, best, hand_out, comm), layout)
    return (y, wrap(first, layout)) if return_indices else y


def _bin(number: int, pixels: int, bins: int) -> Interval:
    """The pixels of one of so many bins, which may overlap."""
    return Interval(number * pixels // bins, ceil_div((number + 1) * pixels, bins))


def _first_in(
    pool: Any, part: Tensor, bins: Sequence[Interval], mine: Sequence[Interval], image: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The maximum over a box of this rank's part of an image, and its index there: of equal ones the first, but of
    those that are no numbers the last, as PyTorch has it.
    """
    count = len(bins)
    shape = (*part.shape[:-count], *(1,) * count)
    if any(span.empty for span in bins):
        places = part.new_full(shape, NOWHERE, dtype=torch.int64)
        return part.new_full(shape, worst(part, maximum=True)).flatten(-count), places.flatten(-count)
    block = part
    for dim, (span, own) in enumerate(zip(bins, mine, strict=True), -count):
        block = block.narrow(dim, span.start - own.start, span.length)
    values, places = pool(block, 1, True)
    at = [place + span.start for place, span in zip(places_of(places, block.shape[-count:]), bins, strict=True)]
    return values.flatten(-count), flat_index(at, image).flatten(-count)


def _maxima_with_indices(count: int, input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    return _maxima(count, input, output_size, True)


for count in (1, 2, 3):
    register(*named(f"adaptive_avg_pool{count}d"))(partial(_means, count))
    register(getattr(F, f"adaptive_max_pool{count}d"))(partial(_maxima, count))
    register(getattr(F, f"adaptive_max_pool{count}d_with_indices"))(partial(_maxima_with_indices, count))
register(torch.adaptive_max_pool1d)(partial(_maxima_with_indices, 1))
