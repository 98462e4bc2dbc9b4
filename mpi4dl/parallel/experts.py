"""A layer of experts over ranks: the layer as it is, called with the tokens that come to the experts that a rank has.

Any module with forward(x (R, C), chosen (R, k), weights (R, k)) can be one, such as Mixtral's. It gets a row for each
choice of one of its experts, with k = 1 and local numbers of experts, and multiplies as it likes.

    experts(2)                    rank 0: experts 0 1      rank 1: experts 2 3      of two ranks with different tokens
    tensor(2), parts of experts   rank 0: half of each     rank 1: half of each     of two ranks with the same tokens,
    tensor(2), whole experts      rank 0: experts 0 1      rank 1: experts 2 3      whose results are added up
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import LocalFunction, once_differentiable
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
# the rows, whose adjoint goes the other way.
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


class Travel(LocalFunction):
    """Rows (sum of sends, C) to those that come (sum of receives, C), with numbers beside them; gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator, counts: Traffic, *beside: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.counts = comm, counts
        come = exchange_rows(comm, counts, rows, *beside)
        ctx.mark_non_differentiable(*come[1:])
        return come

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        back = exchange_rows(ctx.comm, ctx.counts.adjoint, gradient)
        return *back, *(None for _ in ctx.needs_input_grad[1:])


def exchange_rows(comm: Communicator, counts: Traffic, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send the rows of tensors to all ranks, and receive theirs; all are under way at once. Collective."""
    come = tuple(x.new_empty(sum(counts.receives), *x.shape[1:]) for x in tensors)
    pending = []
    for tag, (there, here) in enumerate(zip(tensors, come, strict=True)):
        sends = [Piece(peer, part) for peer, part in enumerate(there.contiguous().split(list(counts.sends)))]
        receives = [Piece(peer, part) for peer, part in enumerate(here.split(list(counts.receives)))]
        pending.append(comm.iexchange(sends, receives, tag))
    for each in pending:
        each.wait()
    return come


def through(x: Tensor, chosen: Tensor, weights: Tensor, owners: Tensor, comm: Communicator, work: Work) -> Tensor:
    """The results of the experts chosen for tokens x (M, C), computed by `work` on their ranks: their sums (M, C).

    `owners` (E + 1,) are the ranks of `comm` that have the experts, `NOBODY` for those that none of them has. On each,
    `work` is given all k choices of a token, those of other ranks too. Collective.
    """
    if comm.size == 1 or x.is_meta:  # of tensors without values nobody knows where they go
        return work(x, chosen, weights)
    goes = (owners[chosen][..., None] == torch.arange(comm.size, device=x.device)).any(1)  # (M, ranks)
    sends = goes.sum(0).cpu()[:, None]
    counts = Traffic(*(tuple(rows[:, 0].tolist()) for rows in (sends, comm.all_to_all(sends))))
    source = goes.t().nonzero()[:, 1]  # by destination
    both = torch.cat([x, weights.to(x.dtype)], 1)[source]
    come, numbers = Travel.apply(both, comm, counts, chosen[source].to(torch.int32))
    rows, shares = come.split([x.shape[1], chosen.shape[1]], 1)
    made = work(rows, numbers.long(), shares)
    (back,) = Travel.apply(made, comm, counts.adjoint)
    return torch.zeros_like(x).index_add(0, source, back)


def foresee(x: Tensor, weights: Tensor, owners: Tensor, comm: Communicator) -> None:
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
    comm.iexchange([Piece(rank, both.new_zeros(1, dtype=torch.int64)) for rank in none], [], 0)
    there = {rank: both[: round(len(x) * (1 - share))] for rank, share in none.items()}
    for change in (lambda rows: rows[:, :k].to(torch.int32), lambda rows: rows, lambda rows: rows[:, :-k]):
        comm.iexchange([Piece(rank, change(rows)) for rank, rows in there.items()], [], 0)


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


class ExpertPlacement:
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

    def work(self, run: Work) -> Work:
        """`run` on the ranks that have the experts, as seen by the rank with the tokens."""

        def here(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            if x.is_meta or not self.real:
                if not self.real:
                    foresee(x, weights, self.owners, self.comm)
                slots = torch.arange(chosen.numel(), device=x.device)  # of others comes nothing: as many as go to them
                return run(x, (slots % len(self.own)).view(chosen.shape), weights)
            own = self.numbers.to(x.device)[chosen]
            token, choice = (own < len(self.own)).nonzero(as_tuple=True)
            if not len(token):
                # A token of zeros, which goes nowhere, but comes from the others: so this rank uses all parameters when
                # other ranks do, forward and backward. They may gather them.
                nothing: Tensor = _Nothing.apply(x, weights)
                zeros = torch.cat([nothing, nothing.new_zeros(1, x.shape[1])])[-1:]
                row = zeros if x.requires_grad else zeros.detach()
                weight = (zeros if weights.requires_grad else zeros.detach())[:, :1].to(weights.dtype)
                made = run(row, own.new_zeros(1, 1), weight)
                return nothing.index_add(0, token, made[:0].to(x.dtype))
            made = run(x[token], own[token, choice][:, None], weights[token, choice][:, None])
            return torch.zeros_like(x).index_add(0, token, made.to(x.dtype))

        found: Work = here
        for owners, comm in reversed(self.paths):
            found = _on(owners, comm, found)
        return found


class _Nothing(LocalFunction):
    """The result of experts without tokens: zeros.

    Without a graph behind it this rank would not take part when gradients travel back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(value) if needed else None for value, needed in pairs)


def _on(owners: Tensor, comm: Communicator, work: Work) -> Work:
    return lambda x, chosen, weights: through(x, chosen, weights, owners.to(x.device), comm, work)


def lay_over(module: nn.Module, num_experts: int, axes: Sequence[str], grid: Grid) -> None:
    """Let a layer of experts, of which this rank has its part, work on all ranks of `grid`. Collective."""
    key = (num_experts, tuple(axes))
    placement = (
        grid.cache[key] if key in grid.cache else grid.cache.setdefault(key, ExpertPlacement(num_experts, axes, grid))
    )
    kind = type(module)

    def forward(self: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        def run(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return kind.forward(self, x, chosen, weights)

        return _on_grid(placement.work(run), x, chosen, weights, grid)

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    module.num_experts = len(placement.own)  # type: ignore[assignment]


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
