"""Tokens travel to the ranks that have their experts, and what these make of them travels back.

    rank 0   tokens a b c    chosen  a: 0 3   b: 1   c: 2 3        experts 0 1 are on rank 0, 2 3 on rank 1
                 | a b stay, a c go to rank 1, once each, however many of its experts they want
    rank 1   a c (and its own), with their chosen experts and weights -> its experts -> sums of what it made of each
                 | a c come back
    rank 0   a = what rank 0 made of a + what rank 1 made of a

The counts are those of the data: an all-to-all in which every rank knows what comes before it comes. It is a linear map
of the rows, whose adjoint goes the other way. A batch in pieces overlaps: while the experts have one, others travel.

    forward     go 0, go 1 | arrive 0, experts, leave 0 | arrive 1, experts, leave 1 | back 0, back 1
    backward    the same, from right to left: autograd runs first what was made last

Lepikhin et al. 2020, "GShard", https://arxiv.org/abs/2006.16668.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import even_cuts

# Rows of tokens (R, C), their chosen experts (R, k) and weights (R, k), to sums of what experts make of them (R, C).
Work = Callable[[Tensor, Tensor, Tensor], Tensor]
NOBODY = -1


class Traffic(NamedTuple):
    """How many rows a rank sends to each of the others, and receives of each: in the order of their ranks."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def adjoint(self) -> "Traffic":
        return Traffic(self.receives, self.sends)


