"""Streamed tiles: the tiles of a rank's part of an image, which the rank processes one after the other.

ranks        tiles of rank 0            tiles of rank 1
           +------+------+------+     +------+------+------+      The grid of all tiles. Each rank streams the tiles
           |  0   |  1   |  2   |     |  3   |  4   |  5   |      of its own part of the image.
           +------+------+------+     +------+------+------+
                 [margin|  1   |margin]                           The rank reads tile 1 with a margin, so that no layer
                                                                  needs pixels of another tile.

The tiling of all tiles is an ordinary `Tiling`, and layers pass it on as they do under spatial parallelism.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import product
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.exchange import Dims, narrow
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, Tiling, ceil_div, even_cuts
from mpi4dl.parallel.disk import Keep
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned


class ImageSource(Protocol):
    """A batch of images, (samples, channels, *space), from which any box can be read any number of times.

    `shape` is the shape of the whole batch, such as (N, C, H, W). `draws`: reading draws random numbers, which only the
    main thread may do.
    """

    @property
    def draws(self) -> bool: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, box: Box) -> Tensor:
        """The values in a box: an interval of samples, and an interval of pixels along each axis of space."""


@dataclass(frozen=True)
class Pixels:
    """A tensor (N, C, *space) as a source."""

    values: Tensor
    draws: ClassVar[bool] = False

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
    """A source with the shape of the whole batch. `source` has the samples of this rank, from number `first` on."""

    source: ImageSource
    first: int
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def draws(self) -> bool:
        return self.source.draws

    def read(self, box: Box) -> Tensor:
        return self.source.read(Box(box.batch.shift(-self.first), *box.space))


@dataclass(frozen=True)
class StreamTiles:
    """The streamed tiles of all ranks: each rank cuts its part of the images into tiles.

    `ranks` is the grid of ranks, and `rank` the number of this one. A rank has `counts` tiles along the axes of space,
    and `batch` along the batch. `tracks_batch`: layouts know which dim of a tensor is the batch.
    """

    ranks: GridShape
    rank: int
    counts: tuple[int, ...]
    tracks_batch: bool
    batch: int = 1

    @cached_property
    def grid(self) -> GridShape:
        """The grid of all tiles of all ranks."""
        return GridShape(*(n * count for n, count in zip(self.ranks, (self.batch, *self.counts), strict=True)))

    @cached_property
    def own(self) -> list[int]:
        """The tiles of this rank, as increasing numbers in the grid of all tiles."""
        place = self.ranks.coordinates(self.rank)
        along = (range(p * count, (p + 1) * count) for p, count in zip(place, (self.batch, *self.counts), strict=True))
        return [self.grid.number(coordinates) for coordinates in product(*along)]

    def image_spec(self, shape: torch.Size, dtype: torch.dtype, samples: Split) -> "InputSpec":
        """Images of this shape (N, C, *space), cut evenly along space; `samples` is how the grid splits the batch."""
        cuts = (Split.at(even_cuts(pixels, parts)) for pixels, parts in zip(shape[2:], self.grid.space, strict=True))
        tiling = Tiling((samples, *cuts))
        dims = (0 if self.tracks_batch else None, *range(2, len(shape)))
        return InputSpec(shape, dtype, tiling if self.tracks_batch else tiling.drop(BATCH), dims)

    def rank_layout(self, tiling: Tiling, dims: Dims, grid: Grid) -> Layout:
        """The layout over ranks, from a tiling over tiles: a rank owns and holds all that its tiles own and hold."""
        counts = (self.batch, *self.counts)
        splits = tuple(_merged(split, count) for split, count in zip(tiling.splits, counts, strict=True))
        return Layout(grid, Tiling(splits), dims)


def _merged(split: Split, count: int) -> Split:
    """The split in which every `count` neighbouring parts are one part."""
    firsts = range(0, split.parts, count)
    held = (Interval(split.held[i].start, split.held[i + count - 1].stop) for i in firsts)
    return Split(split.cuts[::count], tuple(held))


@dataclass(frozen=True)
class InputSpec:
    """Shape, dtype and tiling of one input of a streamed part of a model.

    Tiles own boxes of it by `tiling`; None if every tile takes the whole tensor. `dims` are its dims of the axes.
    """

    shape: torch.Size
    dtype: torch.dtype
    tiling: Tiling | None
    dims: Dims

    @classmethod
    def like(cls, y: Tensor) -> "InputSpec":
        """The spec of the output `y` of the part before, on any device."""
        if isinstance(y, SpatialTensor):
            return cls(y.shape, y.dtype, y.layout.tiling.narrow, y.layout.dims)
        return cls(y.shape, y.dtype, None, ())

    def layout(self, grid: Grid, margin: int, size: Sequence[int]) -> Layout:
        """The layout over tiles, with a margin of `margin` pixels of images of this size, such as (H, W)."""
        return Layout(grid, self.held(margin, size), self.dims)

    def held(self, margin: int, size: Sequence[int]) -> Tiling:
        """The tiling in which each tile also holds its margin, scaled to the resolution of this input."""
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


class OutputBuffer:
    """This rank's part of one output, `local`, into which each tile writes the box that it owns.

    An output that is not cut along an axis, such as a mean, has boxes that several tiles own: `owners` has the first of
    this rank's tiles for each box.
    """

    def __init__(self, tiles: StreamTiles, grid: Grid, like: SpatialTensor, keep: Keep) -> None:
        if like.layout.flat:
            raise TypeError("the streamed part ends where several axes are one dim: end it before that")
        self._tiling = like.layout.tiling.narrow
        self.layout = tiles.rank_layout(self._tiling, like.layout.dims, grid)
        boxes: dict[tuple[int, ...], int] = {}
        for tile in tiles.own:
            places = zip(tiles.grid.coordinates(tile), like.layout.dims, strict=False)
            boxes.setdefault(tuple(place for place, dim in places if dim is not None), tile)
        self.owners = frozenset(boxes.values())
        shape = self.layout.local_shape(tuple(like.shape))
        self.local = keep.empty(shape, like.dtype, like.local.device)

    def write(self, y: SpatialTensor) -> None:
        """Copy the box that the tile of `y` owns."""
        self.owned_part(y.layout.grid.rank, self.local).copy_(owned(y).detach())

    def owned_part(self, tile: int, local: Tensor) -> Tensor:
        """The view of the box that a tile owns, within this rank's part or a gradient of that shape."""
        return narrow(local, self.layout.dims, self.layout.owned, self._tiling.owned(tile))


