"""Experts of images on tiles, and how experts were used: as one process does and sees it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import classification_loss
from mpi4dl.training.report import ExpertUse, expert_use
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check, train

TILES = Plan(((1, 2),), experts=2)
PLANS = [TILES, replace(TILES, tiles=((2, 2),), experts=1), Plan(((2, 1),), tensor=2, moe="expert")]


def build() -> nn.Module:
    options = {"capacity_factor": 0.8, "every": 2, "z": 0.01, "shared_experts": 1}
    model = models.build("vit", 3, image_size=16, num_layers=2, hidden=24, num_experts=4, **options).double()
    nn.init.normal_(model.get_parameter("blocks.1.feed_forward.router.weight"), std=0.5)
    return model


def use_of(engine: Engine) -> Callable[[], ExpertUse | None]:
    return lambda: expert_use(engine)


@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(p, marks=pytest.mark.exhaustive) for p in PLANS[1:])], ids=str
)
def test_experts_of_tiles(ranks: Ranks, plan: Plan) -> None:
    task = Task(build, (16, 16), optimizer="smooth AdamW", loss=classification_loss)
    uses = [outcome.watched for outcome in check(ranks, task, plan, use_of)]
    seen: ExpertUse = ranks(1).run(train, task, Plan(), False, use_of)[0].watched
    for use in uses:
        assert list(use.loads) == ["blocks.1.feed_forward.router"]
        assert torch.equal(use.loads["blocks.1.feed_forward.router"], seen.loads["blocks.1.feed_forward.router"])
        assert (use.dropped, use.entropy) == pytest.approx((seen.dropped, seen.entropy))
        assert 0 < use.dropped < 1 < use.imbalance
        assert use.picture().shape[:2] == (1, 3)
