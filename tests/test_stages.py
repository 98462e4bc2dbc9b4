"""Stages, pipelines, GEMS, tiles and replicas together: every combination trains as a plain PyTorch loop does."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.held import split
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.training import (
    DEEP,
    DENSE,
    DROPPING,
    TORCHVISION,
    UNUSED,
    Outcome,
    Task,
    assert_like,
    batch_of,
    build,
    check,
    model_of,
    optimizer_of,
    plain,
    tiles_of,
    train,
)

# In smaller images, or fewer of them, batch norm sees so few values that plain PyTorch differs from itself by more
# than `EXACT` if it only computes in another memory format. An optimizer that divides by the gradient does likewise.
RESNET = replace(DEEP, batch=8)
UNET = replace(DENSE, batch=8)
AMOEBANET = Task("amoebanetd", (64, 64), batch=16, model_options=(("num_layers", 3), ("num_filters", 16)))

ONE = (1, 1)
SQUARE, VERTICAL, HORIZONTAL = (2, 2), (1, 2), (2, 1)
SLICINGS = {"square": SQUARE, "vertical": VERTICAL, "horizontal": HORIZONTAL}
SCHEDULES = {
    "LP": Plan(schedule="layer", microbatches=2),
    "PP": Plan(schedule="1f1b", microbatches=4),
    "GEMS+LP": Plan((ONE, ONE), schedule="layer", bidirectional=1, microbatches=1),
    "GEMS+PP": Plan((ONE, ONE), schedule="1f1b", bidirectional=1, microbatches=2),
}


def combination(name: str, data: int, slicing: str = "") -> Plan:
    """As MPI4DL names them: three stages of one rank each, or with SP a stage on tiles in front of one or two others.

    Eight ranks are the most that there are, so that a square leaves no room for a second replica.
    """
    if not slicing:
        return replace(SCHEDULES[name], tiles=(ONE,) * 3, batch_ways=(), data=data)
    behind = 1 if slicing == "square" or data == 1 else 2
    return replace(SCHEDULES[name], tiles=(SLICINGS[slicing], *(ONE,) * behind), batch_ways=(), data=data)


def everything() -> list[tuple[Task, Plan]]:
    """Each combination, with one replica and two, in each slicing: all for one model, a choice for the slow ones."""
    cases = [(RESNET, combination(name, data)) for name in SCHEDULES for data in (1, 2)]
    slicings = [("square", 1), *((slicing, data) for slicing in ("vertical", "horizontal") for data in (1, 2))]
    cases += [(RESNET, combination(name, data, slicing)) for name in SCHEDULES for slicing, data in slicings]
    for task, first in ((AMOEBANET, 0), (UNET, 2)):
        for i, name in enumerate(SCHEDULES, start=first):
            slicing, data = slicings[i % len(slicings)]
            cases += [(task, combination(name, 1 + i % 2)), (task, combination(name, data, slicing))]
    return cases


def label(value: object) -> str:
    return value.describe().replace(", ", "-") if isinstance(value, Plan) else str(value)


@pytest.mark.parametrize(("task", "plan"), everything(), ids=label)
def test_every_combination_equals_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)
