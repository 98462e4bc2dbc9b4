"""Sums over ranks of what each of them has part of: all of the sum on every rank, or of some of its tokens.

    a layer of which each rank has some inputs    x (.., T, C / N)   -->  partial sums (.., T, C) on every rank
    all-reduced                                   y (.., T, C)            what follows is computed by every rank alike
    reduce-scattered, sequence parallel           y (.., T / N, C)        each rank computes it of its own tokens, until
                                                                          a layer of which it has some outputs gathers

Both send the same bytes: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.exchange import Exchange, all_reduce, linear, plan_retiling
from mpi4dl.geometry import BATCH, Box, Interval, Split, Tiling, even_cuts
from mpi4dl.parallel.spatial.flattening import close_dims, open_dims, opened
from mpi4dl.parallel.spatial.grid import Factor, Flat, Grid, Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes, retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap


def add_up(y: Tensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """The sum of the ranks' `y` along `axes`; `layout`, which has none of them, is that of each term.

    Where the grid shares tokens, ranks along the axis of features come to hold some of the sum's tokens each.
    """
    grid = layout.grid
    axes = [axis for axis in axes if grid.shape[axis] > 1]
    shared = None
    if grid.features in axes and layout.dims[-1] is None:
        shared = tokens_shared(layout, layout.global_shape(y.shape), y.dim() - 2)
    if shared is not None:
        axes.remove(grid.axes[-1])
    if axes:
        y = all_reduce(y, grid.along(tuple(axes)))
    if shared is None:
        return wrap(y, layout)
    exchange = shared.cached(_exchange, lambda: _exchange(shared))
    summed = linear(_opened(y, shared), exchange.adjoint.bring, exchange.bring)
    return SpatialTensor(close_dims(summed, shared, shared.owned), shared)


def _exchange(shared: Layout) -> Exchange:
    """The exchange that gathers one dim over the axis of features, once dims are opened."""
    grid, features = shared.grid, shared.grid.axes[-1]
    have = Tiling((shared.tiling.splits[features],))
    whole = (Interval(0, have.size[0]),) * grid.shape[features]
    want = Tiling((Split(have.splits[0].cuts, whole),))
    plan = plan_retiling(grid.coordinates[features], have, want)
    return Exchange(plan, grid.along((features,)), (opened(shared).dims[features],))


def _opened(y: Tensor, shared: Layout) -> Tensor:
    """y, which has all that is shared, with a dim for each axis."""
    features = shared.grid.axes[-1]
    box = list(shared.owned)
    box[features] = Interval(0, shared.tiling.splits[features].size)
    return open_dims(y, shared, Box(*box))


def tokens_shared(layout: Layout, shape: Sequence[int], dim: int) -> Layout | None:
    """The layout in which ranks along the axis of features share the tokens, `dim`, of a tensor of this layout.

    None where they do not, or cannot: of tokens that the axis of tokens cuts into uneven pieces, and of matrices, whose
    rows may be those of several sequences.
    """
    grid = layout.grid
    if not grid.arrangement.shares_tokens or dim < 1 or layout.flat or layout.wide:
        return None
    features, parts = grid.axes[-1], grid.shape[-1]
    others = [axis for axis in layout.axes_at([dim]) if grid.shape[axis] > 1]
    pieces = prod(grid.shape[axis] for axis in others)
    even = all(layout.tiling.splits[axis].cuts == even_cuts(shape[dim], pieces) for axis in others)
    if len(others) > 1 or not even or shape[dim] % pieces or shape[dim] // pieces < parts:
        return None
    layout = layout.with_dims(None if known == dim else known for known in layout.dims)
    carried = (*others, features)
    flat = (Flat(dim, tuple(Factor(axis) for axis in carried)),) if others else ()
    tiling = layout.tiling.replace(features, Split.at(even_cuts(shape[dim] // pieces, parts)))
    dims = tuple(dim if axis in carried else known for axis, known in enumerate(layout.dims))
    return Layout(grid, tiling, dims, flat)


def share_alike(operands: Sequence[Tensor], keep_first: bool) -> Sequence[Tensor]:
    """Operands that broadcast against each other, in which the axis of features is of one dim, or is not there.

    That is the dim of it in the largest operand, or in the first that has it if that is to stay as it is. If it is that
    of tokens, of which another axis has some too, ranks take their shares of what they have of them.
    """
    shared = [x for x in operands if isinstance(x, SpatialTensor) and x.layout.grid.arrangement.shares_tokens]
    having = [x for x in shared if x.layout.dims[-1] is not None]
    if not having:
        return operands
    lead = having[0] if keep_first else max(having, key=lambda x: x.shape.numel())
    place = lead.layout.dims[-1] - lead.dim()  # type: ignore[operator]  # from the last
    return [_at(x, place) if isinstance(x, SpatialTensor) else x for x in operands]


def _at(x: SpatialTensor, place: int) -> Tensor:
    """x with the axis of features at this place, or nowhere."""
    dim, layout = x.dim() + place, x.layout
    known = layout.dims[-1]
    if known is not None:
        return x if known == dim else with_all_features(x)
    if dim < 1 or x.shape[dim] == 1 or dim not in layout.dims:
        return x
    shared = tokens_shared(layout, x.shape, dim)
    if shared is None:
        return x
    features = layout.grid.axes[-1]
    mine = shared.owned[features]
    local = _opened(x.local, shared).narrow(opened(shared).dims[features] or 0, mine.start, mine.length)
    return SpatialTensor(close_dims(local, shared, shared.owned), shared)


def shared(x: Tensor | None, dim: int) -> bool:
    """Whether ranks share this dim of x along the axis of features."""
    features = x.layout.grid.features if isinstance(x, SpatialTensor) else None
    return features is not None and x.layout.dims[features] == dim  # type: ignore[union-attr]


def with_all_features(x: SpatialTensor) -> Tensor:
    """x with all that the ranks along the axis of features share of it, gathered once for all callers."""
    state = x.local._version, torch.is_grad_enabled()
    if x.gathered is None or x.gathered[0] != state:
        x.gathered = state, _gathered(x)
    return x.gathered[1]


def _gathered(x: SpatialTensor) -> Tensor:
    layout, features = x.layout, x.layout.grid.axes[-1]
    dim, tiling = layout.dims[features], layout.tiling
    if dim is None or layout.flat not in ((), (flat_tokens(layout, dim),)):
        return gather_axes(x, [features])
    exchange = layout.cached(_exchange, lambda: _exchange(layout))
    local = exchange(open_dims(x.local, layout, layout.held))
    if layout.flat:  # pieces of shares become what the axis of tokens cuts
        tokens, size = layout.flat[0].axes[0], tiling.splits[features].size
        local = local.flatten(dim, dim + 1)
        tiling = tiling.replace(tokens, Split.at([cut * size for cut in tiling.splits[tokens].cuts]))
    gone = Layout(layout.grid, tiling.drop(features), (*layout.dims[:-1], None))
    if gone.whole:
        layout.grid.halo_prefetch.flush()  # nobody may look at a grid's tensors after this
    return wrap(local, gone)


def flat_tokens(layout: Layout, dim: int) -> Flat | None:
    """The flat dim of tokens that another axis cuts into pieces, of which ranks along that of features have shares."""
    flat = layout.flat_at(dim)
    if flat is None or flat.copies or len(flat.factors) != 2 or len(flat.axes) != 2:
        return None
    return flat if flat.axes[1] == layout.grid.axes[-1] else None


# The part of a tensor that this rank alone counts or writes: the parts of all ranks are the whole, once.

CLASSES = 1


class Owned(NamedTuple):
    """A rank's part: `values` are whole[where]. `counts`: it is this rank that speaks for it. `dense`: it is one of
    several parts that differ along more than the batch. `classes` is the dim of those.
    """

    values: Tensor
    where: tuple[slice, ...]
    counts: bool
    dense: bool
    classes: int = CLASSES

    def of_targets(self, targets: Tensor) -> Tensor:
        """The same part of targets (N, ...) beside a whole of (N, C, ...), or of (N, ..., C) as of tokens, or of the
        same shape.
        """
        if targets.dim() == len(self.where):
            return targets[self.where]
        if targets.dim() == len(self.where) - 1:
            return targets[tuple(cut for dim, cut in enumerate(self.where) if dim != self.classes)]
        raise ValueError(
            f"dense outputs with {len(self.where)} dims have targets of as many, or of one less, not {targets.dim()}"
        )


def owned(x: Tensor, grid: Grid) -> Owned:
    """This rank's part of x, which all ranks of the grid have as a plain tensor, or spread. Collective over the grid.

    Outputs that differ only along the batch, such as logits, are gathered, and rank 0 speaks for them.
    """
    if isinstance(x, SpatialTensor) and all(dim is None for dim in x.layout.dims[BATCH + 1 :]):
        x = gather(x)
    if isinstance(x, SpatialTensor):
        rest = [axis for axis in grid.axes[BATCH + 1 :] if axis not in grid.space and x.layout.dims[axis] is not None]
        x = gather_axes(x, rest)
    if not isinstance(x, SpatialTensor):
        return Owned(x, tuple(slice(0, size) for size in x.shape), grid.rank == 0, False)
    x = retile(x, x.layout.tiling.narrow)
    index = [slice(0, size) for size in x.shape]
    for axis, dim in enumerate(x.layout.dims):
        if dim is not None:
            index[dim] = slice(*x.layout.owned[axis])
    counts = all(place == 0 for place, dim in zip(grid.coordinates, x.layout.dims, strict=True) if dim is None)
    classes = x.dim() - 1 if x.layout.axis(CLASSES) in grid.space else CLASSES
    return Owned(x.local, tuple(index), counts, True, classes)
