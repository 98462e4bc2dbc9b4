"""Weights of 8 and 4 bits: near the whole ones, alike whatever else is in the batch, and cut over ranks too."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator, world
from mpi4dl.datasets.text.tokenizer import ByteTokenizer
from mpi4dl.models.experts import Experts, Mixture, grouped_linear
from mpi4dl.models.gpt import GPT
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.text.batcher import Batcher, Event
from mpi4dl.text.loading import Precision, QuantizedExperts, QuantizedWeight, lower_weights
from mpi4dl.text.model import PagedModel
from mpi4dl.text.options import Sampling
from tests.pool.ranks import Ranks


@pytest.mark.parametrize(("bits", "steps", "inputs"), [(8, 127, 64), (8, 127, 40), (4, 7.5, 64)])
def test_products_are_near(bits: int, steps: float, inputs: int) -> None:
    """Each weight is off by half a step at most, and by what bfloat16 rounds of scales."""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(43, inputs), torch.randn(3, 5, inputs).bfloat16(), torch.randn(43).bfloat16()
    found = F.linear(x, QuantizedWeight.of(weight, bits), bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    most = x.double().abs().sum(-1, keepdim=True) * float(weight.abs().max()) / steps
    assert found.shape == exact.shape
    assert ((found - exact).abs() <= 0.5 * most + 0.02 * exact.abs().max()).all()
    assert (found - exact).square().mean().sqrt() < 0.1 * exact.square().mean().sqrt()
    alone = F.linear(x[1, 2], QuantizedWeight.of(weight, bits), bias)
    assert torch.equal(alone, found[1, 2])


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_have_the_products_of_their_matrices(bits: int) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(3, 24, 64), torch.randn(11, 64).bfloat16()
    experts = QuantizedExperts.of(weight, bits)
    found = grouped_linear(rows, torch.nn.Parameter(experts, requires_grad=False), torch.tensor([2, 0, 9]))
    first, _, last = (QuantizedWeight.of(matrix, bits) for matrix in weight)
    assert torch.equal(found, torch.cat([F.linear(rows[:2], first), F.linear(rows[2:], last)]))
    assert experts.nbytes == 3 * first.nbytes < weight.nbytes / 2
    with pytest.raises(TypeError, match="only the layer whose weight it is can use it"):
        experts.add(1)


MIXTURE = Mixture(4, shared_experts=1)


def answers(
    comm: Communicator, numbers: dict[str, int], precision: Precision, mixture: Mixture | None = None
) -> list[list[tuple[int | None, float | None]]]:
    torch.manual_seed(0)
    model = GPT(257, 32, 2, 4, hidden=64, ff_dim=128, mixture=mixture)
    held = LocalStages.whole(model, Plan.of(tiles=((1,),), **numbers), comm)
    lower_weights(held.requires_grad_(False), precision)
    found: list[list[Event]] = [[], [], []]
    for together in ((0, 1), (2,)):
        batcher = Batcher(held, comm, ByteTokenizer(), 32)
        if comm.rank:
            batcher.follow()
        else:
            for place in together:
                prompt: Any = ((5, 6, 7), (1,) * 20, (5, 6, 7))[place]
                batcher.submit(prompt, Sampling(max_tokens=6, temperature=0), found[place].append)
            batcher.stop(drain=True)
            batcher.run()
        batcher.close()
    return [[(event.token, event.logprob) for event in events] for events in found]


@pytest.mark.parametrize(
    "precision", ["int8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("bf16", "int4"))]
)
def test_text_of_fewer_bits(ranks: Ranks, precision: str) -> None:
    one, two = ranks(1).run(answers, {}, precision)[0], ranks(2).run(answers, {"tensor": 2}, precision)[0]
    for found in (one, two):
        assert found[0] == found[2]  # in a batch and alone
    whole = ranks(1).run(answers, {}, "fp32")[0]
    first = [each[0][0][1] for each in (one, two, whole)]
    assert first[0] == pytest.approx(first[2], abs=0.05)
    assert first[1] == pytest.approx(first[2], abs=0.05)
    assert first[0] != first[2]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "numbers", [{}, *(pytest.param({way: 2}, marks=pytest.mark.exhaustive) for way in ("experts", "tensor"))]
)
def test_mixtures_of_experts_alone_and_in_a_batch(ranks: Ranks, numbers: dict[str, int], precision: str) -> None:
    """To the bit: how many rows an expert has depends on who else is there, what it makes of a row does not."""
    found = ranks(2 if numbers else 1).run(answers, numbers, precision, MIXTURE)[0]
    assert found[0] == found[2]
    if precision != "fp32":
        whole = answers(world(), {}, "fp32", MIXTURE)
        assert found[0][0][1] == pytest.approx(whole[0][0][1], abs=0.05)
        assert found[0][0][1] != whole[0][0][1]


def test_experts_are_given_back_as_they_were() -> None:
    held = LocalStages.whole(GPT(257, 32, 1, 4, hidden=64, mixture=MIXTURE), Plan.of(tiles=((1,),)), world())
    (experts,) = (module for module in held.modules() if isinstance(module, Experts))
    model = PagedModel(held, world(), 16)
    assert experts.row_multiple > 0
    model.close()
    assert experts.row_multiple == 0


def test_four_bits_want_groups_of_inputs() -> None:
    held = LocalStages.whole(GPT(257, 32, 1, 2, hidden=48), Plan.of(tiles=((1,),)), world())
    with pytest.raises(ValueError, match="has 48 inputs on a rank, but --precision int4 takes multiples of 32"):
        lower_weights(held, "int4")
