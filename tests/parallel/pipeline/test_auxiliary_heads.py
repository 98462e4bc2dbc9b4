"""Models with auxiliary heads, cut into stages on tiles: steps and evaluation are those of plain PyTorch."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import NUM_CLASSES, Task, check


def build(name: str, **options: Any) -> nn.Module:
    model = models.build(name, NUM_CLASSES, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy, of auxiliary heads with the customary weight of 0.4."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    first, *others = outputs.values() if isinstance(outputs, dict) else outputs
    return F.cross_entropy(first, targets) + 0.4 * sum(F.cross_entropy(other, targets) for other in others)


CASES: dict[str, tuple[tuple[int, int], dict[str, Any], bool]] = {  # images, options, and whether they are dense
    "googlenet": ((64, 49), {}, False),
    "deeplabv3_mobilenet_v3_large": ((45, 37), {"aux_loss": True}, True),
    "lraspp_mobilenet_v3_large": ((45, 37), {}, True),
    "inception_v3": ((299, 299), {}, False),
    "fcn_resnet50": ((45, 37), {"aux_loss": True}, True),
}
SLOW = ("googlenet", "inception_v3", "fcn_resnet50")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in SLOW else []) for name in CASES]
)
@pytest.mark.sample(1)
def test_a_model_with_auxiliary_heads_in_stages(ranks: Ranks, name: str) -> None:
    """The last step is one with all modules frozen by `eval()`."""
    size, options, dense = CASES[name]
    task = Task(partial(build, name, **options), size, 3, "slow SGD", dense, loss=loss_of, num_steps=2)
    check(ranks, replace(task, frozen_last=True, tolerance=1e-9), Plan(((1, 2), (1, 2))))
