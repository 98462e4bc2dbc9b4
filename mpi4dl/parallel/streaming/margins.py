"""How much of a margin a part of a model needs, found by running it on shapes: no layer may ask for pixels it lacks.

Whatever the part is made of, residuals, branches or a way up again: the smallest margin is searched with which it runs
to its end. A rehearsal also learns which norms can share a round, and says how many rounds there are.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl._randomness import forked
from mpi4dl.comm import Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import Box, Tiling
from mpi4dl.parallel.pipeline.split import shapes_of
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator, DryRunGrid, dry_run_grid
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo_prefetch import HaloPrefetch, Holding
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.visits import (
    Given,
    NeedsNeighbours,
    Script,
    Turn,
    VisitedGrid,
    Visits,
    holds_pixels,
    visited_grid,
)

Learned = Sequence[tuple[Tensor, bool, Holding]]


class CannotStream(ValueError):
    """A part of a model needs the whole image at once, so that it cannot be computed tile by tile."""


@dataclass(frozen=True)
class Rehearsed:
    """The needs of a streamed part: the `margin` around tiles, in pixels of the images.

    `num_rounds` are those of its forward pass, `learned` what its norms are to know, and `outputs` what it returned, on
    the meta device. `tilings` are those of all that it makes on its way.
    """

    margin: int
    num_rounds: int
    learned: Learned
    outputs: Any
    tilings: Sequence[Tiling]


class _AVisit(DryRunCommunicator):
    """Among tiles that are visited in turn, of which none has pixels of another one.

    A margin that is too small for other tiles is too small for this one, too, so all find the same margin.
    """

    def iexchange(
        self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, collective: bool = False, **kwargs: Any
    ) -> Pending:
        among_others = collective and not sends and not receives
        if among_others or holds_pixels(sends) or holds_pixels(receives):
            raise NeedsNeighbours
        return super().iexchange(sends, receives)


def rehearse(module: nn.Module, visits: Visits, givens: Sequence[Given], size: Sequence[int]) -> Rehearsed:
    """The least margin with which visits can run `module` on what it is given of images of this size (H, W).

    Raises:
        CannotStream: no margin is enough.
    """
    outline = copy.deepcopy(module, memo=shapes_of(module))

    high = least_margin(lambda margin: run(outline, visits, givens, size, margin) is not None, max(size))
    first = run(outline, visits, givens, size, high)
    assert first is not None
    again = run(outline, visits, givens, size, high, first.learned)
    assert again is not None
    of_outline = {id(shape): real for shape, real in zip(outline.parameters(), module.parameters(), strict=True)}
    real = [(of_outline[id(norm)], waits, held) for norm, waits, held in again.learned if id(norm) in of_outline]
    return replace(again, learned=real)


def least_margin(runs: Callable[[int], bool], largest: int, first: int = 16) -> int:
    """The least margin with which a part runs, of at most about so many pixels; `first` is tried after 0.

    Raises:
        CannotStream: no margin is enough.
    """
    low, high = -1, 0
    while not runs(high):
        if high >= largest:
            raise CannotStream("a layer of this part needs pixels of the whole image, so that no margin is enough")
        low, high = high, min(max(first, 2 * high), largest)
    return low + 1 + bisect_left(range(low + 1, high), True, key=runs)


def run(
    outline: nn.Module,
    visits: Visits,
    givens: Sequence[Given],
    size: Sequence[int],
    margin: int,
    learned: Learned = (),
) -> Rehearsed | None:
    """Run a module, which is on the meta device, as a visit with this margin would; None if that is not enough."""
    grid = alone(visits, visits.own[len(visits.own) // 2], learned)
    with torch.enable_grad(), forked():
        try:
            outputs = outline(*(shape_of(given, grid, margin, size) for given in givens))
            grid.foresight.pay()
        except NeedsNeighbours:
            return None
    tilings = list({layout.tiling.narrow for layout in grid.layouts})
    return Rehearsed(margin, grid.comm.counts["rounds"], _learned(grid), outputs, tilings)


def alone(visits: Visits, tile: int, learned: Learned = ()) -> DryRunGrid:
    """The grid of a visit of this tile that is the only one: what others tell it is made up."""
    grid = dry_run_grid(visits.grid, tile, visits.tracks_batch, _AVisit)
    grid.choices = None
    begin(grid, learned)
    return grid


def begin(grid: Grid, learned: Learned) -> None:
    """Let the grid's norms know as much of what follows as those of every other visit, who come to the same rounds."""
    grid.foresight = HaloPrefetch(visits=True)
    for norm, waits, held in learned:
        grid.foresight.learn(norm, waits, held)


def shape_of(given: Given, grid: Grid, margin: int, size: Sequence[int]) -> Tensor:
    """The inputs of the visit of this grid, on the meta device."""
    if given.tiling is None:
        return torch.empty(given.shape, dtype=given.dtype, device="meta")
    layout = given.layout(grid, margin, size)
    local = layout.local_shape(tuple(given.shape))
    return SpatialTensor(torch.empty(local, dtype=given.dtype, device="meta"), layout)


def _learned(grid: Grid) -> Learned:
    return [(norm, waits, held) for norm, waits, held in grid.foresight.learned() if isinstance(norm, Tensor)]


# The visits to images of one shape through one part of a model: planned and rehearsed once, taken again and again.

KNOWN = 256  # tiles of whose visits is remembered what layers plan, about 100 kB for each in small_resnet


@dataclass(eq=False)
class Route:
    """Which tiles this rank visits of what a part is given, and the grid of each, which remembers what layers plan.

    `size` is that of the images. `spares`: nothing is known yet against computing one of tiles that look the same.
    """

    visits: Visits
    givens: tuple[Given, ...]
    size: tuple[int, ...]
    rehearsed: Rehearsed
    spares: bool = True
    _turn: Turn = field(default_factory=Turn)
    _grids: dict[int, VisitedGrid] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, visits: Visits, givens: Sequence[Given], size: Sequence[int]) -> "Route":
        """The visits through `module`, with the least margin.

        Raises:
            CannotStream: the module needs the whole image at once.
        """
        return cls(visits, tuple(givens), tuple(size), rehearse(module, visits, givens, size))

    @property
    def cut(self) -> list[int]:
        """The axes along which there are several tiles."""
        return [axis for axis, parts in enumerate(self.visits.grid) if parts > 1]

    def grid(self, tile: int, script: Script) -> VisitedGrid:
        """That of the next visit, of this tile, which follows the script from its beginning."""
        grid = self._grids.get(tile)
        if grid is None:
            grid = visited_grid(self.visits.grid, tile, self._turn, self.visits.tracks_batch)
            if len(self._grids) < KNOWN:  # tiles are visited in turn: whichever was forgotten would be the next
                self._grids[tile] = grid
        self._turn.script, script.position = script, 0
        begin(grid, self.rehearsed.learned)
        return grid

    def layout(self, given: Given, grid: VisitedGrid) -> Layout:
        """How the visit of this grid holds what it is given."""
        return given.layout(grid, self.rehearsed.margin, self.size)

    def box(self, given: Given, tile: int) -> Box:
        """The box of images that the visit of a tile reads."""
        return given.box(tile, self.rehearsed.margin, self.size)

    def of_rank(self, given: Given, grid: Grid) -> Layout:
        """The boxes that all visits of a rank hold together."""
        any_visit = self.grid(self.visits.own[0], Script())
        return self.visits.of_ranks(self.layout(given, any_visit), grid)