class Journey:
    """Rows on their way between all ranks of `comm`, and their gradients on the way back.

    `begin` and `end` are one linear map in two halves: between them this rank may compute.
    """

    def __init__(self, comm: Communicator, counts: Traffic, tag: int) -> None:
        self.comm, self.counts, self.tag = comm, counts, tag
        self._under_way: tuple[Pending, Tensor, Tensor] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Send rows (sum of sends, C). Returns those that come (sum of receives, C), which are there after `end`."""
        return _Begin.apply(rows, self)

    def end(self, rows: Tensor) -> Tensor:
        return _End.apply(rows, self)

    def post(self, rows: Tensor, counts: Traffic) -> Tensor:
        rows = rows.contiguous()
        come = rows.new_empty(sum(counts.receives), *rows.shape[1:])
        sends, receives = (
            [Piece(peer, part) for peer, part in enumerate(whole.split(list(sizes)))]
            for whole, sizes in ((rows, counts.sends), (come, counts.receives))
        )
        self._under_way = self.comm.iexchange(sends, receives, self.tag), rows, come
        return come

    def arrived(self) -> Tensor:
        assert self._under_way is not None
        pending, _, come = self._under_way
        pending.wait()
        self._under_way = None
        return come


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.post(rows, journey.counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.arrived(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.arrived()
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.journey.post(gradient, ctx.journey.counts.adjoint)
        return gradient, None  # what it is nobody reads: `_Begin` has what comes


def through(
    x: Tensor, chosen: Tensor, weights: Tensor, owners: Tensor, comm: Communicator, work: Work, pieces: int = 1
) -> Tensor:
    """What `work` makes, on the rank that has them, of the experts chosen for tokens x (M, C): their sums (M, C).

    `owners` (E + 1,) are the ranks of `comm` that have the experts, `NOBODY` for those that none of them has. On each,
    `work` is given all k choices of a token, those of other ranks too. The tokens go in so many pieces. Collective.
    """
    if comm.size == 1 or x.is_meta:  # of tensors without values nobody knows where they go
        return work(x, chosen, weights)
    bounds = even_cuts(len(x), pieces)
    goes = (owners[chosen][..., None] == torch.arange(comm.size, device=x.device)).any(1)  # (M, ranks)
    parts = [goes[start:stop] for start, stop in pairwise(bounds)]
    sends = torch.stack([part.sum(0) for part in parts], 1).cpu()  # (ranks, pieces)
    receives = comm.all_to_all(sends)
    both = torch.cat([x, weights.to(x.dtype)], 1)
    trips = []
    for number, (part, start) in enumerate(zip(parts, bounds, strict=False)):
        counts = Traffic(tuple(sends[:, number].tolist()), tuple(receives[:, number].tolist()))
        source = part.t().nonzero()[:, 1] + start  # by destination
        trips.append(_Trip(comm, counts, 2 * number, source, both[source], chosen[source]))
    backs = [trip.work(work, x.shape[1]) for trip in trips]
    total = torch.zeros_like(x)
    for trip, back in zip(trips, backs, strict=True):
        total = total.index_add(0, trip.source, trip.back.end(back))
    return total


def foresee(x: Tensor, weights: Tensor, owners: Tensor, comm: Communicator, pieces: int) -> None:
    """Exchange with the ranks of `comm`, which only counts, what `through` would if all choices were as likely.

    A token's k of E experts differ, so that a rank with e of them is met by 1 - C(E - e, k) / C(E, k) of tokens.
    """
    num_experts, k = len(owners) - 1, weights.shape[1]
    none = {
        rank: math.comb(num_experts - int((owners == rank).sum()), k) / math.comb(num_experts, k)
        for rank in range(comm.size)
        if rank != comm.rank
    }
    both = torch.cat([x, weights.to(x.dtype)], 1).detach()
    comm.iexchange([Piece(rank, both.new_zeros(pieces, dtype=torch.int64)) for rank in none], [], 0)
    for start, stop in pairwise(even_cuts(len(x), pieces)):
        there = {rank: both[start : start + round((stop - start) * (1 - share))] for rank, share in none.items()}
        for change in (lambda rows: rows[:, :k].to(torch.int32), lambda rows: rows, lambda rows: rows[:, :-k]):
            comm.iexchange([Piece(rank, change(rows)) for rank, rows in there.items()], [], 0)


class _Trip:
    """One piece of the batch on its way: rows with their weights, and beside them the numbers of their experts."""

    def __init__(
        self, comm: Communicator, counts: Traffic, tag: int, source: Tensor, rows: Tensor, chosen: Tensor
    ) -> None:
        self.source = source
        self.there, self.back = Journey(comm, counts, tag), Journey(comm, counts.adjoint, tag + 1)
        self.numbers = Journey(comm, counts, tag)
        self.chosen = self.numbers.post(chosen.to(torch.int32), counts)
        self.rows = self.there.begin(rows)

    def work(self, work: Work, features: int) -> Tensor:
        """Wait for what comes, let the experts make of it what they do, and send that back."""
        chosen = self.numbers.arrived().long()
        x, weights = self.there.end(self.rows).split([features, chosen.shape[1]], 1)
        del self.rows
        return self.back.begin(work(x, chosen, weights))


def by_nodes(
    owners: Tensor, nodes: Sequence[Sequence[int]], comm: Communicator
) -> tuple[Tensor, Tensor, Communicator, Communicator] | None:
    """A journey in two: to the rank of one's own number on the node of the expert, and there to its rank.

    A token then crosses the network once for all its experts of a node. `nodes` are the ranks of each. Returns owners
    and ranks across nodes, and owners and ranks within the node; None if nodes are one, or have different numbers of
    ranks. Collective.
    """
    if len(nodes) < 2 or len(set(map(len, nodes))) > 1 or len(nodes[0]) < 2:
        return None
    node_of, place_of = torch.full((comm.size + 1,), NOBODY), torch.full((comm.size + 1,), NOBODY)
    for number, ranks in enumerate(nodes):
        for place, rank in enumerate(ranks):
            node_of[rank], place_of[rank] = number, place
    node, place = int(node_of[comm.rank]), int(place_of[comm.rank])
    across, within = comm.split(place, node), comm.split(node, place)
    return node_of[owners], torch.where(node_of[owners] == node, place_of[owners], NOBODY), across, within
