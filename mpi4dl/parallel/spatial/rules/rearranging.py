"""Rows in another order: rolled, flipped, repeated, chosen by a list. Each rank fetches what its part shows.

roll by 2 over 3 ranks      x       a b c | d e f | g h i       "b c" and "a" are not one run of rows: around the
                            y       h i a | b c d | e f g        widest jump a part is fetched as two
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import Interval, Split
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import without_flat_dims
from mpi4dl.parallel.spatial.rules.reductions import normalize_dims, reduced_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, copied, named, place_of, refusal, register, wrap


def numbers(arguments: Sequence[Any]) -> list[int]:
    """f(1, 2) and f((1, 2)) alike."""
    first = arguments[0] if arguments else ()
    return list(first) if len(arguments) == 1 and not isinstance(first, int) else list(arguments)


def _hull(rows: Sequence[int]) -> Interval:
    return Interval(min(rows), max(rows) + 1) if rows else Interval(0, 0)


def _widest_jump(rows: Sequence[int]) -> int:
    """Where to part a sequence of rows so that both sides have tight hulls; its length where that gains nothing."""
    jumps = [abs(b - a) for a, b in pairwise(rows)]
    if not jumps or max(jumps) == 1:
        return len(rows)
    at = jumps.index(max(jumps)) + 1
    apart = _hull(rows[:at]).length + _hull(rows[at:]).length
    return at if apart < _hull(rows).length else len(rows)


def pick(x: SpatialTensor, dim: int, sources: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """y, whose row i along an axis of the image is row sources[i] of x; `cuts` are those of y."""
    layout, axis = x.layout, x.layout.axis(dim)
    assert axis is not None
    split, output = layout.tiling.splits[axis], Split.at(cuts)
    shown = [sources[slice(*output.owned(i))] for i in range(split.parts)]
    partings = [_widest_jump(rows) for rows in shown]
    sides = [[rows[:at] for rows, at in zip(shown, partings, strict=True)]]
    if any(at < len(rows) for rows, at in zip(shown, partings, strict=True)):
        sides.append([rows[at:] for rows, at in zip(shown, partings, strict=True)])
    mine, pieces = layout.grid.coordinates[axis], []
    for side in sides:
        needed = tuple(_hull(rows) for rows in side)
        tiling = layout.narrow.tiling.replace(axis, Split(split.cuts, needed))
        fetched = layout.exchange_to(tiling)(x.local)
        if list(side[mine]) != list(range(*needed[mine])):
            index = torch.tensor(side[mine], dtype=torch.int64, device=fetched.device) - needed[mine].start
            fetched = fetched.index_select(dim, index)
        pieces.append(fetched)
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return wrap(y, replace(layout, tiling=layout.narrow.tiling.replace(axis, output)))


def choose(x: SpatialTensor, dim: int, index: Sequence[int]) -> Tensor:
    """The rows of x, along any dim, that `index` names, from 0 or, negative, from the end; cut in x's proportions."""
    size = x.shape[dim]
    outside = [row for row in index if not -size <= row < size]
    if outside:
        raise IndexError(f"index {outside[0]} is out of bounds for dimension {dim} with size {size}")
    axis, sources = x.layout.axis(dim), [row % size for row in index]
    if axis is None:
        return wrap(x.local.index_select(dim, torch.tensor(sources, dtype=torch.int64, device=x.device)), x.layout)
    cuts = [cut * len(sources) // max(size, 1) for cut in x.layout.tiling.splits[axis].cuts]
    return pick(x, dim, sources, [*cuts[:-1], len(sources)])


@register(*named("roll"))
def roll(input: SpatialTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    over = [dims] if isinstance(dims, int) else list(dims or ())
    if not over:
        return torch.roll(input.flatten(), shifts).view(input.shape)
    if len(by) != len(over):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(by)}, dims:{len(over)}")
    x: Tensor = input
    for shift, dim in zip(by, (place_of(d, input.dim()) for d in over), strict=True):
        size = x.shape[dim]
        axis = x.layout.axis(dim) if isinstance(x, SpatialTensor) else None
        if not isinstance(x, SpatialTensor):
            x = torch.roll(x, shift, dim)
        elif axis is None:
            x = wrap(torch.roll(x.local, shift, dim), x.layout)
        else:
            x = pick(x, dim, [(row - shift) % size for row in range(size)], x.layout.tiling.splits[axis].cuts)
    return x


@register(*named("flip"))
def flip(input: SpatialTensor, *dims: Any, **named_dims: Any) -> Tensor:
    given = numbers(dims or tuple(named_dims.values()))
    over = normalize_dims(input, given) if given else ()
    local = [dim for dim in over if input.layout.axis(dim) is None]
    x = wrap(input.local.flip(local), input.layout)
    for dim in over:
        axis = input.layout.axis(dim)
        if axis is not None:
            assert isinstance(x, SpatialTensor)
            x = pick(x, dim, range(x.shape[dim])[::-1], x.layout.tiling.splits[axis].cuts)
    return x


@register(*named("fliplr"))
def fliplr(input: SpatialTensor) -> Tensor:
    return input.flip(1)


@register(*named("flipud"))
def flipud(input: SpatialTensor) -> Tensor:
    return input.flip(0)


@register(*named("rot90"))
def rot90(input: SpatialTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    if k % 4 == 2:
        return input.flip(first, second)
    if k % 2 == 0:
        return input.clone()
    return input.flip(second if k % 4 == 1 else first).transpose(first, second)


def repeat_by(x: Tensor, times: Sequence[int]) -> Tensor:
    """x beside itself, `times` for each dim, of which there may be more than x has."""
    while x.dim() < len(times):
        x = x.unsqueeze(0)
    if not isinstance(x, SpatialTensor):
        return x.repeat(*times)
    spread = [dim for dim, n in enumerate(times) if n != 1 and x.layout.axis(dim) is not None]
    y = wrap(x.local.repeat([1 if dim in spread else n for dim, n in enumerate(times)]), x.layout)
    for dim in spread:
        axis = x.layout.axis(dim)
        assert axis is not None
        assert isinstance(y, SpatialTensor)
        cuts = [cut * times[dim] for cut in y.layout.tiling.splits[axis].cuts]
        y = pick(y, dim, list(range(y.shape[dim])) * times[dim], cuts)
    return y


@register(Tensor.repeat)
def repeat(input: SpatialTensor, *sizes: Any, **named_sizes: Any) -> Tensor:
    times = numbers(sizes or tuple(named_sizes.values()))
    if len(times) < input.dim():
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor: "
            f"{times} for shape {tuple(input.shape)}"
        )
    return repeat_by(input, times)


@register(*named("tile"))
def tile(input: SpatialTensor, *dims: Any, **named_dims: Any) -> Tensor:
    times = numbers(dims or tuple(named_dims.values()))
    return repeat_by(input, [1] * (input.dim() - len(times)) + times)


@register(*named("repeat_interleave"))
def repeat_interleave(
    input: Tensor, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if isinstance(repeats, SpatialTensor):
        raise refusal("torch.repeat_interleave", "how often is spread over ranks")
    x = without_flat_dims(input.flatten()) if dim is None else input
    dim = 0 if dim is None else place_of(dim, x.dim())
    if not isinstance(x, SpatialTensor):
        return torch.repeat_interleave(x, repeats, dim, output_size=output_size)
    axis = x.layout.axis(dim)
    if axis is None:
        return wrap(torch.repeat_interleave(x.local, repeats, dim, output_size=output_size), x.layout)
    size = x.shape[dim]
    times = [repeats] * size if isinstance(repeats, int) else repeats.expand(size).tolist()
    ends = [0, *accumulate(times)]
    sources = [row for row, n in enumerate(times) for _ in range(n)]
    return pick(x, dim, sources, [ends[cut] for cut in x.layout.tiling.splits[axis].cuts])


def one_row(x: SpatialTensor, dim: int, index: int) -> Tensor:
    """Row `index` along a dim that is cut, on every rank, without that dim."""
    axis, size = x.layout.axis(dim), x.shape[dim]
    assert axis is not None
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {size}")
    row = Interval(index % size, index % size + 1)
    split = x.layout.tiling.splits[axis]
    tiling = x.layout.tiling.replace(axis, Split(split.cuts, (row,) * split.parts))
    local = x.layout.exchange_to(tiling)(x.local).select(dim, 0)
    return copied(wrap(local, reduced_layout(Layout(x.layout.grid, tiling, x.layout.dims), [dim], False)), x)
