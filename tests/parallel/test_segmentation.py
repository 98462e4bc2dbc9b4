"""Segmentation models on tiles, in stages, and both, with a dense loss: steps and evaluation are plain PyTorch's."""

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation
from mpi4dl.parallel import spatial
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.local_stages import LocalStages
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, NUM_CLASSES, ROUNDING, assert_close, tiles_of

PLANS = {
    "tiles": Plan(((2, 2),)),
    "stages": Plan(((1, 1), (1, 1))),
    "both": Plan(((1, 2), (1, 2))),
    "fewer tiles": Plan(((2, 1), (1, 1)), microbatches=2),
}
COUNT = 4


class Case(NamedTuple):
    """A model, the images and the options that it takes."""

    name: str
    size: tuple[int, int]
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])


AUX, RESNET18, CONVNEXT = ("aux_loss", True), ("encoder_name", "resnet18"), ("encoder_name", "tu-convnext_atto")
# It computes more features than its decoder takes, so that some weights have no gradient, behind a cut as well.
SMALL = Case(
    "smp/Unet", (32, 48), (("encoder_name", "mobilenet_v2"), ("encoder_depth", 3), ("decoder_channels", (8, 8, 4)))
)
CASES = [
    SMALL,
    Case("unet", (33, 47), (("num_filters", 4), ("depth", 3))),
    Case("fcn_resnet50", (45, 37), (AUX,)),
    Case("deeplabv3_resnet50", (45, 37), (AUX,)),
    Case("deeplabv3_mobilenet_v3_large", (65, 53)),
    Case("lraspp_mobilenet_v3_large", (65, 53)),
    Case("smp/Unet", (64, 96), (RESNET18,)),
    Case("smp/Unet", (64, 32), (RESNET18, ("decoder_attention_type", "scse"), ("decoder_interpolation", "bilinear"))),
    Case(
        "smp/Unet",
        (64, 64),
        (("encoder_name", "tu-convnext_atto"), ("encoder_depth", 4), ("decoder_channels", (64, 32, 16, 8))),
    ),
    Case("smp/UnetPlusPlus", (32, 64), (RESNET18,)),
    Case("smp/FPN", (64, 96), (RESNET18,)),
    Case("smp/DeepLabV3Plus", (64, 96), (RESNET18,)),
    Case("smp/DeepLabV3", (64, 96), (RESNET18,)),
    Case("smp/PSPNet", (64, 96), (RESNET18,)),
    Case("smp/PAN", (128, 128), (RESNET18,)),
    Case("smp/Linknet", (64, 96), (RESNET18,)),
    Case("smp/MAnet", (64, 64), (RESNET18,)),
    Case("smp/UPerNet", (64, 96), (RESNET18,)),
    Case("smp/Segformer", (64, 64), (("encoder_name", "mit_b0"),)),
]
SHORT = [(SMALL, "both")]
ALL = [
    (case, plan) for case in CASES for plan in PLANS if find_spec("segmentation_models_pytorch") or "/" not in case.name
]


def build(case: Case) -> nn.Module:
    model = models.build(case.name, NUM_CLASSES, **dict(case.options)).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model


def batch(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(COUNT, 3, *case.size, generator=generator, dtype=torch.float64)
    masks = torch.randint(NUM_CLASSES, (COUNT, *case.size), generator=generator)
    masks[:, :3] = 255  # at the border of an image nothing is known
    return images, masks


def loss_of(outputs: Any, masks: Tensor) -> Tensor:
    """Cross entropy of pixels, of auxiliary heads with the customary weight of 0.5."""
    first, *others = outputs.values() if isinstance(outputs, dict) else [outputs]
    loss = F.cross_entropy(first, masks, ignore_index=255)
    return loss + 0.5 * sum(F.cross_entropy(other, masks, ignore_index=255) for other in others)


class Outcome(NamedTuple):
    """Of one step and an evaluation of what it left."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    spread: bool


@cache
def plain(case: Case, num_microbatches: int) -> Outcome:
    torch.manual_seed(0)
    model = build(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, masks = batch(case)
    total = 0.0
    for some, wanted in zip(images.chunk(num_microbatches), masks.chunk(num_microbatches), strict=True):
        loss = loss_of(model(some), wanted) / num_microbatches
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        evaluated = float(loss_of(model.eval()(images), masks))
    return Outcome([total, evaluated], model.state_dict(), gradients, False)


def on_ranks(comm: Communicator, case: Case, plan: Plan) -> Outcome:
    images, masks = batch(case)
    torch.manual_seed(0)
    if plan.num_stages > 1:
        held = split(lambda: build(case), plan, comm, seed=0, image=tuple(images.shape), balance="flops")
    else:
        held = LocalStages.whole(build(case), plan, comm)
    spread = []

    def loss(outputs: Any, masks: Tensor) -> Tensor:
        leaves = outputs.values() if isinstance(outputs, dict) else [outputs]
        spread.extend(isinstance(leaf, spatial.SpatialTensor) for leaf in leaves)
        return loss_of(outputs, masks)

    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=1e-3), loss, comm=comm)
    losses = [engine.step(tiles_of(images, engine), masks, case.size).loss]
    gradients, state = engine.gather_gradients(), engine.gather_state()
    evaluation: Evaluation = engine.evaluate([(tiles_of(images, engine, training=False), masks)], case.size)
    return Outcome([*losses, evaluation.loss], state or {}, gradients or {}, all(spread))


def check(ranks: Ranks, case: Case, plan: Plan) -> None:
    outcomes = ranks(plan.num_ranks).run(on_ranks, case, plan)
    found, expected = outcomes[0], plain(case, plan.num_microbatches)
    if plan.tiles[-1] != (1, 1):
        assert all(outcome.spread for outcome in outcomes)  # no rank has the masks of a whole image
    assert found.losses == pytest.approx(expected.losses, rel=EXACT)
    assert list(found.state) == list(expected.state)
    for name, value in expected.state.items():
        assert_close(found.state[name], value, EXACT, name)
    norm = sum(float(g.square().sum()) for g in expected.gradients.values() if g is not None) ** 0.5
    for name, gradient in expected.gradients.items():
        ours = found.gradients[name]
        assert (ours is None) == (gradient is None), name
        if ours is not None and gradient is not None:
            assert_close(ours, gradient, EXACT, f"{name}.grad", ROUNDING * max(1.0, norm))


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.exhaustive, id=f"{each[0]}-{each[1]}")
        for each in ALL
    ],
)
def test_a_segmentation_model_learns_as_in_plain_pytorch(ranks: Ranks, case: Case, plan: str) -> None:
    check(ranks, case, PLANS[plan])