# Collective operations between streamed tiles, by statistics passes.
#
# Rules of layers ask a communicator for sums over all tiles, such as the moments of a batch norm. Streamed tiles run
# one after the other, so no tile can wait for another one. A tile instead leaves its contribution and stops. When all
# tiles have contributed, the contributions are recorded. In the next pass all tiles run again, and read them there.
#
#     pass 0     tile 0: ..norm?           tile 1: ..norm?                   -> statistic 0: the moments of both tiles
#     pass 1     tile 0: ..norm..norm?     tile 1: ..norm..norm?             -> statistic 1
#     pass 2     tile 0: ..norm..norm..end tile 1: ..norm..norm..end
#
# A tile computes the same values in each pass, so nothing else is kept. The backward pass has statistics passes of its
# own, so gradients go through the statistics exactly.

PIXELS_DIMS = 3  # tensors with at least this many dims contain pixels; statistics have fewer dims
Contribution = Any  # the value that one tile passes to one collective operation


class AwaitStatistics(Exception):
    """A tile stops, because its next statistic is not recorded yet. `contribution` is the tile's own part of it.

    `additive`: the contribution is a tensor, and only the sum over all tiles is used.
    """

    def __init__(self, contribution: Contribution, additive: bool) -> None:
        super().__init__("a tile waits for the statistics of the others")
        self.contribution, self.additive = contribution, additive


