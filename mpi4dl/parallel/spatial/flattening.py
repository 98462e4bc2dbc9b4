"""Dims that several axes became: how they are opened again, so that each axis is a dim of its own, and closed.

(N, C, H, W)  --reshape-->  (N, C, H * W)          the layout says (rows, cols) of the last dim; a rank's part is
  rank's box                its flattened box       the flattening of its box, and nothing is sent

reshape works on the factors that all dims are made of: it groups them anew. Within a dim an axis takes what
follows it as its own: H / w windows of w rows are H rows again, cut where the windows were.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.exchange import narrow
from mpi4dl.geometry import Box, Split, Tiling
from mpi4dl.parallel.spatial.grid import Factor, Flat, Layout


class Unlike(Exception):
    """Operands that have several axes in one dim, and not alike: with these gathered they can be what they are."""


class Regrouped(NamedTuple):
    """The layout of a tensor in another shape, and how it is to be cut before that, if ranks cannot share it as it is.

    `scales`: of each axis the numbers by which its splits are multiplied and divided.
    """

    groups: tuple[Flat, ...]
    scales: dict[int, tuple[int, int]]


def regroup(layout: Layout, shape: Sequence[int], target: Sequence[int]) -> Regrouped | None:
    """How a tensor of this global shape is made of the same factors in shape `target`; None if it cannot be told.

    It cannot where a cut axis would begin within a dim, and of cut axes of one pixel among what changes. One that is
    not cut is then no axis any more. A dim with entries that every rank has stays as it is.
    """
    uncut = [axis for axis in layout.grid.axes if layout.grid.shape[axis] == 1]
    return _regroup(layout, shape, target, []) or _regroup(layout, shape, target, uncut)


def _regroup(layout: Layout, shape: Sequence[int], target: Sequence[int], ordinary: list[int]) -> Regrouped | None:
    """The same, with these axes as ordinary entries."""
    both = min(len(shape), len(target))
    lead = next((i for i in range(both) if shape[i] != target[i]), both)  # so many dims, and so many last, stay
    last = next((i for i in range(both - lead) if shape[-1 - i] != target[-1 - i]), both - lead)
    inner = range(lead, len(shape) - last)
    pending = _factors(layout, shape, inner, ordinary)
    if any(size < 2 for _, size in pending):
        return None
    scales: dict[int, tuple[int, int]] = {}
    groups = [_as_it_is(layout, dim, shape[dim]) for dim in range(lead)]
    for size in target[lead : len(target) - last]:
        found: list[tuple[int | None, int]] = []
        left = size
        while left > 1:
            if not pending:
                return None
            axis, first = pending.pop(0)
            if isinstance(axis, Flat):
                if left != first or found:
                    return None
                groups.append(axis)
                break
            if left % first == 0:
                found.append((axis, first))
                left //= first
            elif first % left == 0:  # the first so many entries of it; what each is made of comes after
                axis = axis if axis is not None and layout.grid.shape[axis] > 1 else None
                found.append((axis, left))
                pending.insert(0, (None, first // left))
                if axis is not None:
                    times, by = scales.get(axis, (1, 1))
                    scales[axis] = times, by * (first // left)
                left = 1
            else:
                return None
        else:
            groups.append(_joined(layout, found, scales))
    groups += [_as_it_is(layout, dim, shape[dim]) for dim in range(inner.stop, len(shape))]
    return None if pending else Regrouped(tuple(groups), scales)


def _as_it_is(layout: Layout, dim: int, size: int) -> Flat:
    axis = layout.axis(dim)
    return layout.flat_at(dim) or Flat(dim, (Factor(axis, 0 if axis is not None else size),))


def _factors(
    layout: Layout, shape: Sequence[int], dims: Iterable[int], ordinary: list[int]
) -> list[tuple[int | Flat | None, int]]:
    """The factors of these dims, in order, with sizes: axes, ordinary entries, and flat dims that stay whole."""
    found: list[tuple[int | Flat | None, int]] = []
    for dim in dims:
        flat, axis, size = layout.flat_at(dim), layout.axis(dim), shape[dim]
        if flat is not None and flat.copies:
            found.append((flat, size))
        elif flat is not None:
            sizes = flat.sizes(layout.tiling.whole)
            found += [(factor.axis, n) for factor, n in zip(flat.factors, sizes, strict=True)]
        else:
            found.append((axis, size))
    merged: list[tuple[int | Flat | None, int]] = []
    for part, size in found:
        single = size == 1 and isinstance(part, int) and layout.grid.shape[part] == 1
        if part is not None and part not in ordinary and not single:
            merged.append((part, size))
        elif merged and merged[-1][0] is None:
            merged[-1] = None, merged[-1][1] * size
        elif size != 1:
            merged.append((None, size))
    return merged


def _joined(layout: Layout, found: list[tuple[int | None, int]], scales: dict[int, tuple[int, int]]) -> Flat:
    """The factors of a dim, with what follows an axis, or an ordinary factor, joined to it."""
    if len(found) > 1:  # of an axis that is not cut every rank has all
        found = [(axis if axis is not None and layout.grid.shape[axis] > 1 else None, n) for axis, n in found]
    group: list[Factor] = []
    for axis, size in found:
        if axis is None and group:
            last = group[-1]
            if last.axis is None:
                group[-1] = Factor(None, last.size * size)
            else:
                times, by = scales.get(last.axis, (1, 1))
                scales[last.axis] = times * size, by
        else:
            group.append(Factor(axis, 0 if axis is not None else size))
    return Flat(0, tuple(group) or (Factor(None, 1),))


def cuts_that_divide(layout: Layout, found: Regrouped) -> Tiling:
    """The tiling in which ranks can share a tensor of `layout` so: no halos, cut where entries of the new shape end."""
    tiling = layout.tiling
    flat = {axis for group in found.groups if len(group.factors) > 1 for axis in group.axes}
    for axis in layout.grid.axes:
        if axis in flat or axis in found.scales:
            split, (_, by) = tiling.splits[axis], found.scales.get(axis, (1, 1))
            inner = (min(split.size, (cut + by // 2) // by * by) for cut in split.cuts[1:-1])
            tiling = tiling.replace(axis, Split.at([0, *inner, split.size]))
    return tiling


def regrouped(layout: Layout, found: Regrouped) -> Layout:
    """The layout in the new shape, of a tensor whose cuts divide already."""
    tiling = layout.tiling
    for axis, (times, by) in found.scales.items():
        tiling = tiling.replace(axis, Split.at([cut // by * times for cut in tiling.splits[axis].cuts]))
    dims: list[int | None] = [None] * len(layout.dims)
    flats = []
    for dim, group in enumerate(found.groups):
        for axis in group.axes:
            dims[axis] = dim
        if len(group.factors) > 1 or group.copies:
            flats.append(group._replace(dim=dim))
    for axis, known in enumerate(layout.dims):
        if known is not None and dims[axis] is None:
            tiling = tiling.drop(axis)
    return Layout(layout.grid, tiling, tuple(dims), tuple(flats))


def opened(layout: Layout) -> Layout:
    """The layout in which each axis of a flat dim is a dim of its own; without the entries that every rank has."""
    dims = list(layout.dims)
    for axis, dim in enumerate(layout.dims):
        if dim is not None:
            flat = layout.flat_at(dim)
            within = flat.factors.index(Factor(axis)) if flat is not None and axis in flat.axes else 0
            dims[axis] = dim + within + sum(len(other.factors) - 1 for other in layout.flat if other.dim < dim)
    return replace(layout, dims=tuple(dims), flat=())


def between_copies(x: Tensor, flat: Flat, dim: int | None = None) -> Tensor:
    """Of a tensor with this flat dim, which may be another `dim` of it, what is between the entries of every rank."""
    dim = flat.dim if dim is None else dim
    return x.narrow(dim, flat.prefix, x.shape[dim] - flat.copies) if flat.copies else x


def among_copies(rest: Tensor, copies: Tensor, flat: Flat, dim: int | None = None) -> Tensor:
    """The way back: `rest` between the entries that every rank has, which are the first and the last of `copies`."""
    dim = flat.dim if dim is None else dim
    if not flat.copies:
        return rest
    first, last = (copies.narrow(dim, start, n) for start, n in copies_in(copies.shape[dim], flat))
    return torch.cat([first, rest, last], dim)


def copies_of(x: Tensor, flat: Flat) -> Tensor:
    """Of a tensor with this flat dim the entries that every rank has, in one."""
    return torch.cat([x.narrow(flat.dim, start, n) for start, n in copies_in(x.shape[flat.dim], flat)], flat.dim)


def copies_in(size: int, flat: Flat) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where in a dim of so many entries those are that every rank has: twice a start, and how many."""
    return (0, flat.prefix), (size - flat.suffix, flat.suffix)


