"""What would train otherwise than in plain PyTorch is told before it begins."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from mpi4dl.comm import Communicator
from mpi4dl.parallel.replicas.optimizer_traits import backward_hook_in, problem_with
from mpi4dl.parallel.replicas.reducer import Reducer
from tests.pool.ranks import on_ranks


def parameter(num_elements: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(1.0, 1 + num_elements))


def step(p: nn.Parameter, optimizer: optim.Optimizer) -> optim.Optimizer:
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adagrad])
def test_a_new_optimizer_of_the_models_parameters_is_fine(kind: Any) -> None:
    p = parameter(2)
    assert problem_with(kind([p]), {"p": p}, num_holders=2) is None


def test_what_is_wrong_with_an_optimizer() -> None:
    p, q = parameter(2), parameter(2)
    assert problem_with(optim.LBFGS([p]), {"p": p}) == (
        "LBFGS computes the loss many times in a step: choose an optimizer that does not"
    )
    assert "SparseAdam takes sparse gradients alone" in str(problem_with(optim.SparseAdam([p]), {"p": p}))
    assert "make a new one, of model.parameters()" in str(problem_with(optim.SGD([p, q]), {"p": p}))
    for kind in (optim.Adam, optim.Adagrad):
        assert "has made steps already" in str(problem_with(step(p, kind([p])), {"p": p}))
    assert "has made steps already" in str(problem_with(step(p, optim.SGD([p], momentum=0.9)), {"p": p}))


def test_parameters_in_the_same_memory() -> None:
    whole, other = parameter(6), parameter(6)
    memory = torch.zeros(6)
    first, second = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
    apart = {"whole": whole, "first": first, "other": other, "second": second}
    assert problem_with(optim.SGD([*apart.values()]), apart) is None
    within = nn.Parameter(whole.data.view(2, 3)[:, 1])
    found = problem_with(optim.SGD([within]), apart | {"within": within})
    assert found == "whole and within are different parameters in the same memory: use one parameter for both"


def test_hooks_on_gradients() -> None:
    p, q = parameter(2), parameter(2)
    p.register_hook(lambda gradient: gradient.clamp(-1, 1))
    q.register_post_accumulate_grad_hook(lambda parameter: None)
    for name, hooked in (("p", p), ("q", q)):
        found = partial(problem_with, optim.SGD([hooked]), {name: hooked})
        assert found(num_holders=1, num_passes=2) is None
        assert found(num_holders=2, num_passes=1) is None
        said = f"{name} has a hook on its gradient, which would have to see those of 2 microbatches apart, but ranks"
        assert str(found(num_holders=2, num_passes=2)).startswith(said)
        assert "but ranks have parts of parameters" in str(found(in_parts=True))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert backward_hook_in(model, num_ranks=2) is None
    handle = getattr(model[1], register)(lambda *_: None)
    assert str(backward_hook_in(model, num_ranks=2)).startswith("1 has a backward hook, which would see the part of ")
    assert backward_hook_in(model, num_ranks=1) is None
    handle.remove()
    assert backward_hook_in(model, num_ranks=2) is None
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    assert str(backward_hook_in(model, num_ranks=2)).startswith("Sequential has a backward hook")
    handle.remove()


@on_ranks(1)
def test_how_another_engine_watches_is_no_hook(comm: Communicator) -> None:
    p = parameter(2)
    Reducer([p], comm).attach()
    assert problem_with(optim.SGD([p]), {"p": p}, num_holders=2) is None
