"""A small residual network for large images: a stem of stride 8, then 14 layers; it trains on two CPU cores."""

from collections import OrderedDict

from torch import nn

from mpi4dl.models.layers import ClassifierHead, Pool, initialize_convolutions
from mpi4dl.models.resnet import BasicBlock


def small_resnet(
    num_classes: int = 2, num_filters: int = 16, in_channels: int = 3, pool: Pool = "max"
) -> nn.Sequential:
    """Build it: images (batch, in_channels, H, W) to logits (batch, num_classes), 0.18 M parameters by default.

    The stem (a 7x7 convolution of stride 4 and 3x3 maximum pooling of stride 2) leaves a 64th of the pixels to the
    residual blocks, and the last stage has one position for 32 x 32 pixels of the image, so that an object of 60 pixels
    fills a few of them. `pool="max"` finds it anywhere; `pool="avg"` weighs it by its area.

    The blocks are those of He et al. 2015, https://arxiv.org/abs/1512.03385.

    Raises:
        ValueError: `pool` is neither "avg" nor "max".
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Sequential(
        nn.Conv2d(in_channels, num_filters, 7, stride=4, padding=3, bias=False),
        nn.BatchNorm2d(num_filters),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    width = num_filters
    for stage, stride in enumerate((1, 2, 2), start=1):
        channels = num_filters * 2 ** (stage - 1)
        layers[f"stage{stage}_block1"] = BasicBlock(width, channels, stride)
        layers[f"stage{stage}_block2"] = BasicBlock(channels, channels, stride=1)
        width = channels
    layers["head"] = ClassifierHead(width, num_classes, pool)
    model = nn.Sequential(layers)
    initialize_convolutions(model)
    return model
