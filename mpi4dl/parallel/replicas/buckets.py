"""Which parameters share a flat buffer, and which part of it each rank owns: integers only.

parameters, last first   [ p9 p8 p7 | p6 p5 | p4 p3 p2 p1 ]      buckets, in the order in which backward fills them
owners under ZeRO          000 111    00 11   0000 11111         every rank owns one part of every bucket
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from mpi4dl.geometry import even_cuts

BUCKET_BYTES = 4 << 20
GPU_BUCKET_BYTES = 32 << 20  # each is a copy to the host and back; a GPU fills them soon (PyTorch's DDP has 25 MB)


def bucket_bytes_on(device: str) -> int:
    """How large buckets are on such devices."""
    return GPU_BUCKET_BYTES if device == "cuda" else BUCKET_BYTES


class Bucket(NamedTuple):
    """Which parameters share one flat buffer, by number, and where each one begins in it."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    length: int


class Span(NamedTuple):
    """Elements [start, stop) of the flattened parameter `member`, which begin at `offset` in its bucket."""

    member: int
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        """Where it is in its bucket."""
        return slice(self.offset, self.offset + self.stop - self.start)


def plan_buckets(
    lengths: Sequence[int], kinds: Sequence[object], limit: int, apart: Sequence[bool] = ()
) -> tuple[Bucket, ...]:
    """Put parameters of these numbers of elements into buckets of at most `limit` elements, the last one first.

    Parameters of different kinds (dtype and device) do not share a bucket; one that is larger than the limit has a
    bucket to itself. Those that are to be `apart` come behind all others, in buckets of their own.
    """
    apart = apart or [False] * len(lengths)
    alone = [(kind, one) for kind, one in zip(kinds, apart, strict=True)]
    buckets: list[Bucket] = []
    members: list[int] = []
    offsets: list[int] = []
    length = 0
    for i in sorted(reversed(range(len(lengths))), key=lambda i: apart[i]):
        if members and (length + lengths[i] > limit or alone[i] != alone[members[0]]):
            buckets.append(Bucket(tuple(members), tuple(offsets), length))
            members, offsets, length = [], [], 0
        members.append(i)
        offsets.append(length)
        length += lengths[i]
    if members:
        buckets.append(Bucket(tuple(members), tuple(offsets), length))
    return tuple(buckets)


def plan_cuts(buckets: Sequence[Bucket], num_ranks: int, whole: bool = False) -> tuple[tuple[int, ...], ...]:
    """Where each bucket is cut: rank r owns the elements from cuts[r] up to cuts[r + 1].

    With `whole`, no parameter is cut: each goes to the rank that its middle falls to, and one that has a bucket to
    itself to a rank that owns least so far.
    """
    if not whole:
        return tuple(tuple(even_cuts(bucket.length, num_ranks)) for bucket in buckets)
    loads = [0] * num_ranks
    found = []
    for bucket in buckets:
        bounds = [*bucket.offsets, bucket.length]
        if len(bucket.members) == 1:
            owners = [loads.index(min(loads))]
        else:
            middles = [(start + stop) / 2 for start, stop in pairwise(bounds)]
            owners = [min(int(middle * num_ranks / max(bucket.length, 1)), num_ranks - 1) for middle in middles]
        lengths = [0] * num_ranks
        for owner, (start, stop) in zip(owners, pairwise(bounds), strict=True):
            lengths[owner] += stop - start
            loads[owner] += stop - start
        found.append((0, *accumulate(lengths)))
    return tuple(found)


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of some parameters of these `lengths` (elements), and how `rank`'s part of each is found."""

    lengths: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    cuts: tuple[tuple[int, ...], ...]
    rank: int

    def own(self, number: int) -> slice:
        """The part of a bucket that this rank owns."""
        return slice(self.cuts[number][self.rank], self.cuts[number][self.rank + 1])

    def spans(self, number: int, part: slice | None = None) -> Iterator[Span]:
        """What of which parameters lies in a part of a bucket (None: in all of it), in the order of the bucket."""
        bucket = self.buckets[number]
        begin, end = (0, bucket.length) if part is None else (part.start, part.stop)
        for member, offset in zip(bucket.members, bucket.offsets, strict=True):
            start, stop = max(begin, offset), min(end, offset + self.lengths[member])
            if start < stop or (part is None and start == stop):
                yield Span(member, start - offset, stop - offset, start)
