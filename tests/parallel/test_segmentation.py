"""Models of pixels, or with auxiliary heads, on tiles and in stages: steps and evaluation are plain PyTorch's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision
from mpi4dl.engine import Engine
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import NUM_CLASSES, Task, check

import_torchvision()
from torchvision.models._utils import IntermediateLayerGetter  # noqa: E402
from torchvision.models.segmentation import deeplabv3, fcn  # noqa: E402

PLANS = {
    "tiles": Plan(((2, 2),)),
    "stages": Plan(((1, 1), (1, 1))),
    "both": Plan(((1, 2), (1, 2))),
    "fewer tiles": Plan(((2, 1), (1, 1)), microbatches=2),
}


class Case(NamedTuple):
    """A model, the images and the options that it takes."""

    name: str
    size: tuple[int, int]
    options: tuple[tuple[str, Any], ...] = ()
    dense: bool = True

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.options)])


AUX, RESNET18, CONVNEXT = ("aux_loss", True), ("encoder_name", "resnet18"), ("encoder_name", "tu-convnext_atto")
AUXILIARY = Case("narrow deeplab", (45, 37))
CASES = [
    # It computes more features than its decoder takes, so that some weights have no gradient, behind a cut as well.
    Case(
        "smp/Unet", (32, 48), (("encoder_name", "mobilenet_v2"), ("encoder_depth", 3), ("decoder_channels", (8, 8, 4)))
    ),
    Case("unet", (33, 47), (("num_filters", 4), ("depth", 3))),
    Case("fcn_resnet50", (45, 37), (AUX,)),
    Case("deeplabv3_resnet50", (45, 37), (AUX,)),
    AUXILIARY,
    Case("deeplabv3_mobilenet_v3_large", (45, 37), (AUX,)),
    Case("googlenet", (64, 49), dense=False),
    Case("inception_v3", (299, 299), dense=False),
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
FROZEN = (AUXILIARY.name, "deeplabv3_mobilenet_v3_large")
ALL = [
    (case, plan) for case in CASES for plan in PLANS if find_spec("segmentation_models_pytorch") or "/" not in case.name
]


def narrow() -> nn.Module:
    """torchvision's DeepLabV3 with its auxiliary head, of few channels."""
    layers = [nn.Sequential(nn.Conv2d(c, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()) for c in (3, 8)]
    backbone = IntermediateLayerGetter(nn.Sequential(*layers), {"0": "aux", "1": "out"})
    head = nn.Sequential(deeplabv3.ASPP(8, [2, 4], 8), nn.Conv2d(8, NUM_CLASSES, 1))
    return deeplabv3.DeepLabV3(backbone, head, fcn.FCNHead(8, NUM_CLASSES))


def build(case: Case) -> nn.Module:
    model = (narrow() if case == AUXILIARY else models.build(case.name, NUM_CLASSES, **dict(case.options))).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model


SPREAD: list[bool] = []  # of all outputs that a loss has seen in this process


def loss_of(outputs: Any, masks: Tensor) -> Tensor:
    """Cross entropy of pixels but those at the border, of auxiliary heads with the customary weight of 0.5."""
    first, *others = (
        [outputs] if isinstance(outputs, Tensor) else outputs.values() if isinstance(outputs, dict) else outputs
    )
    SPREAD.extend(isinstance(each, spatial.SpatialTensor) for each in (first, *others))
    masks = masks.clone()
    if masks.dim() > 1:
        masks[:, :3] = 255
    loss = F.cross_entropy(first, masks, ignore_index=255)
    return loss + 0.5 * sum(F.cross_entropy(other, masks, ignore_index=255) for other in others)


def watch_outputs(engine: Engine) -> Callable[[], bool]:
    SPREAD.clear()
    return lambda: all(SPREAD)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(
            *each, marks=() if each == (AUXILIARY, "both") else pytest.mark.exhaustive, id=f"{each[0]}-{each[1]}"
        )
        for each in ALL
    ],
)
def test_a_segmentation_model_learns_as_in_plain_pytorch(ranks: Ranks, case: Case, plan: str) -> None:
    """No rank has the masks of a whole image where the last stage is on tiles."""
    task = Task(partial(build, case), case.size, optimizer="slow SGD", dense=case.dense, loss=loss_of, num_steps=1)
    if case.name in FROZEN or not case.dense:  # the second step is one with all modules frozen by `eval()`
        task = replace(task, num_steps=2, frozen_last=True, tolerance=1e-9)
    outcomes = check(ranks, task, PLANS[plan], watch_outputs)
    assert all(outcome.watched for outcome in outcomes) or PLANS[plan].tiles[-1] == (1, 1) or not case.dense
