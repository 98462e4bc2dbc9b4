"""The visits to images of one shape through one part of a model: planned and rehearsed once, taken again and again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from mpi4dl.geometry import Box
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.streaming.rehearsal import Rehearsed, begin, rehearse
from mpi4dl.parallel.streaming.script import Script, Turn, VisitedGrid, visited_grid
from mpi4dl.parallel.streaming.visits import Given, Visits

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
        """What the visit of a tile reads of images."""
        return given.box(tile, self.rehearsed.margin, self.size)

    def of_rank(self, given: Given, grid: Grid) -> Layout:
        """What all visits of a rank hold together."""
        any_visit = self.grid(self.visits.own[0], Script())
        return self.visits.of_ranks(self.layout(given, any_visit), grid)
