"""A layer of experts over ranks: the layer as it is, called with the tokens that come to the experts that a rank has.

Any module with forward(x (R, C), chosen (R, k), weights (R, k)) can be one, such as Mixtral's. It gets a row for each
choice of one of its experts, with k = 1 and local numbers of experts, and multiplies as it likes.

    experts(2)                    rank 0: experts 0 1      rank 1: experts 2 3      of two ranks with different tokens
    tensor(2), parts of experts   rank 0: half of each     rank 1: half of each     of two ranks with the same tokens,
    tensor(2), whole experts      rank 0: experts 0 1      rank 1: experts 2 3      whose results are added up
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel.spatial.alignment import align
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.sums import add_up, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap

# Tokens travel to the ranks that have their experts, and what these make of them travels back.
#
#     rank 0   tokens a b c    chosen  a: 0 3   b: 1   c: 2 3        experts 0 1 are on rank 0, 2 3 on rank 1
#                  | a b stay, a c go to rank 1, once each, however many of its experts they want
#     rank 1   a c (and its own), with their chosen experts and weights -> its experts -> sums of what it made of each
#                  | a c come back
#     rank 0   a = what rank 0 made of a + what rank 1 made of a
#
# The counts are those of the data: an all-to-all in which every rank knows the sizes beforehand. It is a linear map of
# the rows, whose adjoint goes the other way. A batch in pieces overlaps: while the experts have one, others travel.
#
#     forward     go 0, go 1 | arrive 0, experts, leave 0 | arrive 1, experts, leave 1 | back 0, back 1
#     backward    the same, from right to left: autograd runs first what was made last
#
# Lepikhin et al. 2020, "GShard", https://arxiv.org/abs/2006.16668.

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
        return gradient, None  # its value is not read: `_Begin` has the data


def through(
    x: Tensor, chosen: Tensor, weights: Tensor, owners: Tensor, comm: Communicator, work: Work, pieces: int = 1
) -> Tensor:
    """The results of the experts chosen for tokens x (M, C), computed by `work` on their ranks: their sums (M, C).

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
        """Wait for the tokens, run the experts on them, and send the results back."""
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


class Residence:
    """Where the experts of a layer are: `axes` are those over which whole experts are shared out. Collective."""

    def __init__(self, num_experts: int, axes: Sequence[str], grid: Grid) -> None:
        index, count = grid.place.among(tuple(axes))
        cuts = even_cuts(num_experts, count)
        self.own = range(cuts[index], cuts[index + 1])
        shares = torch.bucketize(torch.arange(num_experts), torch.tensor(cuts[1:]), right=True)
        if "features" in axes:  # of those who have the same tokens each sends them to others of its own number
            number, columns = grid.place.features
            shares = torch.where(shares % columns == number, shares // columns, NOBODY)
        self.owners = torch.cat([shares, torch.tensor([NOBODY])])
        comm = grid.among_experts()
        self.comm, self.real = comm, not isinstance(comm, DryRunCommunicator)
        self.paths: list[tuple[Tensor, Communicator]] = [(self.owners, comm)] if self.real else []
        two = by_nodes(self.owners, comm.nodes(), comm)
        if two is not None:
            self.paths = [(two[0], two[2]), (two[1], two[3])]
        self.numbers = torch.full((num_experts + 1,), len(self.own))  # as this rank's part of the layer knows them
        self.numbers[self.own.start : self.own.stop] = torch.arange(len(self.own))

    def work(self, run: Work, parameters: Sequence[Tensor], pieces: int) -> Work:
        """`run` on the ranks that have the experts, whose `parameters` it has, as seen by the rank with the tokens."""

        def here(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            if x.is_meta or not self.real:
                if not self.real:
                    foresee(x, weights, self.owners, self.comm, pieces)
                slots = torch.arange(chosen.numel(), device=x.device)  # of others comes nothing: as many as go to them
                return run(x, (slots % len(self.own)).view(chosen.shape), weights)
            own = self.numbers.to(x.device)[chosen]
            token, choice = (own < len(self.own)).nonzero(as_tuple=True)
            if not len(token):
                nothing: Tensor = _Nothing.apply(x, weights, *parameters)
                return nothing
            made = run(x[token], own[token, choice][:, None], weights[token, choice][:, None])
            return torch.zeros_like(x).index_add(0, token, made.to(x.dtype))

        found: Work = here
        for owners, comm in reversed(self.paths):
            found = _on(owners, comm, found, pieces if owners is self.paths[0][0] else 1)
        return found


class _Nothing(torch.autograd.Function):
    """The result of experts without tokens: zeros, and zero gradients of their parameters, as in one process.

    Without a graph behind it this rank would not take part when gradients travel back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, *parameters)
        return torch.zeros_like(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(value) if needed else None for value, needed in pairs)


def _on(owners: Tensor, comm: Communicator, work: Work, pieces: int) -> Work:
    return lambda x, chosen, weights: through(x, chosen, weights, owners.to(x.device), comm, work, pieces)


def lay_over(module: nn.Module, num_experts: int, axes: Sequence[str], grid: Grid) -> None:
    """Let a layer of experts, of which this rank has its part, work on all ranks of `grid`. Collective."""
    key = (num_experts, tuple(axes))
    residence = grid.known[key] if key in grid.known else grid.known.setdefault(key, Residence(num_experts, axes, grid))
    kind = type(module)

    def forward(self: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        def run(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            made: Tensor = kind.forward(self, x, chosen, weights)
            return made

        own = tuple(self.parameters())
        return _on_grid(residence.work(run, own, grid.arrangement.pieces), x, chosen, weights, grid)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    module.num_experts = len(residence.own)  # type: ignore[assignment]


def _on_grid(work: Work, x: Any, chosen: Any, weights: Any, grid: Grid) -> Tensor:
    """The result of `work` for the tokens of this rank, summed over the ranks with the same tokens."""
    features = grid.features
    spread = [with_all_features(t) if features is not None and _has(t, features) else t for t in (x, chosen, weights)]
    parts, layout = spread, Layout.of_copies(grid)
    if any(isinstance(t, SpatialTensor) for t in spread):
        parts, layout = align(spread, "experts", False)
    y = work(*(t.reshape(-1, t.shape[-1]) for t in parts)).view(parts[0].shape)
    if features is not None and grid.shape[features] > 1:
        return add_up(y, layout, (features,))
    return wrap(y, layout)


def _has(t: Any, axis: int) -> bool:
    return isinstance(t, SpatialTensor) and t.layout.dims[axis] is not None
