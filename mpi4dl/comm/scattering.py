"""Halves of an all-reduce: every rank comes to hold the sum of one part, and the parts come back to every rank.

    rank 0   [ a0 | b0 | c0 ]            [ a  | .  | .  ]           [ a | b | c ]
    rank 1   [ a1 | b1 | c1 ]   reduce   [ .  | b  | .  ]   all-    [ a | b | c ]      a = (a0 + a1) + a2
    rank 2   [ a2 | b2 | c2 ]   scatter  [ .  | .  | c  ]   gather  [ a | b | c ]

Parts go straight to their owners, who add them in the order of the ranks: every run yields the same bits. A rank sends
(size - 1) / size of the buffer in each half, which no algorithm can undercut (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009).
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpi4dl.comm.messenger import Messenger
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.geometry import even_cuts

LOW_PRECISION = (torch.bfloat16, torch.float16)
# The highest tags that every MPI has: out of the way of what users send.
ALL_TO_ALL_TAG, SCATTER_TAG, GATHER_TAG = 32765, 32766, 32767


def parts_of(flat: Tensor, size: int, cuts: Sequence[int] | None = None) -> list[Tensor]:
    """The parts of a flat tensor, one for each of `size` ranks: views, even ones unless `cuts` says where they begin.

    Raises:
        ValueError: the tensor is not 1-D and contiguous, or `cuts` does not cut it into `size` parts.
    """
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"the tensor has shape {tuple(flat.shape)} and strides {flat.stride()}, but must be 1-D and contiguous: "
            "pass a flat buffer"
        )
    cuts = even_cuts(flat.numel(), size) if cuts is None else cuts
    if len(cuts) != size + 1 or list(cuts) != sorted(cuts) or (cuts[0], cuts[-1]) != (0, flat.numel()):
        raise ValueError(
            f"cuts {list(cuts)} must be {size + 1} numbers that rise from 0 to {flat.numel()}, so that each of {size} "
            f"ranks has a part of {flat.numel()} elements"
        )
    return [flat[start:stop] for start, stop in itertools.pairwise(cuts)]


def swap_parts(
    comm: Messenger, parts: list[Tensor], tag: int, collective: bool = False
) -> tuple[Pending, Callable[[], Tensor]]:
    """Send every rank its part; when that is complete, the second result adds up what came for this rank.

    The sum is in float32 for values of low precision, and otherwise in this rank's own part. `collective` is that of
    `Messenger.iexchange`.
    """
    own = parts[comm.rank]
    arrived = [own if source == comm.rank else torch.empty_like(own) for source in range(comm.size)]
    others = _others(comm)
    pending = comm.iexchange(
        [Piece(to, parts[to]) for to in reversed(others)],
        [Piece(source, arrived[source]) for source in others],
        tag,
        collective=collective,
    )

    def add_up() -> Tensor:
        if own.dtype in LOW_PRECISION:
            total = arrived[0].float()
            for part in arrived[1:]:
                total += part
            return total
        if comm.size == 1:
            return own
        total = arrived[0]
        for part in arrived[1:-1]:
            total += part
        return torch.add(total, arrived[-1], out=own)

    return pending, add_up


def share_parts(comm: Messenger, parts: list[Tensor], tag: int, collective: bool = False) -> Pending:
    """Send this rank's own part to all others, and receive theirs in place."""
    others = _others(comm)
    own = parts[comm.rank]
    leaving, arriving = [Piece(to, own) for to in reversed(others)], [Piece(r, parts[r]) for r in others]
    return comm.iexchange(leaving, arriving, tag, collective=collective)


def ireduce_scatter(comm: Messenger, flat: Tensor, cuts: Sequence[int] | None) -> Pending:
    flat = flat.detach()
    parts = parts_of(flat, comm.size, cuts)
    if flat.is_meta or comm.size == 1:
        return Pending(comm.node)
    pending, add_up = swap_parts(comm, parts, SCATTER_TAG, collective=True)
    own = parts[comm.rank]

    def finish() -> None:
        total = add_up()
        if total is not own:
            own.copy_(total)

    return pending.then(finish)


def iall_gather_into(comm: Messenger, flat: Tensor, cuts: Sequence[int] | None) -> Pending:
    parts = parts_of(flat.detach(), comm.size, cuts)
    return Pending(comm.node) if flat.is_meta else share_parts(comm, parts, GATHER_TAG, collective=True)


def _others(comm: Messenger) -> list[int]:
    """All other ranks, the one below this one first, so that not all of them turn to the same rank at once."""
    return [(comm.rank - step) % comm.size for step in range(1, comm.size)]
