"""Padding in every mode; negative padding crops."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import BATCH, Interval, Split, Window
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import reach
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap


@register(torch.constant_pad_nd)
def constant_pad_nd(input: SpatialTensor, pad: Sequence[int], value: float = 0) -> Tensor:
    return pad_image(input, pad, value=value)


@register(*named("pad"))
def pad_image(input: SpatialTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    amounts = {input.dim() - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    x: Tensor = input
    if mode != "constant":
        x = in_plain_dtype(input, lambda image: F.pad(image, (1, 1, 1, 1), mode))
    if not any(pad):
        return x.clone()
    edges = _at_edges(x, amounts, mode) if mode in ("reflect", "replicate") and isinstance(x, SpatialTensor) else None
    if edges is not None:
        return edges
    for dim, (before, after) in amounts.items():
        if before or after:
            assert isinstance(x, SpatialTensor)
            x = _pad_dim(x, dim, before, after, mode, value)
    return x


def _pad_dim(x: SpatialTensor, dim: int, before: int, after: int, mode: str, value: float | None) -> Tensor:
    axis = x.layout.axis(dim)
    if axis is None:
        amounts = [0, 0] * (x.dim() - 1 - dim) + [before, after]
        if mode != "constant":
            raise refusal("torch.nn.functional.pad", f"mode {mode!r} along dim {dim}, which is not height or width")
        return wrap(F.pad(x.local, amounts, mode, value), x.layout)
    if axis == BATCH:
        raise refusal("torch.nn.functional.pad", "a batch that is cut cannot be padded")
    window = Window(1, 1, before, after)
    if x.shape[dim] + before + after < 1:
        raise RuntimeError(f"padding of ({before}, {after}) leaves nothing of {x.shape[dim]} pixels along dim {dim}")
    if mode == "constant" or (before <= 0 and after <= 0):
        reached = reach(x, {axis: window}, float(value or 0.0))
        local = reached.fetch(x.local)
        return wrap(local.clone() if reached.exchange is None else local, reached.output)
    if mode == "circular" and (before < 0 or after < 0):  # the other modes show the image that was there before
        x = pad_image(x, [0, 0] * (x.dim() - 1 - dim) + [min(before, 0), min(after, 0)])  # type: ignore[assignment]
        return _pad_dim(x, dim, max(before, 0), max(after, 0), mode, value)
    return _mirrored(x, dim, axis, window, mode)


def _at_edges(x: SpatialTensor, amounts: Mapping[int, tuple[int, int]], mode: str) -> Tensor | None:
    """What PyTorch's own operator makes of each part at the edges of the image, if no part shows rows of another."""
    layout, around = x.layout, [0, 0, 0, 0]
    if layout.wide or x.dim() < 3 or 0 in x.shape[-2:]:
        return None
    tiling, beside = layout.tiling, 1 if mode == "reflect" else 0
    for dim, (before, after) in amounts.items():
        axis = layout.axis(dim)
        if axis in (None, BATCH) or min(before, after) < 0 or dim < x.dim() - 2:
            return None
        assert axis is not None
        split, part = tiling.splits[axis], layout.grid.coordinates[axis]
        last = split.parts - 1
        if (before and split.owned(0).length < before + beside) or (
            after and split.owned(last).length < after + beside
        ):
            return None
        cuts = [0, *(cut + before for cut in split.cuts[1:-1]), split.size + before + after]
        tiling = tiling.replace(axis, Split.at(cuts))
        place = 2 * (x.dim() - 1 - dim)
        around[place : place + 2] = before if part == 0 else 0, after if part == last else 0
    # A part without pixels has none to mirror: it only changes its shape.
    local = F.pad(x.local, around, mode if x.local.numel() else "constant") if any(around) else x.local.clone()
    return wrap(local, Layout(layout.grid, tiling, layout.dims))


def _source(row: int, size: int, mode: str) -> int:
    """The row of the image that stands at `row`, which may lie outside it."""
    if mode == "circular":
        return row % size
    if mode == "replicate":
        return min(max(row, 0), size - 1)
    return -row if row < 0 else 2 * (size - 1) - row if row >= size else row


def _mirrored(x: SpatialTensor, dim: int, axis: int, window: Window, mode: str) -> Tensor:
    """Every part fetches a run of rows that holds all that its output shows, and picks from it."""
    size, limits = x.shape[dim], {"reflect": x.shape[dim] - 1, "circular": x.shape[dim], "replicate": None}
    if mode not in limits:
        raise refusal("torch.nn.functional.pad", f"mode {mode!r}")
    limit = limits[mode]
    if limit is not None and max(window.before, window.after) > limit:
        raise ValueError(
            f"padding of {max(window.before, window.after)} in mode {mode!r} must be at most {limit} for {size} pixels"
        )
    split = x.layout.tiling.splits[axis]
    rows = size + window.before + window.after
    cuts = [0, *(min(max(cut + window.before, 0), rows) for cut in split.cuts[1:-1]), rows]
    output = Split.at(cuts)
    sources = [
        [_source(row - window.before, size, mode) for row in range(*output.owned(i))] for i in range(split.parts)
    ]
    needed = tuple(Interval(min(rows), max(rows) + 1) if rows else Interval(0, 0) for rows in sources)
    tiling = x.layout.narrow.tiling
    local = x.layout.exchange_to(tiling.replace(axis, Split(split.cuts, needed)))(x.local)
    mine = x.layout.grid.coordinates[axis]
    index = torch.tensor([row - needed[mine].start for row in sources[mine]], dtype=torch.int64, device=local.device)
    layout = Layout(x.layout.grid, tiling.replace(axis, output), x.layout.dims)
    return wrap(local.index_select(dim, index), layout)
