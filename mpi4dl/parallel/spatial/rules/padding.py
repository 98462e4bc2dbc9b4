"""Padding in every mode; negative padding crops."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange, ExchangePlan, Slab
from mpi4dl.geometry import BATCH, Box, Split, Tiling, Window
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather_axes, plan_halo
from mpi4dl.parallel.spatial.rules.indexing import choose
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap


@register(*named("pad"), flat=True)
def pad_image(input: SpatialTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    if input.layout.flat:
        return _pad_flat(input, pad, mode, value)
    last = input.local.dim() - 1
    amounts = {last - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    x: Tensor = input
    if mode != "constant":
        x = in_plain_dtype(input, lambda image: F.pad(image, (1,) * len(pad), mode), len(pad) // 2)
    if not any(pad):
        return x.clone()
    assert isinstance(x, SpatialTensor)
    if mode != "constant":
        ordinary = {dim: pair for dim, pair in amounts.items() if x.layout.axis(dim) is None}
        amounts = {dim: pair for dim, pair in amounts.items() if dim not in ordinary}
        for dim, pair in ordinary.items():
            x = choose(x, dim, _sources(x.shape[dim], *pair, mode))
            assert isinstance(x, SpatialTensor)
        if not any(any(pair) for pair in amounts.values()):
            return x
    if mode == "circular":
        return _repeated(x, amounts)
    edges = _at_edges(x, amounts, mode, value)
    if edges is not None:
        return edges
    for dim, (before, after) in amounts.items():
        if before or after:
            assert isinstance(x, SpatialTensor)
            x = _pad_dim(x, dim, before, after, mode, value)
    return x


def _pad_flat(x: SpatialTensor, pad: Sequence[int], mode: str, value: float | None) -> Tensor:
    """Beside the entries of flat dims every rank has those that are added; where they are no constants, or the pad
    crops, all is gathered.
    """
    last = x.dim() - 1
    amounts = {last - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    if mode != "constant" or min(pad, default=0) < 0:
        return F.pad(gather_axes(x, ()), pad, mode, value)
    y: Tensor = x
    for dim, (before, after) in amounts.items():
        shape = list(y.shape)
        sides = []
        for amount in (before, after):
            shape[dim] = amount
            sides.append(x.local.new_full((1,) * x.dim(), value or 0).expand(shape))
        y = torch.cat([sides[0]] * (before > 0) + [y] + [sides[1]] * (after > 0), dim) if before or after else y
    return y.clone() if y is x else y


def _pad_dim(x: SpatialTensor, dim: int, before: int, after: int, mode: str, value: float | None) -> Tensor:
    axis = _axis(x, dim, mode)
    if axis is None:
        amounts = [0, 0] * (x.dim() - 1 - dim) + [before, after]
        return wrap(F.pad(x.local, amounts, mode, value), x.layout)
    window = Window(1, 1, before, after)
    if x.shape[dim] + before + after < 1:
        raise RuntimeError(f"padding of ({before}, {after}) leaves nothing of {x.shape[dim]} pixels along dim {dim}")
    if mode == "constant" or (before <= 0 and after <= 0):
        halo_plan = plan_halo(x, {axis: window}, float(value or 0.0))
        local = halo_plan.fetch(x.local)
        return wrap(local.clone() if halo_plan.exchange is None else local, halo_plan.output)
    if mode not in ("reflect", "replicate"):
        raise refusal("torch.nn.functional.pad", f"mode {mode!r}")
    sources = _sources(x.shape[dim], before, after, mode)
    return choose(x, dim, sources, lambda cut: min(max(cut + before, 0), len(sources)))


def _axis(x: SpatialTensor, dim: int, mode: str) -> int | None:
    """The axis of a dim that is padded, None if that is an ordinary one."""
    axis = x.layout.axis(dim)
    if axis == BATCH:
        raise refusal("torch.nn.functional.pad", "a batch that is cut cannot be padded")
    if axis is None and mode != "constant":
        raise refusal("torch.nn.functional.pad", f"mode {mode!r} along dim {dim}, which is no axis of space")
    return axis


def _check_limit(amount: int, limit: int, size: int, mode: str) -> None:
    if amount > limit:
        raise ValueError(f"padding of {amount} in mode {mode!r} must be at most {limit} for {size} pixels")


def _at_edges(
    x: SpatialTensor, amounts: Mapping[int, tuple[int, int]], mode: str, value: float | None
) -> Tensor | None:
    """PyTorch's own operator on each part at the edges of the image, if no part needs rows of another."""
    constant, layout, local = mode == "constant", x.layout, x.local
    ndim = local.dim()
    count = len(amounts) if constant else max(len(amounts), ndim - 2)  # of the last dims
    around = [0] * (2 * count)
    if layout.wide or (not constant and (ndim < 3 or 0 in layout.tiling.size)):
        return None
    for dim, (before, after) in amounts.items():
        axis = layout.axis(dim)
        place = 2 * (ndim - 1 - dim)
        if not (before or after):
            continue
        if axis is None and constant:
            around[place : place + 2] = before, after
            continue
        if axis in (None, BATCH) or min(before, after) < 0 or (not constant and dim < ndim - count):
            return None
        assert axis is not None
        split, part = layout.tiling.splits[axis], layout.grid.coordinates[axis]
        last, beside = split.parts - 1, 1 if mode == "reflect" else 0
        shown = ((before, split.owned(0).length), (after, split.owned(last).length))
        if not constant and any(amount and length < amount + beside for amount, length in shown):
            return None
        around[place : place + 2] = before if part == 0 else 0, after if part == last else 0
    # A part without pixels has none to mirror: it only changes its shape.
    y = F.pad(local, around, mode if local.numel() else "constant", value) if any(around) else local.clone()
    return wrap(y, _grown(layout, amounts))


