"""How much of a margin a part of a model needs, found by running it on shapes: no layer may ask for pixels it lacks.

Whatever the part is made of, residuals, branches or a way up again: the smallest margin is searched with which it runs
to its end. A rehearsal also learns which norms can share a round, and says how many rounds there are.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.parallel.pipeline.split import shapes_of
from mpi4dl.parallel.spatial.foresight import Foresight, Holding
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.script import NeedsNeighbours, Turn, VisitedGrid, Visitors, holds_pixels, visited_grid
from mpi4dl.parallel.streaming.visits import Visits

Learned = Sequence[tuple[Tensor, bool, Holding]]


class CannotStream(ValueError):
    """A part of a model needs the whole image at once, so that it cannot be computed tile by tile."""


@dataclass(frozen=True)
class Rehearsed:
    """What streaming a part takes: its `margin` in pixels on each side, along each axis of space.

    `num_rounds` are those of its forward pass, `learned` what its norms are to know, and `outputs` what it returned, on
    the meta device.
    """

    margin: tuple[int, ...]
    num_rounds: int
    learned: Learned
    outputs: Any


class _Rehearsing(Visitors):
    """Nobody answers: on shapes nothing depends on it."""

    def iexchange(self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, **kwargs: Any) -> Pending:
        if holds_pixels(sends) or holds_pixels(receives):
            raise NeedsNeighbours
        self.turn.script.position += bool(sends or receives)
        return Pending(self.node)

    def told(self, mine: Any) -> list[Any]:
        self.turn.script.position += 1
        return [mine] * self.size


def rehearse(module: nn.Module, visits_with: Callable[[int], Visits], channels: int, dtype: torch.dtype) -> Rehearsed:
    """The least margin with which visits by `visits_with(margin)` can run `module`, on images of so many channels.

    Raises:
        CannotStream: no margin is enough.
    """
    outline = copy.deepcopy(module, memo=shapes_of(module))
    largest = max(visits_with(0).size)

    def runs(margin: int) -> bool:
        try:
            _run(outline, visits_with(margin), channels, dtype)
        except NeedsNeighbours:
            return False
        return True

    low, high = -1, 0
    while not runs(high):
        if high >= largest:
            raise CannotStream("a layer of this part needs pixels of the whole image, so that no margin is enough")
        low, high = high, min(max(16, 2 * high), largest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    first = _run(outline, visits_with(high), channels, dtype)
    learned = first.learned
    again = _run(outline, visits_with(high), channels, dtype, learned)
    of_outline = {id(shape): real for shape, real in zip(outline.parameters(), module.parameters(), strict=True)}
    real = [(of_outline[id(norm)], waits, held) for norm, waits, held in again.learned if id(norm) in of_outline]
    return Rehearsed(again.margin, again.num_rounds, real, again.outputs)


def can_run(module: nn.Module, visits: Visits, margin: int, channels: int) -> bool:
    """Whether visits with a margin can run this module, which is on the meta device."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
    try:
        _run(module, replace(visits, margin=(margin,) * len(visits.size)), channels, dtype)
    except (NeedsNeighbours, NotImplementedError):
        return False
    return True


def _learned(grid: VisitedGrid) -> Learned:
    return [(norm, waits, held) for norm, waits, held in grid.foresight.learned() if isinstance(norm, Tensor)]


def _run(outline: nn.Module, visits: Visits, channels: int, dtype: torch.dtype, learned: Learned = ()) -> Rehearsed:
    turn = Turn()
    tile = visits.own[len(visits.own) // 2]
    grid = visited_grid(visits.grid, tile, turn, visits.tracks_batch, _Rehearsing)
    grid.foresight = Foresight(visits=True)
    for norm, waits, held in learned:
        grid.foresight.learn(norm, waits, held)
    samples, *space = visits.box(tile).shape
    images = torch.empty(samples, channels, *space, dtype=dtype, device="meta")
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        outputs = outline(SpatialTensor(images, visits.layout(grid, images.dim())))
        grid.foresight.pay()
    return Rehearsed(visits.margin, turn.script.position, _learned(grid), outputs)
