"""Parts of a batch: microbatches, how the first stage shares their samples, and which boxes a rank reads of them."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpi4dl.geometry import Box, Interval, even_cuts


class Microbatch(NamedTuple):
    """Number `number` of a direction: which samples of the batch it has, and how the first stage shares them.

    Way i of the first stage (over all replicas) has the samples from `cuts[i]` up to `cuts[i + 1]`.
    """

    direction: int
    number: int
    cuts: tuple[int, ...]

    @property
    def samples(self) -> Interval:
        return Interval(self.cuts[0], self.cuts[-1])

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.cuts))

    def without(self, positions: Collection[int]) -> "Microbatch":
        """What is left of it in the batch from which these samples were taken out."""
        return self._replace(cuts=tuple(cut - sum(position < cut for position in positions) for cut in self.cuts))


class Read(NamedTuple):
    """A box of a batch of images that a rank reads, because it works on that part of that microbatch first."""

    microbatch: Microbatch
    box: Box


def nested_cuts(outer: Sequence[int], ways: int) -> tuple[int, ...]:
    """Every part of `outer` cut again into `ways` parts as even as can be."""
    inner = [[start + cut for cut in even_cuts(stop - start, ways)][:-1] for start, stop in pairwise(outer)]
    return (*(cut for cuts in inner for cut in cuts), outer[-1])
