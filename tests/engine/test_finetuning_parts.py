"""Where ranks have parts of parameters: hooks see whole gradients, and what is frozen is cut and trained later."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpi4dl import models
from mpi4dl._patterns import select
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages, names_by_first
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import token_loss
from tests.pool.ranks import on_ranks
from tests.support.short_runs import EXACT, assert_close, assert_learnt_alike

VOCABULARY, LENGTH, BATCH, STEPS, DECAY = 23, 8, 4, 4, 0.6
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "context": 16, "num_layers": 2, "num_heads": 4, "hidden": 24}
EXPERTS = {"num_experts": 5, "ff_dim": 20}
FROZEN, THAWED = "blocks.0.*,*attention*", {2: "blocks.0.*", 3: "*attention*"}
ONE, TWO = Plan(((1,),)), Plan(((1,), (1,)), microbatches=2)
PLANS = [replace(ONE, tensor=2, data=2, zero=3), replace(TWO, experts=2)]


def build() -> nn.Module:
    torch.manual_seed(0)
    model = models.build("gpt", **SIZES, **EXPERTS).double()
    for name in select(FROZEN, names_by_first(model)):
        model.get_parameter(name).requires_grad_(False)
    return model


def hook(name: str, gradient: Tensor) -> Tensor:
    """What a part of a gradient does not tell: its norm, which is another one for each parameter."""
    return gradient / (gradient.norm() + 0.1) + 0.01 * gradient.mean()


def optimizer_of(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.01, eps=1e-2)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def plainly(waves: int) -> tuple[nn.Module, nn.Module]:
    model = build()
    optimizer, ema = optimizer_of(model.parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number, batch in enumerate(batches()):
        for name in select(THAWED.get(number, ""), names_by_first(model)):
            model.get_parameter(name).requires_grad_()
        optimizer.zero_grad()
        for part in batch.chunk(waves):
            (token_loss(model(part[:, :-1]), part[:, 1:]) / waves).backward()
        for name, p in model.named_parameters():
            p.grad = None if p.grad is None else hook(name, p.grad)
        optimizer.step()
        ema.update_parameters(model)
    return model, ema.module


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.sample(1)
@on_ranks()
def test_whole_gradients_and_layers_that_are_trained_later(comm: Communicator, plan: Plan) -> None:
    expected, average = plainly(plan.num_microbatches)
    staged = plan.num_stages > 1
    held = split(build, plan, comm, image=(BATCH, LENGTH)) if staged else LocalStages.whole(build(), plan, comm)
    optimizer = optimizer_of(held.parameters())
    engine = Engine(held, plan, optimizer, token_loss, comm=comm, gradient_hook=hook, ema=DECAY, bucket_bytes=4000)
    for number, batch in enumerate(batches()):
        if number in THAWED:
            engine.unfreeze(THAWED[number])
        boxes = [each.box for each in engine.reads(BATCH, (LENGTH,))]
        tiles = [batch[:, :-1][slice(*box.batch), slice(*box.space[0])] for box in boxes]
        engine.step(tiles, batch[:, 1:], (LENGTH,))
    assert_learnt_alike(engine, expected)
    with engine.averaged():
        state = engine.gather_state()
    for name, value in average.state_dict().items() if state is not None else ():
        assert state is not None
        assert_close(state[name], value, EXACT, name)
