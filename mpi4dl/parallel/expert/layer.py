"""A layer of experts over ranks: the layer as it is, called with the tokens that come to the experts that a rank has.

Any module with forward(x (R, C), chosen (R, k), weights (R, k)) can be one, such as Mixtral's: it is given a row for
each choice of one of its experts, k = 1, in its own numbers, and how it multiplies is its own matter.

    experts(2)                    rank 0: experts 0 1      rank 1: experts 2 3      of two ranks with different tokens
    tensor(2), parts of experts   rank 0: half of each     rank 1: half of each     of two ranks with the same tokens,
    tensor(2), whole experts      rank 0: experts 0 1      rank 1: experts 2 3      whose results are added up
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.geometry import even_cuts
from mpi4dl.parallel.expert.travel import NOBODY, Work, by_nodes, foresee, through
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.imaginary import Ledger
from mpi4dl.parallel.spatial.rules.pointwise import align
from mpi4dl.parallel.spatial.sums import add_up, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap


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
        self.comm, self.real = comm, not isinstance(comm, Ledger)
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
    """What experts make that nobody chose: zeros, and of their parameters too, as they are of one process.

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
    """What `work` makes of the tokens that this rank has, added up over those who have the same ones."""
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
