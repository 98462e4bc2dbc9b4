"""Where the tiles lie that are visited one after the other, and what each holds: its own pixels, and a margin.

ranks        tiles of rank 0            tiles of rank 1
           +------+------+------+     +------+------+------+      the grid of all tiles: every rank visits those
           |  0   |  1   |  2   |     |  3   |  4   |  5   |      that lie in its own part of the image
           +------+------+------+     +------+------+------+
                 [margin|  1   |margin]                           what a visit reads, so that no layer asks a neighbour

The cuts of all tiles are one tiling, which layers carry on as ever; each rank's own cuts are some of them.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from mpi4dl import geometry
from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.exchange import Dims, narrow
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, Tiling, ceil_div, even_cuts
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned


class ImageSource(Protocol):
    """Images of which any box can be read, as often as it is asked for: (samples, channels, *space).

    `shape` is that of the whole batch, such as (N, C, H, W). It reads the values of the whole image there.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box) -> Tensor:
        """The values in a box: which samples, and which pixels along each axis of space."""


@dataclass(frozen=True)
class Pixels:
    """A tensor (N, C, *space) as a source."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def read(self, box: Box) -> Tensor:
        return self.values[(slice(*box.batch), slice(None), *(slice(*side) for side in box.space))]


@dataclass(frozen=True)
class OwnSamples:
    """A source of the whole batch's shape, of which this rank has the samples from `first` on: those of `source`."""

    source: ImageSource
    first: int
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, box: Box) -> Tensor:
        return self.source.read(Box(box.batch.shift(-self.first), *box.space))


@dataclass(frozen=True)
class Visits:
    """The tiles that are visited: `counts` of them along each axis of space in every rank's part.

    `shape` is the grid of ranks, `rank` this one's number in it. `tracks_batch`: tensors know which of their dims is
    the batch, of which there are `batch` parts, visited in turn.
    """

    shape: GridShape
    rank: int
    counts: tuple[int, ...]
    tracks_batch: bool
    batch: int = 1

    @cached_property
    def grid(self) -> GridShape:
        """That of all tiles."""
        return GridShape(*(n * count for n, count in zip(self.shape, (self.batch, *self.counts), strict=True)))

    @cached_property
    def own(self) -> list[int]:
        """The tiles that this rank visits, by their numbers in the grid of all."""
        place = self.shape.coordinates(self.rank)
        along = [range(p * count, (p + 1) * count) for p, count in zip(place, (self.batch, *self.counts), strict=True)]
        wanted = set(product(*along))
        return [tile for tile in range(self.grid.size) if self.grid.coordinates(tile) in wanted]

    def images(self, shape: torch.Size, dtype: torch.dtype, samples: Split) -> "Given":
        """Images (N, C, H, W), cut evenly; `samples` says how the grid shares the batch."""
        size = shape[2:]
        cuts = (Split.at(even_cuts(pixels, parts)) for pixels, parts in zip(size, self.grid.space, strict=True))
        tiling = Tiling((samples, *cuts))
        dims = (0 if self.tracks_batch else None, *range(2, len(shape)))
        return Given(shape, dtype, tiling if self.tracks_batch else tiling.drop(BATCH), dims)

    def of_ranks(self, layout: Layout, grid: Grid) -> Layout:
        """How ranks own, and hold, together what their visits own and hold by this layout."""
        counts = (self.batch, *self.counts)
        splits = tuple(_joined(split, count) for split, count in zip(layout.tiling.splits, counts, strict=True))
        return Layout(grid, Tiling(splits), layout.dims).with_dims(layout.dims)


def _joined(split: Split, count: int) -> Split:
    """Of every `count` neighbours one part."""
    firsts = range(0, split.parts, count)
    held = (Interval(split.held[i].start, split.held[i + count - 1].stop) for i in firsts)
    return Split(split.cuts[::count], tuple(held))


