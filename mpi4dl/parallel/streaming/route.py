"""The visits to images of one shape: planned and rehearsed once, taken again and again."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from mpi4dl.geometry import Split
from mpi4dl.parallel.spatial.foresight import Foresight
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.streaming.rehearsal import Rehearsed, rehearse
from mpi4dl.parallel.streaming.script import Script, Turn, VisitedGrid, visited_grid
from mpi4dl.parallel.streaming.visits import Visits


@dataclass(frozen=True)
class Route:
    """Which tiles this rank visits, with which margin, and the grid of each visit, which remembers what layers plan."""

    visits: Visits
    rehearsed: Rehearsed
    _turn: Turn = field(default_factory=Turn)
    _grids: dict[int, VisitedGrid] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        grid: Grid,
        counts: tuple[int, ...],
        shape: torch.Size,
        dtype: torch.dtype,
        samples: Split,
    ) -> "Route":
        """The visits of images (N, C, H, W) through `module`, `counts` along each axis of space in each rank's part.

        `samples` says how the grid's ranks share the batch.

        Raises:
            CannotStream: the module needs the whole image at once.
        """
        _, channels, *size = shape
        bare = Visits(grid.shape, grid.rank, counts, samples, tuple(size), (0,) * len(size), grid.tracks_batch)
        rehearsed = rehearse(module, lambda margin: replace(bare, margin=(margin,) * len(size)), channels, dtype)
        return cls(replace(bare, margin=rehearsed.margin), rehearsed)

    def grid(self, tile: int, script: Script) -> VisitedGrid:
        """That of the next visit, of this tile, which follows the script from its beginning."""
        grid = self._grids.get(tile)
        if grid is None:
            grid = self._grids[tile] = visited_grid(self.visits.grid, tile, self._turn, self.visits.tracks_batch)
        self._turn.script, script.position = script, 0
        # Every visit knows as much of what follows as every other, so that all come to the same rounds.
        grid.foresight = Foresight(visits=True)
        for norm, waits, held in self.rehearsed.learned:
            grid.foresight.learn(norm, waits, held)
        return grid
