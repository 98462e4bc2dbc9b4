"""Hooks on the gradients of parameters, called when these are whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Refusal
from mpi4dl.parallel.replicas.group import call_hooks


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
