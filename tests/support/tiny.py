"""A network that commands train on slides in a second: layers of every kind that `small_resnet` has, each once."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.models.resnet import BasicBlock, ClassifierHead

TINY_RESNET = f"{__file__}:tiny_resnet"  # as an option names it
IN_FLOAT64 = f"{__file__}:in_float64"


def tiny_resnet(num_classes: int, num_filters: int = 4) -> nn.Sequential:
    """Images (N, 3, H, W) to logits (N, num_classes); one position is left of 16 x 16 pixels."""
    width = num_filters
    first = nn.Conv2d(3, width, 7, stride=4, padding=3, bias=False)
    stem = first, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Sequential(*stem))
    layers["stage1_block1"] = BasicBlock(width, 2 * width, stride=2)
    layers["head"] = ClassifierHead(2 * width, num_classes, "max")
    return nn.Sequential(layers)


def in_float64(num_classes: int, in_channels: int, name: str, **options: Any) -> nn.Module:
    """A model of mpi4dl in float64, whatever images are."""
    model = models.build(name, num_classes, in_channels=in_channels, **options).double()
    return nn.Sequential(OrderedDict(wider=Wider(), model=model))


class Wider(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()
