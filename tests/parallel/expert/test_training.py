"""Five steps with experts on several ranks, and the same steps of the plain model in one process: they should agree."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import token_loss
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_learnt_alike

VOCABULARY, LENGTH, BATCH, STEPS = 23, 8, 4, 5
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "context": 16, "num_layers": 2, "num_heads": 4, "hidden": 24}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"num_experts": 4, "ff_dim": 20, "z": 0.01},
    "sigmoid": {"num_experts": 5, "shared_experts": 1, "scoring": "sigmoid", "activation": "swiglu", "ff_dim": 12},
    "capacity": {"num_experts": 4, "capacity_factor": 0.7, "every": 2},
    "bias": {"num_experts": 4, "balance": 0.0, "bias_rate": 0.01},
    "switch": {"num_experts": 8, "top_k": 1, "balance_over": "batch", "num_layers": 1},
}
ONE, TWO = Plan(((1,),)), Plan(((1,), (1,)), microbatches=2)
PLANS = {
    "experts 2": replace(ONE, experts=2),
    "experts 2, pieces": replace(ONE, experts=2, moe_pieces=3),
    "experts 4": replace(ONE, experts=4),
    "experts 2, data 2": replace(ONE, experts=2, data=2),
    "experts 2, tensor 2": replace(ONE, experts=2, tensor=2),
    "experts 2, whole experts on tensor 2": replace(ONE, experts=2, tensor=2, moe="expert"),
    "tensor 2": replace(ONE, tensor=2),
    "whole experts on tensor 2, sequence": replace(ONE, tensor=2, moe="expert", sequence=True),
    "experts 2, stages 2": replace(TWO, experts=2),
    "experts 2, ZeRO 1": replace(ONE, experts=2, zero=1),
    "experts 2, data 2, ZeRO 3": replace(ONE, experts=2, data=2, zero=3),
    "data 2": replace(ONE, data=2),
    "context 2": Plan(((2,),)),
    "experts 2, context 2": Plan(((2,),), experts=2),
    "experts 2, GEMS": replace(TWO, experts=2, bidirectional=1, microbatches=1),
}
SHORT = [("softmax", "experts 2, data 2, ZeRO 3"), ("sigmoid", "experts 2, whole experts on tensor 2")]
SHORT += [("capacity", "experts 2, stages 2"), ("bias", "experts 2, context 2")]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = models.build("gpt", **{**SIZES, **MODELS[name]}).double()
    for module in model.modules():  # routers begin with scores that are almost even
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.1)
        if type(module).__name__ == "Router":
            nn.init.normal_(module.weight, std=0.5)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)


def train_plain(model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor], waves: int) -> list[float]:
    """The losses of a plain loop, which takes each batch in so many microbatches."""
    optimizer, losses = optimizer_of(model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        total = 0.0
        for part in batch.chunk(waves):
            loss = loss_of(model(part[:, :-1]), part[:, 1:]) / waves
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def compare(comm: Communicator, name: str, plan: Plan) -> None:
    expected = build(name)
    losses = train_plain(expected, token_loss, plan.num_microbatches)
    if plan.num_stages == 1:
        held = LocalStages.whole(build(name), plan, comm)
    else:
        atoms = Cuttable(build(name)).names
        counts = (atoms.index("blocks.1"), len(atoms) - atoms.index("blocks.1"))
        held = split(lambda: build(name), plan, comm, balance=counts, image=(BATCH, LENGTH))
    engine = Engine(held, plan, optimizer_of(held.parameters()), token_loss, comm=comm)
    for batch, loss in zip(batches(), losses, strict=True):
        boxes = [each.box for each in engine.reads(BATCH, (LENGTH,))]
        tiles = [batch[:, :-1][slice(*box.batch), slice(*box.space[0])] for box in boxes]
        assert engine.step(tiles, batch[:, 1:], (LENGTH,)).loss == pytest.approx(loss, rel=EXACT)
    assert_learnt_alike(engine, expected)


@pytest.mark.parametrize(("name", "plan"), SHORT)
@pytest.mark.sample(2)
def test_five_steps(ranks: Ranks, name: str, plan: str) -> None:
    ranks(PLANS[plan].num_ranks).run(compare, name, PLANS[plan])


def possible() -> Iterator[tuple[str, str]]:
    """Of GEMS the bias is refused, since it moves as the model runs; and a stage has a block at least."""
    for name, plan in product(MODELS, PLANS):
        if PLANS[plan].num_stages <= MODELS[name].get("num_layers", 2) and (name, plan) != ("bias", "experts 2, GEMS"):
            yield name, plan


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "plan"), tuple(possible()))
def test_five_steps_of_all(ranks: Ranks, name: str, plan: str) -> None:
    ranks(PLANS[plan].num_ranks).run(compare, name, PLANS[plan])
