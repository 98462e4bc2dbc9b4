"""Mixtures of experts against loops over tokens."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpi4dl import models
from mpi4dl.models.experts import Experts, Mixture, Router, grouped_linear
from mpi4dl.models.layers import Penalized

TOKENS, HIDDEN = 7, 6


def x_of(sequences: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(sequences, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_token_meets_those_chosen_for_it(activation: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = Experts(3, HIDDEN, 5, activation).to(dtype), x_of().to(dtype)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(3 * TOKENS)]).view(3, TOKENS, 2)  # 3 is none
    weights = torch.rand(3, TOKENS, 2, dtype=dtype)
    expected = torch.zeros_like(x)
    for n in range(3):
        for t in range(TOKENS):
            for expert, weight in zip(chosen[n, t].tolist(), weights[n, t], strict=True):
                if expert < 3:
                    up = layer.up[expert] @ x[n, t]
                    gate = None if layer.gate is None else F.silu(layer.gate[expert] @ x[n, t])
                    inner = F.gelu(up, approximate="tanh") if gate is None else gate * up
                    expected[n, t] = expected[n, t] + weight * (layer.output[expert] @ inner)
    found = layer(x, chosen, weights)
    close = 1e-5 if dtype is torch.float32 else 1e-12  # of the largest: small elements are differences of large ones
    for one, other in zip(
        (found, *torch.autograd.grad(found.square().sum(), list(layer.parameters()))),
        (expected, *torch.autograd.grad(expected.square().sum(), list(layer.parameters()))),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=close * float(other.detach().abs().max()))


@pytest.mark.parametrize("width", [3, 8])  # 3 is not of 16 bytes, which grouped_mm wants
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_groups_may_be_empty(dtype: torch.dtype, width: int) -> None:
    rows, weight = torch.randn(4, width, dtype=dtype), torch.randn(3, width, width, dtype=dtype)
    assert torch.equal(grouped_linear(rows, weight, torch.tensor([0, 4, 0])), F.linear(rows, weight[1]))
    assert grouped_linear(rows[:0], weight, torch.tensor([0, 0, 0])).shape == (0, width)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_weights_and_penalties(scoring: Any) -> None:
    torch.manual_seed(0)
    router, x = Router(HIDDEN, Mixture(4, 2, scoring=scoring, balance=0.1, z=0.01)).double(), x_of()
    torch.nn.init.normal_(router.weight)
    router.requires_grad_(False)
    x = x.detach()
    chosen, weights, penalty, _ = router(x)
    for n in range(len(x)):
        balance, squares = torch.zeros(4, 2, dtype=torch.float64), 0.0
        for t in range(TOKENS):
            logits = router.weight @ x[n, t]
            scores = logits.softmax(0) if scoring == "softmax" else logits.sigmoid()
            best = scores.argsort(descending=True)[:2]
            assert chosen[n, t].tolist() == best.tolist()
            torch.testing.assert_close(weights[n, t], scores[best] / scores[best].sum())
            balance[:, 0] += F.one_hot(best, 4).sum(0).double() / (2 * TOKENS)
            balance[:, 1] += scores / scores.sum() / TOKENS
            squares += float(logits.exp().sum().log()) ** 2 / TOKENS
        expected = 0.1 * 4 * float((balance[:, 0] * balance[:, 1]).sum()) + 0.01 * squares
        assert float(penalty[n]) == pytest.approx(expected, rel=1e-12)


def test_an_expert_takes_the_first_tokens_of_each_sequence() -> None:
    torch.manual_seed(0)
    free, limited = (Router(HIDDEN, Mixture(4, 2, capacity_factor=factor)).double() for factor in (None, 0.6))
    limited.load_state_dict(free.state_dict())
    x = x_of().detach()
    capacity = math.ceil(0.6 * 2 * TOKENS / 4)
    with torch.no_grad():
        wanted, got = free(x), limited(x)
    dropped = 0
    for n in range(len(x)):
        taken = [0] * 4
        for t in range(TOKENS):
            for k in range(2):
                expert = int(wanted.chosen[n, t, k])
                fits = taken[expert] < capacity
                taken[expert] += 1
                dropped += not fits
                assert int(got.chosen[n, t, k]) == (expert if fits else 4)
                assert float(got.weights[n, t, k]) == (float(wanted.weights[n, t, k]) if fits else 0.0)
    assert dropped


def test_the_bias_moves_choices_but_not_weights() -> None:
    torch.manual_seed(0)
    router, x = Router(HIDDEN, Mixture(4, 1, balance=0.0, bias_rate=0.5)).double(), x_of()
    assert router.bias is not None
    assert not router.penalizes
    first = router(x)
    load = torch.bincount(first.chosen.flatten(), minlength=4).double()
    assert torch.equal(router.bias, 0.5 * (load.mean() - load).sign())
    again = router.eval()(x)
    assert not torch.equal(first.chosen, again.chosen)
    torch.testing.assert_close(again.weights, again.scores.gather(-1, again.chosen))
    assert torch.equal(router.bias, 0.5 * (load.mean() - load).sign())  # in evaluation it stays


def test_equal_scores_and_infinities() -> None:
    router = Router(HIDDEN, Mixture(4, 2)).double()
    torch.nn.init.zeros_(router.weight)
    chosen, weights, _, _ = router(x_of())
    assert bool((chosen.sort(-1).values.diff(dim=-1) > 0).all())  # two different ones
    assert torch.equal(weights, torch.full_like(weights, 0.5))


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_the_penalty_is_there_in_training_alone(name: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden": 24, "num_heads": 2, "num_experts": 4, "every": 2}
    inputs = torch.randint(257, (2, 5)) if name == "gpt" else torch.randn(2, 3, 32, 32)
    model = models.build(name, **sizes)
    assert [block.mixed for block in model.blocks] == [False, True]
    outputs = model(inputs)
    assert isinstance(outputs, Penalized)
    assert outputs.penalty.shape == (2,)
    assert isinstance(model.eval()(inputs), Tensor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 4, "top_k": 5}, "top_k=5 experts cannot be chosen of num_experts=4"),
        ({"num_experts": 0}, "num_experts=0 is not possible"),
        ({"num_experts": 4, "scoring": "max"}, "scoring='max' is unknown"),
        ({"num_experts": 4, "capacity_factor": -1.0}, "capacity_factor=-1.0 must be above 0"),
        ({"num_experts": 4, "balance": float("nan")}, "balance=nan must be 0 or more"),
        ({"num_experts": 4, "shared_experts": -1}, "shared_experts=-1 must be 0 or more"),
        ({"top_k": 1}, "needs 'num_experts' beside 'top_k'"),
        ({"num_expert": 4}, "has no option 'num_expert'"),
    ],
)
def test_what_is_not_possible(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        models.build("gpt", **options)
