"""What many ranks merge, in two gathers: within blocks of neighbours, then of all blocks.

    12 ranks    0  1  2  3 |  4  5  6  7 |  8  9 10 11      each block gathers and merges its parts
                   1       |     5       |     9            then ranks of the same place gather what blocks merged

Every rank gets 2 * sqrt(n) parts instead of n. All merge the same parts in the same order, and get the same bits.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.geometry import even_cuts

MOST_GATHERED = 64  # ranks that one gather is for
Spans = tuple[range, ...]


class BlockPlan(NamedTuple):
    """Blocks of neighbours among ranks: those from cuts[i] to cuts[i + 1]. Their sizes differ by one at the most."""

    cuts: tuple[int, ...]

    @classmethod
    def of(cls, size: int) -> "BlockPlan":
        """About sqrt(size) blocks of about as many ranks; all of one size, unless one of both were twice as many."""
        blocks = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: (max(n, size // n), n), default=1)
        if max(blocks, size // blocks) > 2 * math.isqrt(size):
            blocks = math.isqrt(size)
        return cls(even_cuts(size, blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.cuts) - 1

    @property
    def fewest(self) -> int:
        """The number of ranks of the smallest block."""
        return self.cuts[-1] // self.num_blocks

    @property
    def most(self) -> int:
        """The number of ranks of the largest block."""
        return -(-self.cuts[-1] // self.num_blocks)

    def block(self, rank: int) -> int:
        return bisect_right(self.cuts, rank) - 1

    def place(self, rank: int) -> int:
        """The place of a rank in its block; of a last one that not all blocks have, the place before."""
        return min(rank - self.cuts[self.block(rank)], self.fewest - 1)

    def across(self, place: int) -> list[int]:
        """All ranks of this place, in order."""
        return [rank for rank in range(self.cuts[-1]) if self.place(rank) == place]

    @property
    def spans(self) -> Spans:
        """The ranks of each block."""
        return tuple(range(first, last) for first, last in pairwise(self.cuts))


class Blocks:
    """The blocks of a communicator's ranks: `within`, those of this rank's block, `across`, those of its place."""

    def __init__(self, plan: BlockPlan, rank: int, within: Communicator, across: Communicator) -> None:
        self.plan, self.within, self.across = plan, within, across
        own = plan.spans[plan.block(rank)]
        self.spans: tuple[Spans, Spans] = tuple(range(each, each + 1) for each in own), plan.spans
        places = [plan.block(each) for each in plan.across(plan.place(rank))]
        self._first = [places.index(block) for block in range(plan.num_blocks)]  # of each block one

    @classmethod
    def of(cls, comm: Communicator) -> "Blocks":
        """Those of all ranks of `comm`. Collective."""
        plan = BlockPlan.of(comm.size)
        within = comm.split(plan.block(comm.rank))
        return cls(plan, comm.rank, within, comm.split(plan.place(comm.rank)))

    def combine(self, mine: Tensor, merge: Callable[[Tensor, int], Tensor]) -> Tensor:
        """What `merge` makes of all ranks' `mine`, the same bits on every rank. Collective.

        `merge(parts, level)` makes one of parts (n, *), which are those of the ranks `spans[level]`.
        """
        of_blocks = self.across.all_gather(merge(self.within.all_gather(mine), 0))
        if len(of_blocks) > len(self._first):
            of_blocks = of_blocks.index_select(0, torch.tensor(self._first, device=of_blocks.device))
        return merge(of_blocks, 1)
