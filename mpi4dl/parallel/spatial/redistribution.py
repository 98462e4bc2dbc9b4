"""A tensor in another layout: entries of its dims travel to the ranks that are to own them, whatever their order is.

tokens of an image, (rows, cols) in one dim      the same as a grid of other sides, 3 x 4
    rank 0   0 1 .   rank 1  . . 2                   rank 0   0 1 2 3     rank 1   . . . .
             3 4 .           . . 5                            4 5 . .              . . 6 7
             6 7 .           . . 8   +  0 1 2                 . . . .              8 0 1 2

A dim's entries that every rank has (`Flat`) each rank takes from its own. An `Exchange` moves boxes; here, along each
dim, a rank has any increasing sequence of entries, and it has every combination of those of its dims.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpi4dl.comm import exchange
from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.exchange import BACKWARD_TAG, FORWARD_TAG
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import Split, Tiling, even_cuts
from mpi4dl.parallel.spatial.grid import Dims, Factor, Flat, Layout
from mpi4dl.parallel.spatial.halo import TOLD_BYTES, gather_axes, retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, tell_gathered, wrap

Entries = np.ndarray  # of one dim, increasing
Places = tuple[tuple[int, Entries], ...]  # dims, and which entries of a rank's part of each


class Cuts(NamedTuple):
    """A layout but for its grid; of dim `only[0]` every rank has the entries range(*only[1:]) alone, if it is given."""

    tiling: Tiling
    dims: Dims
    flat: tuple[Flat, ...]
    only: tuple[int, int, int, int] | None = None

    @classmethod
    def of(cls, layout: Layout) -> "Cuts":
        return cls(layout.tiling, layout.dims, layout.flat)

    def prefix(self, dim: int) -> int:
        return sum(flat.prefix for flat in self.flat if flat.dim == dim)

    def entries(self, dim: int, size: int, rank: int, copies: bool = True) -> Entries:
        """Those that a rank has of a dim of this size, perhaps without those that every rank has."""
        if self.only is not None and self.only[0] == dim:
            return np.arange(*self.only[1:])
        box = self.tiling.owned(rank)
        flat = next((flat for flat in self.flat if flat.dim == dim), None)
        if flat is None:
            return np.arange(*box[self.dims.index(dim)]) if dim in self.dims else np.arange(size)
        numbers = np.arange(flat.prefix, size - flat.suffix).reshape(flat.sizes(self.tiling.whole))
        cut = (slice(None) if factor.axis is None else slice(*box[factor.axis]) for factor in flat.factors)
        inner = numbers[tuple(cut)].reshape(-1)
        if not copies or not flat.copies:
            return inner
        return np.concatenate([np.arange(flat.prefix), inner, np.arange(size - flat.suffix, size)])


class RedistributionPlan(NamedTuple):
    """The entries that a rank sends, and the places of received and kept entries in its new part."""

    sends: tuple[tuple[int, Places], ...]
    receives: tuple[tuple[int, Places], ...]
    kept: Places
    kept_into: Places
    have: tuple[int, ...]  # the local shape, before
    want: tuple[int, ...]  # and after

    @property
    def reversed(self) -> "RedistributionPlan":
        return RedistributionPlan(self.receives, self.sends, self.kept_into, self.kept, self.want, self.have)

    def run(self, x: Tensor, comm: Communicator, tag: int) -> Tensor:
        """The new part. On the way back, an entry with several targets gets the sum of their gradients."""
        strips = [x.new_empty(_shape(self.want, places)) for _, places in self.receives]
        leaving = [Piece(peer, _taken(x, places)) for peer, places in self.sends]
        arriving = [Piece(peer, strip) for (peer, _), strip in zip(self.receives, strips, strict=True)]
        pending = comm.iexchange(leaving, arriving, tag, collective=True)
        result = x.new_zeros(self.want)
        _add(result, self.kept_into, _taken(x, self.kept))
        pending.wait()
        for (_, places), strip in zip(self.receives, strips, strict=True):
            _add(result, places, strip)
        return result


def _shape(shape: Sequence[int], places: Places) -> list[int]:
    found = list(shape)
    for dim, entries in places:
        found[dim] = len(entries)
    return found


def _is_run(entries: Entries) -> bool:
    return len(entries) == 0 or entries[-1] - entries[0] == len(entries) - 1


def _taken(x: Tensor, places: Places) -> Tensor:
    for dim, entries in places:
        if _is_run(entries):
            x = x.narrow(dim, int(entries[0]) if len(entries) else 0, len(entries))
        else:
            x = x.index_select(dim, torch.from_numpy(entries).to(x.device))
    return x


def _add(result: Tensor, places: Places, part: Tensor) -> None:
    """Add `part` to these places, which are different ones."""
    scattered = [(dim, entries) for dim, entries in places if not _is_run(entries)]
    target = _taken(result, tuple(each for each in places if _is_run(each[1])))
    if not scattered:
        target.add_(part)
        return
    (dim, entries), *others = scattered
    index = torch.from_numpy(entries).to(part.device)
    if others:
        whole = target.index_select(dim, index)
        _add(whole, tuple(others), part)
        target.index_copy_(dim, index, whole)
    else:
        target.index_add_(dim, index, part)


@lru_cache(maxsize=32)
def _planned(rank: int, have: Cuts, want: Cuts, shape: tuple[int, ...]) -> RedistributionPlan | None:
    """The part of `rank`; None where entries that every rank has would have to travel along another dim."""
    num_ranks = have.tiling.grid.size
    dims = [d for d in range(len(shape)) if d in have.dims or d in want.dims or (want.only and want.only[0] == d)]
    absent = [axis for axis, dim in enumerate(have.dims) if dim is None]
    grid = have.tiling.grid
    for flat in have.flat:
        for other in dims if flat.copies else ():
            for peer in range(num_ranks) if other != flat.dim else ():
                mine, wanted = (cuts.entries(other, shape[other], peer) for cuts in (have, want))
                if not np.isin(wanted, mine).all():
                    return None

    def beside(peer: int) -> bool:
        """Whether it is the one of those with copies whose copy this rank uses, or who uses that of this rank."""
        return all(grid.coordinates(peer)[axis] == grid.coordinates(rank)[axis] for axis in absent)

    def common(sender: int, receiver: int) -> tuple[Places, Places] | None:
        places = []
        for dim in dims:
            ours = have.entries(dim, shape[dim], sender, copies=sender == receiver)
            theirs = want.entries(dim, shape[dim], receiver)
            found = np.searchsorted(theirs, ours)
            both = np.flatnonzero(np.append(theirs, -1)[found] == ours)
            if not len(both) and sender != receiver:
                return None
            before = have.prefix(dim) if sender != receiver else 0
            places.append((dim, both + before, found[both]))
        return tuple((d, a) for d, a, _ in places), tuple((d, b) for d, _, b in places)

    kept = common(rank, rank)
    assert kept is not None
    peers = [peer for peer in range(num_ranks) if peer != rank and beside(peer)]
    sends = ((peer, found[0]) for peer in peers if (found := common(rank, peer)) is not None)
    receives = ((peer, found[1]) for peer in peers if (found := common(peer, rank)) is not None)
    local, after = list(shape), list(shape)
    for dim in dims:
        local[dim] = len(have.entries(dim, shape[dim], rank))
        after[dim] = len(want.entries(dim, shape[dim], rank))
    return RedistributionPlan(tuple(sends), tuple(receives), *kept, tuple(local), tuple(after))


def _travel(x: SpatialTensor, want: Cuts) -> Tensor | None:
    """This rank's part by these cuts; differentiable."""
    x = retile(x, x.layout.tiling.narrow)
    grid = x.layout.grid
    plan = _planned(grid.rank, Cuts.of(x.layout), want, tuple(x.shape))
    if plan is None:
        return None
    back = plan.reversed
    return exchange.linear(
        x.local, lambda t: plan.run(t, grid.comm, FORWARD_TAG), lambda t: back.run(t, grid.comm, BACKWARD_TAG)
    )