@dataclass(frozen=True)
class Given:
    """An input of a part of a model: a tensor of this shape, of which tiles own boxes by `tiling` (None: all)."""

    shape: torch.Size
    dtype: torch.dtype
    tiling: Tiling | None
    dims: Dims

    @classmethod
    def like(cls, y: Tensor) -> "Given":
        """The result of visits, on the meta device."""
        if isinstance(y, SpatialTensor):
            return cls(y.shape, y.dtype, y.layout.tiling.narrow, y.layout.dims)
        return cls(y.shape, y.dtype, None, ())

    def box(self, tile: int, margin: int, size: Sequence[int]) -> Box:
        """The box that the visit of a tile reads: of all samples, if they are not shared out."""
        box = self.held(margin, size).held(tile)
        return box if self.dims[BATCH] is not None else Box(Interval(0, self.shape[0]), *box.space)

    def layout(self, grid: Grid, margin: int, size: Sequence[int]) -> Layout:
        """How tiles hold it, with a margin that is so many pixels of images of this size."""
        return Layout(grid, self.held(margin, size), self.dims)

    def held(self, margin: int, size: Sequence[int]) -> Tiling:
        assert self.tiling is not None
        return _with_margin(self.tiling, self.dims, margin, tuple(size))


@lru_cache(maxsize=64)
def _with_margin(tiling: Tiling, dims: Dims, margin: int, size: tuple[int, ...]) -> Tiling:
    batch, *space = tiling.splits
    splits = [
        split if dim is None else split.widen(ceil_div(margin * split.size, pixels))
        for split, dim, pixels in zip(space, dims[1:], size, strict=True)
    ]
    return Tiling((batch, *splits))


class Collected:
    """A rank's part of one tensor, `local`, out of what its visits own of it."""

    def __init__(self, visits: Visits, grid: Grid, like: SpatialTensor) -> None:
        if like.layout.flat:
            raise TypeError("the streamed part ends where several axes are one dim: end it before that")
        self._of_tiles = like.layout.narrow
        self.layout = visits.of_ranks(self._of_tiles, grid)
        shape = self.layout.local_shape(tuple(like.shape))
        self.local = torch.empty(shape, dtype=like.dtype, device=like.local.device)

    def take(self, y: SpatialTensor) -> None:
        """Take what the visit of y's grid owns."""
        self.part(y.layout.grid.rank, self.local).copy_(owned(y).detach())

    def part(self, tile: int, local: Tensor) -> Tensor:
        """The owned box of a tile's visit within this rank's part, or a gradient of it."""
        wanted = self._of_tiles.tiling.owned(tile)
        return narrow(local, self.layout.dims, self.layout.owned, wanted)

    def close(self) -> None:
        """Let go of the memory, which is the output's now."""
        del self.local


# Communication among tiles that are visited in turn: rounds, each of which visits all of them once more.
#
# Rules speak to other tiles through a communicator. Tiles of one process, visited in turn, cannot wait for each other,
# so what one tells is written down, and its visit ends there. When all have told, the round is known, and the next time
# every visit goes on past it. Visits repeat themselves exactly, so nothing is kept of them.
#
#     visits of pass 0     tile 0: ..norm?           tile 1: ..norm?                   -> round 0: both moments
#            of pass 1     tile 0: ..norm..norm?     tile 1: ..norm..norm?             -> round 1
#            of pass 2     tile 0: ..norm..norm..end tile 1: ..norm..norm..end
#
# A round of the backward pass is a round like any other: so gradients go through statistics exactly.

PIXELS_DIMS = 3  # tensors with so many dims or more have pixels; what norms tell has fewer
Told = Any  # what one tile tells in one round


class Suspended(Exception):
    """A visit came to a round that is not known yet; `told` is its own part of it.

    `additive`: a tensor, of which only the sum over all tiles matters.
    """

    def __init__(self, told: Told, additive: bool) -> None:
        super().__init__("a tile waits for the statistics of the others")
        self.told, self.additive = told, additive


class NeedsNeighbours(NotImplementedError):
    """A visit asked for pixels that it does not hold."""

    def __init__(self) -> None:
        super().__init__(
            "a streamed layer asks for pixels of other tiles, as a hook on a gradient does, which are not there: end "
            "streaming before it"
        )


