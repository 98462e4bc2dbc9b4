"""What tiles that are visited one after the other tell each other: rounds, learned by visiting all of them once more.

Rules speak to other tiles through a communicator. Tiles of one process, visited in turn, cannot wait for each other, so
what one tells is written down, and its visit ends there. When all have told, the round is known, and the next time
every visit goes on past it. Visits repeat themselves exactly, so nothing is kept of them.

    visits of pass 0     tile 0: ..norm?           tile 1: ..norm?                   -> round 0: both moments
           of pass 1     tile 0: ..norm..norm?     tile 1: ..norm..norm?             -> round 1
           of pass 2     tile 0: ..norm..norm..end tile 1: ..norm..norm..end

A round of the backward pass is a round like any other: so gradients go through statistics exactly.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mpi4dl import geometry
from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.parallel.spatial.grid import Grid

PIXELS_DIMS = 3  # tensors with so many dims or more have pixels; what norms tell has fewer
Told = Any  # what one tile tells in one round


class Suspended(Exception):
    """A visit came to a round that is not known yet; `told` is its own part of it.

    `additive`: a tensor, of which only the sum over all tiles matters.
    """

    def __init__(self, told: Told, additive: bool) -> None:
        super().__init__("a visit waits for what the other tiles tell")
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
        """What every tile told in the round that this visit has come to. Raises `Suspended` if it is not known."""
        if self.position == len(self.rounds):
            raise Suspended(told, additive)
        self.position += 1
        return self.rounds[self.position - 1]


class Turn:
    """Whose visit it is: of which pass of images. Several may be under way, as microbatches are."""

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
        """What the members tell in the round that this visit has come to, in their order."""
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
            self._along[axes] = type(self.comm)(self.comm.turn, ranks, self.rank, whole=len(ranks) == self.size)
        found = self._along[axes]
        assert isinstance(found, Visitors)
        return found


def visited_grid(
    shape: geometry.GridShape, tile: int, turn: Turn, tracks_batch: bool, kind: type[Visitors] = Visitors
) -> VisitedGrid:
    """The grid of the visit of this tile. `tracks_batch`: tensors know which dim is the batch."""
    grid = VisitedGrid.of(kind(turn, range(shape.size), tile), shape, tracks_batch)
    assert isinstance(grid, VisitedGrid)
    return grid