def open_dims(x: Tensor, layout: Layout, box: Box) -> Tensor:
    """This box of a tensor of that layout, with a dim for each axis, without the entries that every rank has."""
    for flat in sorted(layout.flat, reverse=True):
        x = between_copies(x, flat).unflatten(flat.dim, flat.sizes(box))
    return x


def close_dims(x: Tensor, layout: Layout, box: Box) -> Tensor:
    """The way back, still without the entries that every rank has."""
    for flat in sorted(layout.flat):
        sizes = flat.sizes(box)
        x = x.reshape(*x.shape[: flat.dim], prod(sizes), *x.shape[flat.dim + len(sizes) :])
    return x


def part_along(x: Tensor, dim: int, layout: Layout, flat: Flat) -> Tensor:
    """Of a plain tensor whose `dim` is whole, this rank's part of it as of the flat one."""
    whole = layout.tiling.whole
    axes = [factor.axis for factor in flat.factors]
    rest = between_copies(x, flat, dim).unflatten(dim, flat.sizes(whole))
    where = [dim + axes.index(axis) if axis in axes else None for axis in range(len(layout.dims))]
    rest = narrow(rest, where, whole, layout.held)
    rest = rest.flatten(dim, dim + len(axes) - 1)
    return among_copies(rest, x, flat, dim)


def cut_out(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's part, by its layout, of a tensor that it has whole."""
    for flat in layout.flat:
        whole = part_along(whole, flat.dim, layout, flat)
    carried = {flat.dim for flat in layout.flat}
    dims = [None if dim in carried else dim for dim in layout.dims]
    return narrow(whole, dims, layout.tiling.whole, layout.held)
