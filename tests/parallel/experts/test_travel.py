"""Tokens that travel: what comes back is what one process would make, linear with its adjoint, in foreseen bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.models.experts import Experts
from mpi4dl.parallel.experts import NOBODY, ExpertPlacement, Traffic, Travel, lay_over, through
from mpi4dl.parallel.spatial.grid import Arrangement, Grid
from tests.pool.ranks import on_ranks
from tests.support.short_runs import EXACT

EXPERTS, HIDDEN, TOP_K = 8, 6, 2


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 2 has none, and choices of rank 1 are all of one expert, or of none."""
    generator = torch.Generator().manual_seed(rank)
    number = 0 if rank == 2 else 5 + rank
    x = torch.randn(number, HIDDEN, dtype=torch.float64, generator=generator)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(number)] or [x.new(0)])
    chosen = torch.tensor([[3, EXPERTS]] * number) if rank == 1 else chosen.long().view(number, TOP_K)
    return x, chosen, torch.rand(number, TOP_K, dtype=torch.float64, generator=generator)


def experts() -> Experts:
    torch.manual_seed(5)
    return Experts(EXPERTS, HIDDEN, 4, "swiglu").double()


def counted(comm: Communicator) -> list[int]:
    """The bytes that this rank sends from now on."""
    sent = [0]
    post = comm.iexchange

    def iexchange(sends: Any, *args: Any, **kwargs: Any) -> Any:
        sends = list(sends)
        sent[0] += sum(piece.tensor.nbytes for piece in map(Piece._make, sends) if piece.peer != comm.rank)
        return post(sends, *args, **kwargs)

    comm.iexchange = iexchange  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("nodes", [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
@on_ranks(4)
def test_what_comes_back_is_what_one_process_makes(comm: Communicator, nodes: list[list[int]] | None) -> None:
    grid = Grid(comm, tokens=1, batch=comm.size)
    grid.arrangement = Arrangement(experts=comm.size)
    with pytest.MonkeyPatch.context() as patch:
        if nodes is not None:
            patch.setattr(Communicator, "nodes", lambda self: nodes)
        residence = ExpertPlacement(EXPERTS, ("experts",), grid)
    assert len(residence.paths) == (2 if nodes else 1)
    layer = experts()
    x, chosen, weights = tokens_of(comm.rank)
    x.requires_grad_()
    weights.requires_grad_()
    whole = layer(x, chosen, weights)
    expected = torch.autograd.grad(whole.square().sum(), (x, weights))
    own = experts()
    parts = [torch.nn.Parameter(p.detach()[residence.own.start : residence.own.stop]) for p in own.parameters()]
    for (name, _), part in zip(list(own.named_parameters()), parts, strict=True):
        own._parameters[name] = part
    own.num_experts = len(residence.own)
    made = residence.work(own)(x, chosen, weights)
    assert torch.allclose(made, whole, rtol=0, atol=EXACT)
    found = torch.autograd.grad(made.square().sum(), (x, weights, *parts))
    for one, other in zip(found, expected, strict=False):
        assert torch.allclose(one, other, rtol=0, atol=EXACT)
    # What all ranks' tokens make of the experts' weights comes together where the experts are.
    weight_gradients = torch.zeros_like(layer.up)
    for rank in range(comm.size):
        everything = tokens_of(rank)
        weight_gradients += torch.autograd.grad(layer(*everything).square().sum(), layer.up)[0]
    mine = weight_gradients[residence.own.start : residence.own.stop]
    assert torch.allclose(found[2], mine, rtol=0, atol=EXACT)


@on_ranks(3)
def test_a_journey_is_a_linear_map_with_its_adjoint(comm: Communicator) -> None:
    """<A x, y> = <x, A' y>, summed over the ranks."""
    generator = torch.Generator().manual_seed(comm.rank)
    sends = torch.randint(0, 4, (comm.size, 1), generator=generator)
    traffic = Traffic(tuple(sends[:, 0].tolist()), tuple(comm.all_to_all(sends)[:, 0].tolist()))
    x = torch.randn(sum(traffic.sends), 3, dtype=torch.float64, generator=generator, requires_grad=True)
    (moved,) = Travel.apply(x, comm, traffic)
    y = torch.randn(moved.shape, dtype=torch.float64, generator=generator)
    there = (moved * y).sum()
    (back,) = torch.autograd.grad(there, x)
    sums = comm.all_reduce(torch.stack([there.detach(), (x * back).sum().detach()]))
    assert sums[0] == pytest.approx(float(sums[1]), rel=1e-12)


@on_ranks(2)
def test_two_messages_of_d_for_each_token(comm: Communicator) -> None:
    """Two messages of d for each token and rank that it goes to, and beside them its choices and their weights."""
    x, chosen, weights = (t for t in tokens_of(0))
    x.requires_grad_()
    owners = torch.tensor([e * comm.size // EXPERTS for e in range(EXPERTS)] + [NOBODY])
    # One expert each, which is on the other rank: the layer's formula is 2 messages of d a token, forward and backward.
    chosen = torch.full((len(x), 1), EXPERTS - 1 if comm.rank == 0 else 0)
    sent = counted(comm)
    made = through(x, chosen, weights[:, :1], owners, comm, lambda rows, _, shares: rows * shares)
    routing = 8 * comm.size + len(x) * (8 + 4)  # counts; a weight and a number
    assert sent[0] - routing + 8 == 2 * x.nbytes  # its own counts stay
    forward, sent[0] = sent[0], 0
    torch.autograd.grad(made.sum(), x)
    assert sent[0] == 2 * x.nbytes + len(x) * 8  # and the gradients of weights
    assert forward > 0


class Loop(nn.Module):
    """Experts one by one, of which those that nobody chose leave nothing to differentiate; it knows no other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.runs = 4, 0
        self.matrices = nn.Parameter(torch.arange(4.0 * HIDDEN**2, dtype=torch.float64).view(4, HIDDEN, HIDDEN).cos())

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        self.runs += 1
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            made = made.index_add(0, token, x[token] @ self.matrices[expert] * weights[token, choice, None])
        return made


@on_ranks(2)
def test_ranks_whose_experts_nobody_chose_have_zeros_and_take_part(comm: Communicator) -> None:
    grid = Grid(comm, tokens=1, batch=comm.size)
    grid.arrangement = Arrangement(experts=comm.size)
    plain, layer = Loop(), Loop()
    layer.matrices = nn.Parameter(layer.matrices.detach()[2 * comm.rank :][:2])
    lay_over(layer, 4, ("experts",), grid)
    x, _, weights = tokens_of(comm.rank)
    chosen = torch.tensor([[0, 1]] * len(x))
    for module in (plain, layer):
        (module(x, chosen, weights).sum() + weights.sum()).backward()
    expected = comm.all_reduce(plain.matrices.grad)[2 * comm.rank :][:2]
    assert layer.matrices.grad is not None
    assert torch.allclose(layer.matrices.grad, expected, rtol=0, atol=EXACT)
    assert layer.runs == 1  # also where no token comes, so that ranks that share the parameters can gather them
    assert not expected.any() or comm.rank == 0


def test_tokens_without_any_expert_stay_where_they_are() -> None:
    x, _, weights = tokens_of(0)
    made = experts()(x, torch.full((len(x), TOP_K), EXPERTS), weights)
    assert torch.equal(made, torch.zeros_like(x))
