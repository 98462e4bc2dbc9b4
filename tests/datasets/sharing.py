"""The one box that a rank reads of every batch, for tests of what loads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpi4dl.geometry import Box, GridShape, Interval, Tiling, even_cuts


@dataclass(frozen=True)
class Share:
    """The box of a rank whose tile is `rows` x `cols`, and which is number `way` of `ways` that share each batch."""

    rows: Interval
    cols: Interval
    way: int = 0
    ways: int = 1

    def __call__(self, num_samples: int) -> tuple[Box]:
        cuts = even_cuts(num_samples, self.ways)
        return (Box(Interval(cuts[self.way], cuts[self.way + 1]), self.rows, self.cols),)


def owned(grid: GridShape, size: Sequence[int], rank: int) -> Callable[[int], list[Box]]:
    """The box of a rank of a grid, of each batch of images of this size."""
    return lambda num_samples: [Tiling.even(grid, (num_samples, *size)).owned(rank)]
