"""A model whose outputs are larger than its inputs trains as plain PyTorch does, by every plan."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.streaming.leading_part import StreamOptions
from tests.pool.ranks import Ranks
from tests.support.short_runs import Task, check

ONE = (1, 1)


def upscale(scale: int) -> nn.Module:
    """ESPCN with an instance norm: Shi et al. 2016."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, padding=2),
        nn.InstanceNorm2d(6, affine=True),
        nn.Tanh(),
        nn.Conv2d(6, 3 * scale**2, 3, padding=1),
        nn.PixelShuffle(scale),
    ).double()


def l1(outputs: Tensor, labels: Tensor) -> Tensor:
    """Targets as large as outputs, each pixel another, which the labels of the inputs' pixels draw."""
    scale = outputs.shape[-1] // labels.shape[-1]
    places = torch.arange(outputs[0].numel(), dtype=torch.float64).view(outputs.shape[1:])
    drawn = labels.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    return F.l1_loss(outputs, torch.cos(places + drawn[:, None]))


PLANS = {
    "tiles": (Plan(((2, 2),)), None),
    "replicas and ZeRO 2": (Plan(((1, 2),), data=2, zero=2), None),
    "tiles, then one": (Plan(((2, 1), ONE), microbatches=2), None),
    "streamed tiles": (Plan(((1, 2),)), StreamOptions((3, 2))),
}


@pytest.mark.parametrize("scale", [2, 4])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sample(3)
def test_every_plan_equals_plain_pytorch(ranks: Ranks, name: str, scale: int) -> None:
    plan, stream = PLANS[name]
    stages = (2, 3) if plan.num_stages > 1 else "flops"
    check(ranks, Task(partial(upscale, scale), (13, 18), dense=True, loss=l1, balance=stages, stream=stream), plan)
