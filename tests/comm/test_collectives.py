"""Each linear map between ranks passes the dot-product test: <A x, y> = <x, A' y>, summed over ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, collectives
from tests.pool.ranks import Ranks

Map = Callable[[Tensor, Communicator], Tensor]

# The map, whether its input has an entry for each rank, and what it gives, from all ranks' inputs, on one rank.
MAPS: dict[str, tuple[Map, bool, Callable[[list[Tensor], int, int], Tensor]]] = {
    "all_reduce": (collectives.all_reduce, False, lambda xs, rank, root: sum(xs[1:], xs[0])),
    "copy": (lambda x, c: collectives.copy(x, c, c.size - 1), False, lambda xs, rank, root: xs[root]),
    "sum": (
        lambda x, c: collectives.sum(x, c, c.size - 1),
        False,
        lambda xs, rank, root: sum(xs[1:], xs[0]) if rank == root else torch.zeros_like(xs[0]),
    ),
    "gather": (
        lambda x, c: collectives.gather(x, c, c.size - 1),
        False,
        lambda xs, rank, root: torch.stack(xs) * (rank == root),
    ),
    "scatter": (lambda x, c: collectives.scatter(x, c, c.size - 1), True, lambda xs, rank, root: xs[root][rank]),
    "all_to_all": (collectives.all_to_all, True, lambda xs, rank, root: torch.stack([x[rank] for x in xs])),
}


def apply(comm: Communicator, name: str, transposed: bool) -> tuple[float, float, float]:
    """<A x, y> and <x, A' y> summed over ranks, and how far A x is from what it should be."""
    torch.set_default_dtype(torch.float64)
    linear_map, by_rank, reference = MAPS[name]
    shape = (comm.size, 3, 5) if by_rank else (3, 5)
    everyone = [torch.randn(shape) for _ in range(comm.size)]
    if transposed:
        everyone = [x.mT.contiguous().mT for x in everyone]
    x = everyone[comm.rank].clone().requires_grad_()
    before = x.detach().clone()
    result = linear_map(x, comm)
    assert torch.equal(x.detach(), before), "the input was changed"
    error = float((result.detach() - reference(everyone, comm.rank, comm.size - 1)).abs().max())
    y = torch.randn(result.shape, generator=torch.Generator().manual_seed(100 + comm.rank))
    result.backward(y)
    assert x.grad is not None
    products = torch.stack([(result.detach() * y).sum(), (before * x.grad).sum()])
    left, right = comm.all_reduce(products).tolist()
    return left, right, error


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["dense", "transposed"])
@pytest.mark.parametrize("name", MAPS)
def test_the_backward_pass_is_the_adjoint(ranks: Ranks, num_ranks: int, name: str, transposed: bool) -> None:
    for left, right, error in ranks(num_ranks).run(apply, name, transposed):
        assert left == pytest.approx(right, rel=1e-13)
        assert abs(left) > 1e-3
        assert error < 1e-14


def losses_that_all_ranks_compute(comm: Communicator) -> tuple[float, float]:
    """The convention: a loss that each rank computes alike counts 1 / size on each; gradients of copies are summed."""
    weight = torch.tensor(3.0, requires_grad=True)
    loss = collectives.all_reduce(weight * (comm.rank + 1), comm) ** 2 / comm.size
    loss.backward()
    assert weight.grad is not None
    return float(loss.detach() * comm.size), float(comm.all_reduce(weight.grad))


def test_the_gradient_of_a_replicated_parameter_is_the_plain_sum(ranks: Ranks) -> None:
    # (w + 2 w + 3 w)^2 = 36 w^2, whose derivative at 3 is 216
    assert ranks(3).run(losses_that_all_ranks_compute) == [(324.0, 216.0)] * 3
