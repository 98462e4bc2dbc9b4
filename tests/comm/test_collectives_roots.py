"""Every rank may be the root of a linear map, and a second derivative is refused rather than wrong."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, collectives
from tests.pool.ranks import Ranks

SHAPE = (2, 3)


def maps(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]]:
    """Every map by name, with the shapes of what it takes and gives."""
    stacked = (comm.size, *SHAPE)
    yield "all_reduce", lambda x: collectives.all_reduce(x, comm), SHAPE, SHAPE
    yield "all_to_all", lambda x: collectives.all_to_all(x, comm), stacked, stacked
    for root in range(comm.size):
        yield f"copy {root}", lambda x, root=root: collectives.copy(x, comm, root), SHAPE, SHAPE  # type: ignore[misc]
        yield f"sum {root}", lambda x, root=root: collectives.sum(x, comm, root), SHAPE, SHAPE  # type: ignore[misc]
        yield f"gather {root}", lambda x, root=root: collectives.gather(x, comm, root), SHAPE, stacked  # type: ignore[misc]
        yield f"scatter {root}", lambda x, root=root: collectives.scatter(x, comm, root), stacked, SHAPE  # type: ignore[misc]


def everyones(comm: Communicator, shape: tuple[int, ...], seed: int) -> Tensor:
    """What all ranks hold, (size, *shape), known to each of them."""
    return torch.randn((comm.size, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot_products(comm: Communicator) -> dict[str, tuple[float, float]]:
    products = {}
    for name, apply, takes, gives in maps(comm):
        x = everyones(comm, takes, 1)[comm.rank].requires_grad_()
        y = everyones(comm, gives, 2)[comm.rank]
        ax = apply(x)
        (aty,) = torch.autograd.grad(ax, x, y)
        mine = torch.stack([(ax.detach() * y).sum(), (x.detach() * aty).sum()])
        left, right = comm.all_reduce(mine).tolist()
        products[name] = (left, right)
    return products


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_backward_is_the_adjoint(ranks: Ranks, num_ranks: int) -> None:
    """<A x, y> = <x, A' y>, summed over the ranks."""
    for products in ranks(num_ranks).run(dot_products):
        assert len(products) == 2 + 4 * num_ranks
        for name, (left, right) in products.items():
            assert left != 0, name
            assert left == pytest.approx(right, rel=1e-12), name


def gradient_of_a_shared_mean(comm: Communicator) -> tuple[list[float], list[float]]:
    """Every rank computes the same loss from the whole of which it holds a part; it counts 1 / size on each."""
    mine = torch.full((2,), float(comm.rank + 1), dtype=torch.float64, requires_grad=True)
    loss = (collectives.all_reduce(mine.sum(), comm) ** 2) / 2
    (loss / comm.size).backward()
    assert mine.grad is not None
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    collectives.copy(weight * (comm.rank + 1), comm, root=1).sum().backward()
    assert weight.grad is not None
    return mine.grad.tolist(), weight.grad.tolist()


def test_gradients_of_what_all_ranks_compute_alike(ranks: Ranks) -> None:
    """The sum is 2 + 4 + 6 = 12, the derivative of 12^2 / 2; and 3 ranks use the 2 w of rank 1."""
    assert ranks(3).run(gradient_of_a_shared_mean) == [
        ([12.0, 12.0], [0.0, 0.0]),
        ([12.0, 12.0], [6.0, 6.0]),
        ([12.0, 12.0], [0.0, 0.0]),
    ]


def differentiate_twice(comm: Communicator) -> str:
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad((collectives.all_reduce(x, comm) ** 2).sum(), x, create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_second_derivative_is_an_error_rather_than_wrong(ranks: Ranks) -> None:
    assert all("once_differentiable" in message for message in ranks(2).run(differentiate_twice))
