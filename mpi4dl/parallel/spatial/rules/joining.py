"""Tensors joined to one: along dims that are not cut each rank joins its parts, along the image each takes a share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import Interval, Split
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather_axes, part
from mpi4dl.parallel.spatial.rules.pointwise import align
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    named,
    place_of,
    provided_by,
    providers_of,
    refusal,
    register,
    wrap,
)


def _along_image(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along an axis of the image, whose cuts are even then."""
    lead = next(x for x in tensors if isinstance(x, SpatialTensor) and x.layout.axis(dim) is not None)
    axis, grid = lead.layout.axis(dim), lead.layout.grid
    assert axis is not None
    tiling, parts, total = lead.layout.narrow.tiling, grid.shape[axis], sum(x.shape[dim] for x in tensors)
    output = Split.at([total * i // parts for i in range(parts + 1)])
    pieces, start = [], 0
    for x in tensors:
        place = Interval(start, start + x.shape[dim])
        needed = tuple(output.owned(i).intersect(place).shift(-start) for i in range(parts))
        known = x.layout.axis(dim) == axis if isinstance(x, SpatialTensor) else False
        cuts = x.layout.tiling.splits[axis].cuts if known else (0,) * parts + (x.shape[dim],)  # type: ignore[attr-defined]
        for other, size in enumerate(x.shape):
            if other != dim and size != lead.shape[other]:
                raise RuntimeError(
                    f"Sizes of tensors must match except in dimension {dim}. Expected size {lead.shape[other]} but "
                    f"got size {size} for a tensor in the list"
                )
        pieces.append(part(x, Layout(grid, tiling.replace(axis, Split(cuts, needed)), lead.layout.dims)))
        start = place.stop
    return wrap(torch.cat(pieces, dim), Layout(grid, tiling.replace(axis, output), lead.layout.dims))


def _along_flat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Entries that every rank has, such as a class token, in front of those that are spread, or behind them.

    Where several tensors are spread along the dim, all is gathered.
    """
    spread = [i for i, x in enumerate(tensors) if isinstance(x, SpatialTensor) and x.layout.axis(dim) is not None]
    middle = tensors[spread[0]]
    assert isinstance(middle, SpatialTensor)
    flat, layout = middle.layout.flat_at(dim), middle.layout
    if len(spread) > 1 or flat is None:
        return torch.cat([gather_axes(x, ()) if isinstance(x, SpatialTensor) else x for x in tensors], dim)
    before, after = tensors[: spread[0]], tensors[spread[0] + 1 :]
    carried = {factor.axis for each in layout.flat for factor in each.factors}
    beside = layout.with_dims(None if axis in carried else known for axis, known in enumerate(layout.dims))
    local = torch.cat([*(part(x, beside) for x in before), middle.local, *(part(x, beside) for x in after)], dim)
    longer = flat._replace(
        prefix=flat.prefix + sum(x.shape[dim] for x in before), suffix=flat.suffix + sum(x.shape[dim] for x in after)
    )
    return wrap(local, replace(layout, flat=tuple(longer if each == flat else each for each in layout.flat)))


def _join(function: Any, tensors: Sequence[Tensor], dim: int, new: bool) -> Tensor:
    name = function_name(function)
    ndim = max(x.dim() for x in tensors) + (1 if new else 0)
    dim = place_of(dim, ndim)
    tensors = [x for x in tensors if x.shape != (0,)]
    if not new and any(isinstance(x, SpatialTensor) and x.layout.flat_at(dim) for x in tensors):
        return _along_flat(tensors, dim)
    if not new and any(isinstance(x, SpatialTensor) and x.layout.axis(dim) is not None for x in tensors):
        return _along_image(tensors, dim)
    parts, layout = align(tensors, name)
    y = function(parts, dim)
    y = wrap(y, layout.moved(lambda d: d + (d >= dim)) if new else layout)
    return provided_by(y, providers_of(tensors))


@register(torch.cat, torch.concat, torch.concatenate, flat=True)
def cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Tensor:
    if kwargs.get("out") is not None:
        raise refusal("torch.cat", "it was given out=")
    return _join(torch.cat, tensors, kwargs.get("axis", dim), new=False)


@register(torch.stack, flat=True)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.stack, tensors, dim, new=True)


@register(*named("diff"))
def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along a dim, n times."""
    ends = [x for x in (prepend, input, append) if x is not None]
    x = torch.cat(ends, dim) if len(ends) > 1 else input
    for _ in range(n):
        length = x.shape[dim] - 1
        after, before = x.narrow(dim, 1, length), x.narrow(dim, 0, length)
        x = after ^ before if x.dtype == torch.bool else after - before
    return x


def _beside(dim: int, at_least: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def rule(tensors: Sequence[Tensor]) -> Tensor:
        shaped = [at_least(x) for x in tensors]
        return torch.cat(shaped, 0 if shaped[0].dim() == 1 else dim)

    return rule


def _at_least(ndim: int) -> Callable[[Tensor], Tensor]:
    """(n) as a row (1, n), and that as an image (1, n, 1): as torch.atleast_2d and torch.atleast_3d have it."""

    def reshape(x: Tensor) -> Tensor:
        x = x.reshape(1) if x.dim() == 0 else x
        x = x.unsqueeze(0) if x.dim() < min(ndim, 2) else x
        return x.unsqueeze(-1) if x.dim() < ndim else x

    return reshape


for dim, names, ndim in ((1, ("hstack",), 1), (0, ("vstack", "row_stack"), 2), (2, ("dstack",), 3)):
    for function in named(*names):
        register(function)(_beside(dim, _at_least(ndim)))


@register(*named("column_stack"))
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors], 1)