def _grown(layout: Layout, amounts: Mapping[int, tuple[int, int]]) -> Layout:
    """The layout of an image with so many more rows before and after it: its cuts follow the data."""
    tiling = layout.tiling
    for dim, (before, after) in amounts.items():
        axis = layout.axis(dim)
        if axis is not None:
            split = tiling.splits[axis]
            cuts = [0, *(cut + before for cut in split.cuts[1:-1]), split.size + before + after]
            tiling = tiling.replace(axis, Split.at(cuts))
    return Layout(layout.grid, tiling, layout.dims)


def _repeated(x: SpatialTensor, amounts: Mapping[int, tuple[int, int]]) -> Tensor:
    """The image, cropped if it is, with copies of that around it: an exchange of strips among the parts at its edges.

    A rank that shows rows of its own again sends them to itself.
    """
    y: Tensor = x
    befores = [0] * len(x.layout.dims)
    for dim, (before, after) in amounts.items():
        if min(before, after) < 0:
            assert isinstance(y, SpatialTensor)
            y = _pad_dim(y, dim, min(before, 0), min(after, 0), "constant", None)
    assert isinstance(y, SpatialTensor)
    added = {dim: (max(before, 0), max(after, 0)) for dim, (before, after) in amounts.items() if max(before, after) > 0}
    for dim, (before, after) in added.items():
        axis = _axis(y, dim, "circular")
        assert axis is not None
        _check_limit(max(before, after), y.shape[dim], y.shape[dim], "circular")
        befores[axis] = before
    if not added:
        return y
    layout = _grown(y.layout.narrow, added)
    plan = _repetition(layout.grid.rank, y.layout.tiling, layout.tiling, tuple(befores))
    return wrap(Exchange(plan, layout.grid.comm, layout.dims)(y.local), layout)


@lru_cache(maxsize=1024)
def _repetition(rank: int, inner: Tiling, outer: Tiling, befores: tuple[int, ...]) -> ExchangePlan:
    """The exchange after which a rank holds its part of `outer`, in which `inner` is repeated around itself.

    In the coordinates of `inner`, which lies `befores` behind the beginning of `outer`.
    """

    def shifted(box: Box, by: Sequence[int]) -> Box:
        return Box(*(interval.shift(step) for interval, step in zip(box, by, strict=True)))

    needed = [shifted(box, [-before for before in befores]) for box in outer.all_owned]
    owned, sends, receives = inner.all_owned, [], []
    grown = [size != around for size, around in zip(inner.size, outer.size, strict=True)]
    shifts = [(0, -size, size) if grows else (0,) for size, grows in zip(inner.size, grown, strict=True)]
    for peer, by in product(range(len(owned)), product(*shifts)):
        if peer != rank or any(by):
            sends.append(Slab(peer, shifted(shifted(owned[rank], by).intersect(needed[peer]), [-step for step in by])))
            receives.append(Slab(peer, shifted(owned[peer], by).intersect(needed[rank])))
    leaving, coming = (tuple(slab for slab in slabs if not slab.box.empty) for slabs in (sends, receives))
    return ExchangePlan(inner.held(rank), needed[rank], leaving, coming, owned[rank])


def _sources(size: int, before: int, after: int, mode: str) -> list[int]:
    """Which row of an image of that size stands in each row, and in those before and after them."""
    if mode != "replicate":
        _check_limit(max(before, after), size - (mode == "reflect"), size, mode)
    rows = range(-before, size + after)
    if mode == "circular":
        return [row % size for row in rows]
    if mode == "replicate":
        return [min(max(row, 0), size - 1) for row in rows]
    return [-row if row < 0 else 2 * (size - 1) - row if row >= size else row for row in rows]
