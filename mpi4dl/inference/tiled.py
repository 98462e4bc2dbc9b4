"""Images that a model makes in tiles, each alone, joined by means where they overlap: as is usual without ranks.

It is there to be compared with an image that is made whole.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.datasets.transform import STRIDE_PX
from mpi4dl.inference.masks import Target, WindowInterval
from mpi4dl.options.declare import ConfigError


class TilesAlone(NamedTuple):
    """Square tiles of `side` px, of which neighbours share `overlap` px or more; the last ones end with the image."""

    side: int
    overlap: int = 0

    @classmethod
    def of(cls, asked: tuple[int, ...]) -> "TilesAlone":
        """As an option says it: the side, and the overlap if there is one. Raises ConfigError."""
        found = cls(*asked[:2])
        if len(asked) > 2 or found.side % STRIDE_PX or found.overlap > found.side // 2:
            raise ConfigError(
                f"`seams` {','.join(map(str, asked))}: expected the side of tiles, a multiple of {STRIDE_PX} px, and "
                "their overlap, up to half of it: such as 256 or 256,64"
            )
        return found

    def target(self, size: Sequence[int]) -> Target:
        """The tiles of an image of this size, padded to one tile."""
        padded = tuple(max(length, self.side) for length in size)
        return Target(tuple(size), padded, (self.side,) * len(size), "pad", shared=self.overlap)

    def borders(self, size: Sequence[int]) -> list[list[int]]:
        """Where along each axis of an image a tile begins or ends."""
        along = self.target(size).intervals
        return [[at for cut in intervals for at in (cut.start, cut.start + self.side)] for intervals in along]


class Joined:
    """An image joined from its tiles, which come row by row; `take` gets its rows, from top to bottom.

    What is made has `scale` x `scale` pixels for each of the tiles'.
    """

    def __init__(self, target: Target, scale: int, take: Callable[[slice, Tensor], None]) -> None:
        self._take, self._scale, self._side = take, scale, scale * target.frame[0]
        self._covers = []  # how many tiles have a pixel, along each axis
        for length, intervals in zip(target.size, target.intervals, strict=True):
            covers = torch.zeros(scale * length)
            for cut in intervals:
                covers[scale * cut.start : scale * cut.start + self._side] += 1
            self._covers.append(covers)
        self._top, self._sums = 0, torch.empty(0)

    def add(self, intervals: Sequence[WindowInterval], made: Tensor) -> None:
        """The next tile, (channels, side, side)."""
        row, col = (self._scale * cut.start for cut in intervals)
        if not self._sums.numel():
            self._sums = made.new_zeros(len(made), self._side, len(self._covers[1]))
        if row > self._top:
            self._give(row)
        self._sums[..., col : col + self._side] += made

    def close(self) -> None:
        self._give(len(self._covers[0]))

    def _give(self, stop: int) -> None:
        rows = slice(self._top, stop)
        count = stop - self._top
        covers = self._covers[0][rows, None] * self._covers[1]
        self._take(rows, self._sums[:, :count] / covers)
        self._sums = torch.cat((self._sums[:, count:], torch.zeros_like(self._sums[:, :count])), 1)
        self._top = stop