class NeedsNeighbours(NotImplementedError):
    """A layer asked for pixels that the tile does not hold."""

    def __init__(self) -> None:
        super().__init__(
            "a streamed layer asks for pixels of other tiles, as a hook on a gradient does, which are not there: end "
            "streaming before it"
        )


class StatisticsRecord:
    """The recorded statistics of one step, `recorded[i][tile]`, and the `position` of the tile that runs now."""

    def __init__(self) -> None:
        self.restart([])

    def restart(self, recorded: Sequence[Sequence[Contribution]]) -> None:
        """Begin to run a tile, which reads these statistics."""
        self.recorded, self.position = recorded, 0

    def next(self, own: Contribution, additive: bool) -> Sequence[Contribution]:
        """The contributions of all tiles to the next statistic. Raises AwaitStatistics if it is not recorded."""
        if self.position == len(self.recorded):
            raise AwaitStatistics(own, additive)
        self.position += 1
        return self.recorded[self.position - 1]


class StreamCommunicator(Communicator):
    """A communicator between streamed tiles, `rank` among `ranks`, which read statistics from a record.

    Tiles have their numbers in the grid. `whole`: all tiles of the grid are members.
    """

    def __init__(self, record: StatisticsRecord, ranks: Sequence[int], rank: int, whole: bool = True) -> None:
        self.record, self.ranks, self.whole = record, ranks, whole
        self.rank, self.size = ranks.index(rank), len(ranks)
        self.node = None  # type: ignore[assignment]  # no operation waits

    def iexchange(self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, **kwargs: Any) -> Pending:
        if holds_pixels(sends) or holds_pixels(receives):
            raise NeedsNeighbours
        if sends or receives:
            own = self.ranks[self.rank]
            messages = self.contributions([(self._tile(to), x.detach().clone()) for to, x in sends])
            arrived: dict[int, deque[Tensor]] = defaultdict(deque)
            for tile, sent in zip(self.ranks, messages, strict=True):
                arrived[tile].extend(x for to, x in sent if to == own)
            for source, into in receives:
                into.detach().copy_(arrived[self._tile(source)].popleft())
        return Pending(self.node)

    @property
    def blocks(self) -> None:
        """The tiles are on this rank: it has the parts of all."""
        return None

    def _tile(self, peer: int | None) -> int:
        assert peer is not None, "streamed tiles receive from known tiles only"
        return self.ranks[peer]

    def contributions(self, own: Contribution, additive: bool = False) -> list[Contribution]:
        """The contributions of the members to the next statistic, in their order."""
        of_all = self.record.next(own, additive)
        return [of_all[tile] for tile in self.ranks]

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None) -> Pending:
        if self.size > 1:
            parts = self.contributions(tensor.detach().clone(), additive=op == "sum" and self.whole)
            tensor.detach().copy_(reduce(_reduction(op, tensor.dtype), parts))
        return Pending(self.node)

    def all_gather(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        return torch.stack(self.contributions(own)) if self.size > 1 else own[None]

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.contributions(value)

    def agree(self, error: str | None = None, **facts: Any) -> None:
        if error is not None:
            raise ValueError(error)


def _reduction(op: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    of_numbers: dict[str, Callable[[Tensor, Tensor], Tensor]]
    of_numbers = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    of_booleans = torch.logical_or if op in ("sum", "max") else torch.logical_and
    return of_booleans if dtype is torch.bool else of_numbers[op]


def holds_pixels(pieces: Sequence[Piece]) -> bool:
    return any(piece.tensor.dim() >= PIXELS_DIMS for piece in pieces)


class StreamGrid(Grid):
    """The grid of all streamed tiles, as the tile `comm.rank` sees it."""

    comm: StreamCommunicator

    def along(self, axes: tuple[int, ...]) -> StreamCommunicator:
        axes = tuple(axis for axis in self.axes if axis in axes or self.shape[axis] == 1)
        if axes not in self._along:
            ranks = self.ranks_along(axes)
            self._along[axes] = StreamCommunicator(self.comm.record, ranks, self.rank, whole=len(ranks) == self.size)
        found = self._along[axes]
        assert isinstance(found, StreamCommunicator)
        return found