class Script:
    """The rounds known so far of one pass of images, each by the number of the tile.

    `position` is the round that the visit at work comes to next.
    """

    def __init__(self) -> None:
        self.rounds: list[Sequence[Told]] = []
        self.position = 0

    def told_by_all(self, told: Told, additive: bool) -> Sequence[Told]:
        """The contributions of all tiles to the present round of this visit. Raises `Suspended` if it is not known."""
        if self.position == len(self.rounds):
            raise Suspended(told, additive)
        self.position += 1
        return self.rounds[self.position - 1]


class Turn:
    """The pass of images to which a visit belongs. Several may be under way, as microbatches are."""

    def __init__(self) -> None:
        self.script = Script()


class Visitors(Communicator):
    """A communicator among tiles that are visited in turn.

    `ranks` are its members, by their numbers in the grid; `whole`: they are all tiles.
    """

    def __init__(self, turn: Turn, ranks: Sequence[int], rank: int, whole: bool = True) -> None:
        self.turn, self.ranks, self.whole = turn, ranks, whole
        self.rank, self.size = ranks.index(rank), len(ranks)
        self.node = None  # type: ignore[assignment]  # nothing is ever waited for

    def iexchange(self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, **kwargs: Any) -> Pending:
        if holds_pixels(sends) or holds_pixels(receives):
            raise NeedsNeighbours
        if sends or receives:
            me = self.ranks[self.rank]
            everywhere = self.told([(self._number(to), x.detach().clone()) for to, x in sends])
            arrived: dict[int, deque[Tensor]] = defaultdict(deque)
            for rank, told in zip(self.ranks, everywhere, strict=True):
                arrived[rank].extend(x for to, x in told if to == me)
            for source, into in receives:
                into.detach().copy_(arrived[self._number(source)].popleft())
        return Pending(self.node)

    def _number(self, peer: int | None) -> int:
        assert peer is not None, "tiles know from whom they hear"
        return self.ranks[peer]

    def told(self, mine: Told, additive: bool = False) -> list[Told]:
        """The contributions of the members to the present round of this visit, in their order."""
        everywhere = self.turn.script.told_by_all(mine, additive)
        return [everywhere[rank] for rank in self.ranks]

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None) -> Pending:
        if self.size > 1:
            parts = self.told(tensor.detach().clone(), additive=op == "sum" and self.whole)
            tensor.detach().copy_(reduce(_combining(op, tensor.dtype), parts))
        return Pending(self.node)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.told(tensor.detach().clone())) if self.size > 1 else tensor.detach()[None].clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.told(value)

    def agree(self, error: str | None = None, **facts: Any) -> None:
        if error is not None:
            raise ValueError(error)


def _combining(op: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    of_numbers: dict[str, Callable[[Tensor, Tensor], Tensor]]
    of_numbers = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    of_booleans = torch.logical_or if op in ("sum", "max") else torch.logical_and
    return of_booleans if dtype is torch.bool else of_numbers[op]


def holds_pixels(pieces: Sequence[Piece]) -> bool:
    return any(piece.tensor.dim() >= PIXELS_DIMS for piece in pieces)


class VisitedGrid(Grid):
    """A grid of tiles, of which one is visited at a time; this one belongs to the visit of tile `comm.rank`."""

    comm: Visitors

    def along(self, axes: tuple[int, ...]) -> Visitors:
        axes = tuple(axis for axis in self.axes if axis in axes or self.shape[axis] == 1)
        if axes not in self._along:
            ranks = self.ranks_along(axes)
            self._along[axes] = Visitors(self.comm.turn, ranks, self.rank, whole=len(ranks) == self.size)
        found = self._along[axes]
        assert isinstance(found, Visitors)
        return found


def visited_grid(shape: geometry.GridShape, tile: int, turn: Turn, tracks_batch: bool) -> VisitedGrid:
    """The grid of the visit of this tile. `tracks_batch`: tensors know which dim is the batch."""
    grid = VisitedGrid.of(Visitors(turn, range(shape.size), tile), shape, tracks_batch)
    assert isinstance(grid, VisitedGrid)
    return grid
