"""Which parameters share a flat buffer, and which part of it each rank owns: integers only.

parameters, last first   [ p9 p8 p7 | p6 p5 | p4 p3 p2 p1 ]      buckets, in the order in which backward fills them
owners under ZeRO          000 111    00 11   0000 11111         every rank owns one part of every bucket
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
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


class BucketSegment(NamedTuple):
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

    def segments(self, number: int, part: slice | None = None) -> Iterator[BucketSegment]:
        """The segments of parameters in a part of a bucket (None: in all of it), in the order of the bucket."""
        bucket = self.buckets[number]
        begin, end = (0, bucket.length) if part is None else (part.start, part.stop)
        for member, offset in zip(bucket.members, bucket.offsets, strict=True):
            start, stop = max(begin, offset), min(end, offset + self.lengths[member])
            if start < stop or (part is None and start == stop):
                yield BucketSegment(member, start - offset, stop - offset, start)

    def flatten(self, number: int, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The values of a bucket's parameters side by side, in new memory."""
        like = parameters[self.buckets[number].members[0]]
        flat = torch.empty(self.buckets[number].length, dtype=like.dtype, device=like.device)
        for segment in self.segments(number):
            flat[segment.place] = parameters[segment.member].detach().reshape(-1)
        return flat

    def point(self, number: int, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        """Let a bucket's parameters be views of this flat memory."""
        for segment in self.segments(number):
            p = parameters[segment.member]
            p.data = flat[segment.place].view(p.shape)


# Flat memory seen as a parameter, in the order in memory that the parameter itself has, such as channels last.
#
# Fused optimizers walk through a parameter, its gradient and their state side by side, whatever the strides of each
# are.


def strides_of(value: Tensor) -> tuple[int, ...]:
    """Those of a tensor that fills its memory without gaps, in any order of its dims; for others, the plain ones."""
    length = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != length:
            return torch.empty(value.shape, device="meta").stride()
        length *= size
    return value.stride()


def is_expanded(x: Tensor) -> bool:
    """Whether several elements are in one place of memory."""
    return x.layout is torch.strided and any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))


def seen_as(flat: Tensor, like: Tensor) -> Tensor:
    """As many elements of flat memory in the shape and the strides of a parameter; what is flat stays so."""
    return flat.view(like.shape) if like.is_contiguous() else flat.as_strided(like.shape, strides_of(like))


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """These values in the shape and the strides of a parameter, in new memory."""
    found = torch.empty_strided(like.shape, strides_of(like), dtype=value.dtype, device=like.device)
    return found.copy_(value.view(like.shape))


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


FEW = 1000  # values of a tensor by which ranks know in each step that they have the same


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A number of 12 bits that is equal for equal tensors, from some of their values: squares of those of many ranks
    add up exactly in float64.
    """
    found = 0
    for x in tensors:
        if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided:
            some = bits_of(x.detach().flatten()[:: x.numel() // FEW + 1]).cpu()
            found = crc32(f"{tuple(x.shape)} {x.dtype}".encode() + some.clone().numpy().tobytes(), found)
    return found & 0xFFF


def bits_of(x: Tensor) -> Tensor:
    """The elements of a tensor as integers."""
    x = x.resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x.to_dense() if x.layout is not torch.strided else x
    return x.contiguous().view(INTEGERS[x.itemsize])


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """A row of two numbers for each tensor, which are others once it is written to, but for chance."""
    found: list[Tensor] = []
    for x in tensors:
        x = x.detach()
        flat = x.as_strided((x.numel(),), (1,)) if strides_of(x) == x.stride() else x.reshape(-1)
        bits = bits_of(flat).reshape(-1)
        words = 8 // bits.itemsize  # eight bytes at once are summed many times faster than two
        start = -bits.storage_offset() % words
        stop = start + max(0, len(bits) - start) // words * words
        wide = bits[start:stop].view(torch.int64).sum() if start < stop else 0
        total = torch.view_as_real(flat).sum() if flat.is_complex() else flat.sum()  # is another if all signs are
        found += [wide + bits[:start].sum() + bits[stop:].sum(), total.double().view(torch.int64)]
    return torch.stack(found).view(-1, 2) if found else torch.empty(0, 2)


# Whole values on one rank, put together from the parts that ranks own.

State = dict[str, Any]


class Shard(NamedTuple):
    """A run of elements of the value `name`, which begins at number `start` of it, flattened.

    With a parameter may come the optimizer's state: tensors of as many elements are for these elements, others for the
    whole parameter. `group` is the number of its group in the optimizer, None if it is in none.
    """

    name: str
    start: int
    value: Tensor
    state: State = {}  # noqa: RUF012
    group: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.value.numel()


def assemble(
    comm: Communicator, parts: Iterable[Shard], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor] | None:
    """Values by name on rank 0, on the host, in these shapes and dtypes; None on other ranks. Collective.

    A value of which no rank has a part is left out.
    """
    mine = list(parts)
    if comm.rank != 0:
        comm.isend_object([(part.name, part.start, part.stop, part.value.dtype) for part in mine], 0).wait()
        for part in mine:
            comm.send(part.value, 0)
        return None
    found: dict[str, Tensor] = {}

    def put(part: Shard) -> None:
        shape, dtype = shapes[part.name]
        flat = found.setdefault(part.name, torch.empty(math.prod(shape), dtype=dtype))
        flat[part.start : part.stop] = part.value.detach().reshape(-1)

    for part in mine:
        put(part)
    for rank in range(1, comm.size):
        for name, start, stop, dtype in comm.recv_object(rank):
            put(Shard(name, start, comm.recv(torch.empty(stop - start, dtype=dtype), rank)))
    return {name: flat.view(shapes[name][0]) for name, flat in found.items()}
