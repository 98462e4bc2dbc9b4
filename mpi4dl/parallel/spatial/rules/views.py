"""Views, and tensors joined to one: dims move about and the image's axes with them."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import Interval, Split
from mpi4dl.parallel.spatial.alignment import align, part
from mpi4dl.parallel.spatial.flattening import cuts_that_divide, regroup, regrouped
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather_axes, retile
from mpi4dl.parallel.spatial.redistribution import in_grid_of, redistribute
from mpi4dl.parallel.spatial.rules.indexing import numbers
from mpi4dl.parallel.spatial.rules.reductions import reduced_layout
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    copied,
    function_name,
    halo_sources_of,
    named,
    of_whole,
    place_of,
    refusal,
    register,
    with_halo_sources,
    wrap,
)


@register(*named("permute"), flat=True)
def permute(input: SpatialTensor, *dims: Any, **named_dims: Any) -> Tensor:
    order = tuple(place_of(d, input.dim()) for d in numbers(dims or tuple(named_dims.values())))
    return wrap(input.local.permute(order), _permuted(input.layout, order))


@register(*named("transpose", "swapaxes", "swapdims"), flat=True)
def transpose(input: SpatialTensor, dim0: int, dim1: int) -> Tensor:
    order = [*range(len(input.shape))]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return wrap(input.local.transpose(dim0, dim1), _permuted(input.layout, tuple(order)))


def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    return layout.cached((permute, order), lambda: layout.moved(order.index))


def reshape_local(x: SpatialTensor, shape: Sequence[int]) -> Tensor:
    """x in another shape of the whole: dims that become one carry their axes together, and part again.

    The result is a view of local data, unless an axis is cut within one new entry, such as a window of a transformer:
    first its cuts are moved. Where one of one pixel went among dims of one cannot be
    told: it is gathered, which is one pixel. A dim of several axes that becomes dims of other sizes than theirs is cut
    anew. All are gathered where an axis would begin within a dim.
    """
    key = (reshape_local, x.shape, *shape)
    local = x.layout.known(key)
    if local is not None:  # most calls: a view of what each rank has
        layout, shape = local
        return wrap(x.local.reshape(shape), layout)
    shape = list(shape)
    if -1 in shape:
        known = prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = x.numel() // known if known else 0
    if prod(shape) != x.numel():
        raise RuntimeError(f"shape {shape} is invalid for a tensor of shape {tuple(x.shape)}")
    if shape == list(x.shape):
        return wrap(x.local.reshape(x.local.shape), x.layout)
    grouped = regroup(x.layout, x.shape, shape)
    if grouped is not None:
        tiling = cuts_that_divide(x.layout, grouped)
        cut = retile(x, tiling)
        layout = regrouped(cut.layout, grouped)
        own = layout.local_shape(tuple(shape))
        y = wrap(cut.local.reshape(own), layout)
        if cut is not x:
            return copied(y, x)
        x.layout.cached(key, lambda: (layout.grid.intern(layout), own))
        return y
    anew = _cut_for(x, shape)
    if anew is not None:
        return copied(reshape_local(anew, shape), x)
    grid, pixels = x.layout.grid, x.layout.tiling.whole
    single = [axis for axis in grid.axes if x.layout.dims[axis] is not None and pixels[axis].length == 1]
    y = gather_axes(x, [axis for axis in single if grid.shape[axis] > 1] or grid.axes).reshape(shape)
    try:
        of_whole(x).view(shape)
    except RuntimeError:
        return y
    return copied(y, x)


def _cut_for(x: SpatialTensor, shape: Sequence[int]) -> SpatialTensor | None:
    """x with one of its flat dims cut so that it can become several dims; None if it is not that alone that changes."""
    for flat in x.layout.flat:
        dim, behind = flat.dim, x.dim() - flat.dim - 1
        around = (*shape[:dim], x.shape[dim], *shape[len(shape) - behind :])
        if len(shape) > x.dim() and around == tuple(x.shape):
            layout = in_grid_of(x.layout, dim, shape[dim : len(shape) - behind])
            if layout is not None and regroup(layout, x.shape, shape) is not None:
                return redistribute(x, layout)
    return None


@register(Tensor.view, Tensor.reshape, torch.reshape, flat=True)
def reshape(input: SpatialTensor, *shape: Any, **kwargs: Any) -> Tensor:
    if shape and isinstance(shape[0], torch.dtype):
        raise refusal("Tensor.view", "it reinterprets bytes")
    return reshape_local(input, numbers(shape) or numbers(tuple(kwargs.values())))


@register(*named("flatten"), flat=True)
def flatten(input: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    start, end = place_of(start_dim, input.dim()), place_of(end_dim, input.dim())
    shape = list(input.shape)
    return reshape_local(input, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@register(*named("unflatten"), flat=True)
def unflatten(input: SpatialTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    dim = place_of(dim, input.dim())
    shape, sizes = list(input.shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // prod(n for n in sizes if n != -1)
    return reshape_local(input, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@register(*named("unsqueeze"), flat=True)
def unsqueeze(input: SpatialTensor, dim: int) -> Tensor:
    dim, layout = place_of(dim, input.dim() + 1), input.layout
    moved = layout.cached((unsqueeze, dim), lambda: layout.moved(lambda d: d + (d >= dim)))
    return wrap(input.local.unsqueeze(dim), moved)


@register(*named("squeeze"), flat=True)
def squeeze(input: SpatialTensor, dim: Any = None) -> Tensor:
    wanted = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [place_of(d, input.dim()) for d in wanted if input.shape[d] == 1]
    if not ones:
        return input
    single = [axis for axis, d in enumerate(input.layout.dims) if d in ones and input.layout.cut(d)]
    if single:
        return copied(gather_axes(input, single).squeeze(tuple(ones)), input)
    return wrap(input.local.squeeze(tuple(ones)), reduced_layout(input.layout, ones, False))


@register(Tensor.expand, *named("broadcast_to"), flat=True)
def expand(input: SpatialTensor, *sizes: Any) -> Tensor:
    shape = numbers(sizes)
    new = len(shape) - input.dim()
    layout = input.layout.moved(lambda d: d + new)
    dims = ((axis, dim) for axis, dim in enumerate(layout.dims) if dim is not None)
    if grown := [axis for axis, dim in dims if shape[dim] not in (-1, input.shape[dim - new])]:
        return gather_axes(input, grown).expand(*shape)
    whole = [input.shape[d - new] if n == -1 else n for d, n in enumerate(shape)]
    return wrap(input.local.expand(layout.local_shape(tuple(whole))), layout)


# Tensors joined to one: along dims that are not cut each rank joins its parts, along the image each takes a share.


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

    Where several tensors are spread along the dim, every rank then has all of them but the first.
    """
    spread = [i for i, x in enumerate(tensors) if isinstance(x, SpatialTensor) and x.layout.axis(dim) is not None]
    middle = tensors[spread[0]]
    assert isinstance(middle, SpatialTensor)
    flat, layout = middle.layout.flat_at(dim), middle.layout
    if flat is None:
        return torch.cat([gather_axes(x, ()) for x in tensors], dim)
    before, after = tensors[: spread[0]], tensors[spread[0] + 1 :]
    beside = layout.with_dims(None if axis in layout.carried else known for axis, known in enumerate(layout.dims))
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
        return _along_image([gather_axes(x, ()) for x in tensors], dim)  # flat dims are not moved
    parts, layout = align(tensors, name)
    y = function(parts, dim)
    y = wrap(y, layout.moved(lambda d: d + (d >= dim)) if new else layout)
    return with_halo_sources(y, halo_sources_of(tensors))


@register(torch.cat, torch.concat, torch.concatenate, flat=True)
def cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Tensor:
    return _join(torch.cat, tensors, kwargs.get("axis", dim), new=False)


@register(torch.stack, flat=True)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _join(torch.stack, tensors, dim, new=True)
