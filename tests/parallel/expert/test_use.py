"""Experts of images on tiles, and how experts were used: as one process does and sees it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import classification_loss
from mpi4dl.training.run import ExpertUse, expert_use
from tests.parallel.expert.test_training import optimizer_of
from tests.pool.ranks import Ranks
from tests.short_runs import EXACT, assert_close

BATCH, SIDE, STEPS = 4, 16, 3
TILES = Plan(((1, 2),), experts=2)
PLANS = [TILES, replace(TILES, tiles=((2, 2),), experts=1), Plan(((2, 1),), tensor=2, moe="expert")]


def build() -> nn.Module:
    torch.manual_seed(0)
    options = {"capacity_factor": 0.8, "every": 2, "z": 0.01, "shared_experts": 1}
    model = models.build("vit", 3, image_size=SIDE, num_layers=2, hidden=24, num_experts=4, **options).double()
    nn.init.normal_(model.get_parameter("blocks.1.feed_forward.router.weight"), std=0.5)
    return model


def train(comm: Communicator, plan: Plan) -> tuple[Engine, list[float], ExpertUse]:
    held = LocalStages.whole(build(), plan, comm)
    engine = Engine(held, plan, optimizer_of(held.parameters()), classification_loss, comm=comm)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64, generator=generator)
        labels = torch.randint(3, (BATCH,), generator=generator)
        boxes = [each.box for each in engine.reads(BATCH, (SIDE, SIDE))]
        tiles = [images[(slice(*box.batch), slice(None), *(slice(*side) for side in box.space))] for box in boxes]
        losses.append(engine.step(tiles, labels, (SIDE, SIDE)).loss)
    use = expert_use(engine)
    assert use is not None
    return engine, losses, use


def compare(comm: Communicator, plan: Plan) -> None:
    engine, losses, use = train(comm, plan)
    alone, expected, seen = train(comm.split(comm.rank), Plan())
    assert losses == pytest.approx(expected, rel=EXACT)
    assert list(use.loads) == ["blocks.1.feed_forward.router"]
    assert torch.equal(use.loads["blocks.1.feed_forward.router"], seen.loads["blocks.1.feed_forward.router"])
    assert (use.dropped, use.entropy) == pytest.approx((seen.dropped, seen.entropy))
    assert 0 < use.dropped < 1 < use.imbalance
    assert use.picture().shape[:2] == (1, 3)
    state, plain = engine.gather_state(), alone.gather_state()
    if state is not None and plain is not None:
        for name, value in plain.items():
            assert_close(state[name], value, EXACT, name)


@pytest.mark.parametrize(
    "plan", [PLANS[0], *(pytest.param(p, marks=pytest.mark.exhaustive) for p in PLANS[1:])], ids=str
)
def test_experts_of_tiles(ranks: Ranks, plan: Plan) -> None:
    ranks(plan.num_ranks).run(compare, plan)
