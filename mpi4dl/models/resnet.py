"""ResNets made for CIFAR, v1 and v2, of any depth and number of dims; and a small residual network for large images.

Both are an `nn.Sequential` of a stem, three stages of n blocks and a head, flat, so that a pipeline can cut it between
any two blocks. Every stage after the first halves H and W (rounded up) and doubles the number of filters.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.models.layers import CONVOLUTIONS, NORMS, ClassifierHead, Pool, check_dims, initialize_convolutions

Norm = Literal["batch", "none"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (batch, in_channels, H, W) to (batch, channels, H / stride, W / stride).

    `dims` is the number of sides of what it is for, such as 3 for volumes. Where the shape changes, the shortcut is a
    1x1 convolution (the paper's option B). `normalized`: with batch norms; without them a block begins as its shortcut.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, dims: int = 2, normalized: bool = True) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[dims]
        norm: Callable[[int], nn.Module] = NORMS[dims] if normalized else nn.Identity
        self.conv1 = convolution(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = convolution(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(convolution(in_channels, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(residual + self.shortcut(x))


class PreactivationBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each after its batch norm and ReLU, and a shortcut that nothing else touches.

    (batch, in_channels, H, W) to (batch, 4 * channels, H / stride, W / stride). Where the shape changes, the shortcut
    is a 1x1 convolution that starts from the activated input.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.projection: nn.Conv2d | None = None
        if stride != 1 or in_channels != out_channels:
            self.projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        residual = self.conv1(activated)
        residual = self.conv2(F.relu(self.norm2(residual)))
        residual = self.conv3(F.relu(self.norm3(residual)))
        shortcut = x if self.projection is None else self.projection(activated)
        return residual + shortcut


def resnet_v1(
    depth: int = 110, num_classes: int = 10, num_filters: int = 16, in_channels: int = 3, dims: int = 2
) -> nn.Sequential:
    """Build the original residual network of depth 6n+2: images (batch, in_channels, H, W) to logits.

    With `dims` 3 it is for volumes (batch, in_channels, D, H, W), with 1 for sequences (batch, in_channels, L).

    He et al. 2015, "Deep Residual Learning for Image Recognition", section 4.2, https://arxiv.org/abs/1512.03385.

    Raises:
        ValueError: `depth` is not 6n+2 for an n of at least 1, or `dims` not 1, 2 or 3.
    """
    check_dims(dims)
    blocks_per_stage = _blocks_per_stage("resnet_v1", depth, layers_per_round=6)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Sequential(
        CONVOLUTIONS[dims](in_channels, num_filters, 3, padding=1, bias=False), NORMS[dims](num_filters), nn.ReLU()
    )
    width = num_filters
    for stage, block, channels, stride in _block_shapes(num_filters, blocks_per_stage):
        layers[f"stage{stage}_block{block}"] = BasicBlock(width, channels, stride, dims)
        width = channels
    layers["head"] = ClassifierHead(width, num_classes, dims=dims)
    return _initialized(layers)


def resnet_v2(depth: int = 110, num_classes: int = 10, num_filters: int = 16, in_channels: int = 3) -> nn.Sequential:
    """Build the pre-activation bottleneck network of depth 9n+2: images (batch, in_channels, H, W) to logits.

    Depth 1001 is n = 111. `num_filters` is the width of the stem and of the first stage's bottleneck.

    He et al. 2016, "Identity Mappings in Deep Residual Networks", https://arxiv.org/abs/1603.05027.

    Raises:
        ValueError: `depth` is not 9n+2 for an n of at least 1.
    """
    blocks_per_stage = _blocks_per_stage("resnet_v2", depth, layers_per_round=9)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Conv2d(in_channels, num_filters, 3, padding=1, bias=False)
    width = num_filters
    for stage, block, channels, stride in _block_shapes(num_filters, blocks_per_stage):
        layers[f"stage{stage}_block{block}"] = PreactivationBottleneck(width, channels, stride)
        width = channels * PreactivationBottleneck.expansion
    layers["head"] = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), ClassifierHead(width, num_classes))
    return _initialized(layers)


def _blocks_per_stage(name: str, depth: int, layers_per_round: int) -> int:
    """Return n of depth = `layers_per_round` * n + 2: a round is one block in each of the three stages."""
    num_blocks, rest = divmod(depth - 2, layers_per_round)
    if num_blocks >= 1 and not rest:
        return num_blocks
    below = layers_per_round * max(1, num_blocks) + 2
    raise ValueError(
        f"depth={depth} is not possible: {name} has depth {layers_per_round}n+2 with n >= 1; "
        f"the nearest legal depths are {below} and {below + layers_per_round}"
    )


def _block_shapes(num_filters: int, blocks_per_stage: int) -> list[tuple[int, int, int, int]]:
    """Return (stage, block, filters, stride) of every block, in order."""
    return [
        (stage, block, num_filters * 2 ** (stage - 1), 2 if stage > 1 and block == 1 else 1)
        for stage in (1, 2, 3)
        for block in range(1, blocks_per_stage + 1)
    ]


def _initialized(layers: OrderedDict[str, nn.Module]) -> nn.Sequential:
    model = nn.Sequential(layers)
    initialize_convolutions(model)
    return model


# A small residual network for large images: a stem of stride 8, then 14 layers; it trains on two CPU cores.


def small_resnet(
    num_classes: int = 2, num_filters: int = 16, in_channels: int = 3, pool: Pool = "max", norm: Norm = "batch"
) -> nn.Sequential:
    """Build it: images (batch, in_channels, H, W) to logits (batch, num_classes), 0.18 M parameters by default.

    The stem (a 7x7 convolution of stride 4 and 3x3 maximum pooling of stride 2) leaves a 64th of the pixels to the
    residual blocks. The last stage has one position for 32 x 32 pixels of the image, so an object of 60 pixels fills a
    few of them. `pool="max"` finds it anywhere; `pool="avg"` weighs it by its area.

    The blocks are those of He et al. 2015, https://arxiv.org/abs/1512.03385. With `norm="none"` there are no batch
    norms, and the second convolution of each block begins as 0, so that a block begins as its shortcut (Zhang et al.
    2019, "Fixup initialization", https://arxiv.org/abs/1901.09321). Streaming then takes one pass over the image, and
    glass around the tissue does not matter.

    Raises:
        ValueError: `pool` is neither "avg" nor "max", or `norm` neither "batch" nor "none".
    """
    if norm not in get_args(Norm):
        raise ValueError(f"norm={norm!r}: expected one of {', '.join(get_args(Norm))}")
    normalized = norm == "batch"
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Sequential(
        nn.Conv2d(in_channels, num_filters, 7, stride=4, padding=3, bias=False),
        nn.BatchNorm2d(num_filters) if normalized else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    width = num_filters
    for stage, stride in enumerate((1, 2, 2), start=1):
        channels = num_filters * 2 ** (stage - 1)
        layers[f"stage{stage}_block1"] = BasicBlock(width, channels, stride, normalized=normalized)
        layers[f"stage{stage}_block2"] = BasicBlock(channels, channels, stride=1, normalized=normalized)
        width = channels
    layers["head"] = ClassifierHead(width, num_classes, pool)
    model = nn.Sequential(layers)
    initialize_convolutions(model)
    for block in model if not normalized else ():
        if isinstance(block, BasicBlock):
            nn.init.zeros_(block.conv2.weight)
    return model
