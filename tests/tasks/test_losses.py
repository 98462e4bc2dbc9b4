"""mpi4dl.tasks.losses: on tiles, in microbatches, on replicas and in stages the loss is that of the whole batch."""

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.parallel.plan import Plan
from mpi4dl.tasks.losses import build_loss
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, assert_close
from tests.tasks.cases import (
    BOTH,
    CASES,
    CHARBONNIER,
    CLASSES_OF_SAMPLES,
    DICE_OF_SAMPLES,
    EFRON,
    MS_SSIM,
    OF_SAMPLES,
    PERCEPTUAL,
    SMOOTH,
    SSIM,
    WEIGHTED,
    Case,
    by_plain_pytorch,
    on_ranks,
)

TILES, SPLIT = Plan(((2, 2),)), Plan(((1, 2),), data=2, microbatches=2)
WAYS = Plan(((1, 2),), batch_ways=(2,))
STAGES = Plan(((1, 2), (1, 2)), microbatches=3)
GEMS = Plan(((1, 1), (1, 1)), bidirectional=1, microbatches=2)


def agree(ranks: Ranks, case: Case, plan: Plan, count: int) -> None:
    losses, model = by_plain_pytorch(case, count)
    for found, state in ranks(plan.num_ranks).run(on_ranks, case, plan, count):
        assert found == pytest.approx(losses, rel=EXACT)
        for name, value in model.state_dict().items() if state else ():
            assert_close(state[name], value, EXACT, name)


@pytest.mark.parametrize(
    ("case", "plan", "count"),
    [
        *((WEIGHTED, SPLIT, 7), (WEIGHTED, STAGES, 6), (BOTH, TILES, 2), (SMOOTH, SPLIT, 7), (EFRON, WAYS, 9)),
        *((OF_SAMPLES, SPLIT, 7), (DICE_OF_SAMPLES, WAYS, 8), (CLASSES_OF_SAMPLES, STAGES, 6)),
        *((CHARBONNIER, TILES, 2), (CHARBONNIER, SPLIT, 7), (CHARBONNIER, STAGES, 6)),
        *((SSIM, STAGES, 6), (MS_SSIM, TILES, 2), (MS_SSIM, SPLIT, 7), (PERCEPTUAL, TILES, 2), (PERCEPTUAL, STAGES, 6)),
    ],
    ids=str,
)
def test_a_loss_is_that_of_the_whole_batch(ranks: Ranks, case: Case, plan: Plan, count: int) -> None:
    agree(ranks, case, plan, count)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_loss_is_its_formula(ranks: Ranks, case: Case) -> None:
    """On one rank."""
    agree(ranks, case, Plan(), 9)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_focal_without_focus_is_cross_entropy(gamma: float) -> None:
    outputs, targets = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1, 0])
    (found,) = build_loss("focal", gamma=gamma).sums(outputs, targets)
    right = outputs.softmax(1)[range(5), targets]
    assert float(found) == pytest.approx(float((-((1 - right) ** gamma) * right.log()).sum()))
    assert (float(found) == pytest.approx(float(F.cross_entropy(outputs, targets, reduction="sum")))) == (gamma == 0)


def test_a_perceptual_loss_says_what_is_wrong_with_its_weights() -> None:
    with pytest.raises(ValueError, match=r"needs weights of vgg16 or vgg19: `loss_options` vgg="):
        build_loss("perceptual")
    with pytest.raises(ValueError, match=r"as torchvision names them, and those of `vgg` are others"):
        build_loss("perceptual", vgg={"features.0.weight": torch.zeros(64, 3, 11, 11)})


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [TILES, SPLIT, WAYS, STAGES, GEMS], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_loss_under_every_plan(ranks: Ranks, case: Case, plan: Plan) -> None:
    if plan.num_microbatches == 1 or case.name != "cox":
        agree(ranks, case, plan, 7)
