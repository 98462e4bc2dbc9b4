"""The sum over ranks that autograd sees passes the dot-product test: <A x, y> = <x, A' y>, summed over the ranks."""

import pytest
import torch

from mpi4dl.comm import Communicator, exchange
from tests.pool.ranks import on_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("transposed", [False, True], ids=["dense", "transposed"])
@on_ranks()
def test_the_backward_pass_is_the_adjoint(comm: Communicator, num_ranks: int, transposed: bool) -> None:
    """<A x, y> and <x, A' y> summed over ranks, and how far A x is from what it should be."""
    torch.set_default_dtype(torch.float64)
    everyone = [torch.randn(3, 5) for _ in range(comm.size)]
    if transposed:
        everyone = [x.mT.contiguous().mT for x in everyone]
    x = everyone[comm.rank].clone().requires_grad_()
    before = x.detach().clone()
    result = exchange.all_reduce(x, comm)
    assert torch.equal(x.detach(), before), "the input was changed"
    error = float((result.detach() - sum(everyone[1:], everyone[0])).abs().max())
    y = torch.randn(result.shape, generator=torch.Generator().manual_seed(100 + comm.rank))
    result.backward(y)
    assert x.grad is not None
    products = torch.stack([(result.detach() * y).sum(), (before * x.grad).sum()])
    left, right = comm.all_reduce(products).tolist()
    assert left == pytest.approx(right, rel=1e-13)
    assert abs(left) > 1e-3
    assert error < 1e-14


@on_ranks(3)
def test_the_gradient_of_a_replicated_parameter_is_the_plain_sum(comm: Communicator) -> None:
    """The convention: a loss that each rank computes alike counts 1 / size on each; gradients of copies are summed."""
    weight = torch.tensor(3.0, requires_grad=True)
    loss = exchange.all_reduce(weight * (comm.rank + 1), comm) ** 2 / comm.size
    loss.backward()
    assert weight.grad is not None
    assert (float(loss.detach() * comm.size), float(comm.all_reduce(weight.grad))) == (324.0, 216.0)
