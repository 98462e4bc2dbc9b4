"""Which modules train is the user's choice: a step leaves modes as they are, and an evaluation puts them back."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import BOTH, FROZEN, NUM_CLASSES, TILES_2x2, batch_of, check, tiles_of

STAGES = Plan(((1, 2), (1, 1)), microbatches=2)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (TILES_2x2, {}),
        (BOTH, {}),
        (Plan(data=2, zero=3), {}),
        (STAGES, {"recompute": True}),
        (Plan(((1, 1), (1, 1)), bidirectional=1), {}),
    ],
    ids=str,
)
def test_frozen_norms_stay_frozen_in_steps_and_after_evaluations(
    ranks: Ranks, plan: Plan, options: dict[str, Any]
) -> None:
    check(ranks, FROZEN.with_engine(**options), plan)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Encoder(nn.Module):
    """Cut between its blocks; it drops everything by a function, as long as it is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.dropout(x, 1.0, self.training)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = Encoder(), nn.Linear(3, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x).mean((2, 3)))


def drop(comm: Communicator, frozen: bool) -> bool:
    """Whether a step passes a gradient to the first layer of an encoder that is frozen, or is not."""
    plan = Plan(((1, 1), (1, 1)))
    held = split(lambda: Model().double(), plan, comm, balance=(1, 4), image=(4, 3, *FROZEN.size))
    for name, module in held.named_modules():
        if frozen and name.endswith("encoder"):
            module.eval()
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.1), F.cross_entropy, comm=comm)
    images, targets = batch_of(FROZEN, 0)
    engine.step(tiles_of(images, engine), targets, FROZEN.size)
    found = engine.gather_gradients() or {}
    first = found.get("encoder.blocks.0.conv.weight")
    return first is not None and bool(first.any())


def test_functions_of_a_module_that_is_cut_follow_its_mode(ranks: Ranks) -> None:
    assert ranks(2).run(drop, False)[0] is False
    assert ranks(2).run(drop, True)[0] is True
