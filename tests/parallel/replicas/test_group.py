"""Hooks are called when gradients are whole, and gradients of one rank are what a Reducer of one would have."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.replicas.group import LocalGradients, call_hooks
from mpi4dl.parallel.replicas.reducer import Reducer, sums_on_host
from tests.pool.ranks import on_ranks


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def forget(p: Tensor) -> None:
    p.grad = None


def add_one(p: Tensor) -> None:
    p.grad.add_(1)


@torch.no_grad()
def step(p: Tensor) -> None:
    p.sub_(p.grad)


def test_they_are_called_in_the_order_of_autograd() -> None:
    p, plain = parameter(), parameter()
    for each in (plain, p):
        each.register_post_accumulate_grad_hook(add_one)
        each.register_hook(lambda gradient: gradient * 2)
        each.register_hook(lambda gradient: gradient + 3)
    (plain * torch.tensor([1.0, 2.0])).sum().backward()
    assert torch.equal(call_hooks("p", p, torch.tensor([1.0, 2.0])), plain.grad)
    assert p.grad is None


@pytest.mark.parametrize("hook", [forget, step])
def test_the_step_is_not_theirs(hook: Callable[[Tensor], None]) -> None:
    p = parameter()
    p.register_post_accumulate_grad_hook(hook)
    with pytest.raises(Refusal, match="a hook on the gradient of p steps, or takes the gradient away"):
        call_hooks("p", p, torch.ones(2))


def test_they_return_gradients() -> None:
    p = parameter()
    p.register_hook(lambda gradient: gradient.sum())
    with pytest.raises(ValueError, match=r"gradient of p, of shape \(2,\), but returned \(\)"):
        call_hooks("p", p, torch.ones(2))


class Model(nn.Module):
    """Sparse gradients, channels last, a parameter without a gradient and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.idle = nn.Linear(2, 2)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words(torch.tensor([0, 2, 2])).sum(0) * self.image(x).mean((0, 2, 3))
        return found.square().sum() + self.empty.sum()


def model_after(reducer_of: object, num_passes: int) -> tuple[Model, Reducer | LocalGradients]:
    torch.manual_seed(0)
    model = Model()
    reducer = reducer_of(list(model.parameters()))  # type: ignore[operator]
    for _ in range(2):  # the first step is forgotten
        reducer.prepare(accumulate=True)
        for number in range(num_passes):
            reducer.begin_pass(last=number + 1 == num_passes)
            model(torch.randn(2, 3, 5, 5)).backward()
            reducer.end_pass()
        reducer.finish()
    return model, reducer


@pytest.mark.parametrize("num_passes", [1, 3])
@on_ranks(1)
def test_alone_is_a_reducer_of_one_rank(comm: Communicator, num_passes: int) -> None:
    ours, alone = model_after(LocalGradients, num_passes)
    theirs, reducer = model_after(lambda parameters: Reducer(parameters, comm).attach(), num_passes)
    assert alone.used == reducer.used == [True, True, True, True, False, False]
    assert sums_on_host([alone.squares()]) == pytest.approx(sums_on_host([reducer.squares()]), rel=1e-6)
    for each in (alone, reducer):
        each.scale(0.5)
        each.scale(1.0)
        each.change(lambda i, gradient: gradient + i)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            assert p.grad.layout is torch.strided
            torch.testing.assert_close(p.grad, q.grad)


def test_without_gradients_there_is_nothing_to_square() -> None:
    alone = LocalGradients([nn.Parameter(torch.ones(2))])
    alone.prepare()
    alone.finish()
    assert (alone.used, alone.squares()) == ([False], [])
    alone.scale(2.0)
