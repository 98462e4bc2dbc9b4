"""Five steps with experts on several ranks, and the same steps of the plain model in one process: they should agree."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.models.experts import Experts, Mixture, Router
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import token_loss
from tests.pool.ranks import Ranks, on_ranks
from tests.support.short_runs import Task, check, engine_of, step, words_loss

VOCABULARY, LENGTH = 23, 8
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
    return with_uneven_scores(models.build("gpt", **{**SIZES, **MODELS[name]}).double())


def with_uneven_scores(model: nn.Module) -> nn.Module:
    """The model with other initial values: routers begin with scores that are almost even, so that rounding decides."""
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.1)
        if type(module).__name__ == "Router":
            nn.init.normal_(module.weight, std=0.5)
    return model


def task_of(name: str) -> Task:
    options = {"optimizer": "smooth AdamW", "tokens": VOCABULARY, "loss": token_loss, "num_steps": 5}
    return Task(partial(build, name), (LENGTH,), 4, **options)


@pytest.mark.parametrize(("name", "plan"), SHORT)
@pytest.mark.sample(2)
def test_five_steps(ranks: Ranks, name: str, plan: str) -> None:
    check(ranks, task_of(name), PLANS[plan])


def possible() -> Iterator[tuple[str, str]]:
    """Of GEMS the bias is refused, since it moves as the model runs; and a stage has a block at least."""
    for name, plan in product(MODELS, PLANS):
        if PLANS[plan].num_stages <= MODELS[name].get("num_layers", 2) and (name, plan) != ("bias", "experts 2, GEMS"):
            yield name, plan


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "plan"), tuple(possible()))
def test_five_steps_of_all(ranks: Ranks, name: str, plan: str) -> None:
    check(ranks, task_of(name), PLANS[plan])


class Widened(nn.Module):
    """Experts of features that ranks share, as a layer cut by columns made them; the router sees all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 12)
        self.router, self.experts = Router(8, Mixture(4)), Experts(4, 12, 10)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        routing = self.router(x)
        logits: Tensor = self.head(self.experts(self.wide(x).tanh(), routing.chosen, routing.weights))
        return logits


def widened() -> nn.Module:
    return with_uneven_scores(Widened().double())


class Weighed(Widened):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * sum(p.square().sum() for p in self.parameters())


PARTS = (("experts", "experts"), ("experts.up", "column"), ("experts.output", "row"))


@on_ranks(2)
def test_experts_that_a_model_reads_among_its_parameters(comm: Communicator) -> None:
    task = replace(task_of("softmax"), model=Weighed, loss=words_loss, styles=PARTS)
    with pytest.raises(Refusal, match=r"experts.* train without `experts` and `tensor`"):
        step(engine_of(comm, task, replace(ONE, tensor=2)), task, 0)


@pytest.mark.parametrize("moe", ["tensor", "expert"])
def test_experts_of_features_that_ranks_share(ranks: Ranks, moe: Any) -> None:
    styles = (("wide", "column"), *PARTS)
    task = replace(task_of("softmax"), model=widened, loss=words_loss, styles=styles, num_steps=2)
    check(ranks, task, replace(ONE, tensor=2, moe=moe))


def test_experts_without_any_token_are_gathered_too(ranks: Ranks) -> None:
    """Each rank has one token for one of 8 experts, so that replicas of the same experts often differ in having any."""
    check(ranks, replace(task_of("switch"), size=(1,)), PLANS["experts 2, data 2, ZeRO 3"])