def redistribute(x: SpatialTensor, layout: Layout) -> SpatialTensor | None:
    """The same tensor in another layout, without halos; None where this cannot be had by sending what is spread."""
    if layout == x.layout:
        return x
    local = _travel(x, Cuts.of(layout))
    return None if local is None else SpatialTensor(local, layout)


def entries_on_all(x: SpatialTensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """These entries of a flat dim on every rank: nothing but they travels. Where they are many, users get a warning."""
    layout = x.layout.narrow
    gone = layout.moved(lambda known: None if known == dim else known)
    x.layout.grid.halo_prefetch.flush()  # nobody may look at a grid's tensors after this
    local = _travel(x, Cuts.of(gone)._replace(only=(dim, start, stop, step)))
    if local is None:
        return gather_axes(x, ())[(slice(None),) * dim + (slice(start, stop, step),)]
    if local.nbytes >= TOLD_BYTES:
        tell_gathered(x, local.nbytes)
    return wrap(local, gone)


def in_grid_of(layout: Layout, dim: int, sizes: Sequence[int]) -> Layout | None:
    """The layout with a flat dim cut so that it can become dims of these sizes: each axis cuts one of them, evenly.

    None if there are not two of them to cut.
    """
    long = [size for size in sizes if size > 1]
    axes = list(layout.axes_at([dim]))
    if len(axes) > len(long):  # those of most parts; of the others every rank has all
        axes = sorted(sorted(axes, key=lambda axis: -layout.grid.shape[axis])[: len(long)])
    if len(long) < 2 or not axes:
        return None
    factors = [Factor(axis) for axis in axes] + [Factor(None, size) for size in long[len(axes) :]]
    gone = layout.moved(lambda known: None if known == dim else known)
    dims, tiling = list(gone.dims), gone.tiling
    for axis, size in zip(axes, long, strict=False):
        dims[axis] = dim
        tiling = tiling.replace(axis, Split.at(even_cuts(size, layout.grid.shape[axis])))
    return Layout(layout.grid, tiling, tuple(dims), tuple(sorted((*gone.flat, Flat(dim, tuple(factors))))))


def as_image(x: SpatialTensor) -> Tensor:
    """x (N, C, ...) with flat dims opened for an operator on images: each axis of space cuts one of its last dims.

    Gathered, where these dims are cut by other axes.
    """
    layout, grid = x.layout, x.layout.grid
    last = range(x.dim() - len(grid.space), x.dim())
    others = [axis for axis, dim in enumerate(layout.dims) if dim is not None and axis not in grid.space]
    if any(layout.dims[axis] in last for axis in others):
        return gather_axes(x, ())
    dims, tiling = list(layout.dims), layout.narrow.tiling
    for axis, dim in zip(grid.space, last, strict=True):
        dims[axis] = dim
        tiling = tiling.replace(axis, Split.at(even_cuts(x.shape[dim], grid.shape[axis])))
    found = redistribute(x, Layout(grid, tiling, tuple(dims)))
    return gather_axes(x, ()) if found is None else found
