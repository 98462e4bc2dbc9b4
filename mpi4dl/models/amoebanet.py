"""AmoebaNet-D: an evolved image classifier whose layers each hand on the pair (previous, current).

A cell sees the outputs of the two cells before it. Because a layer hands both of them on, the whole model is one
`nn.Sequential`, and a pipeline can cut it between any two layers:

    image -> stem -> (p, c) -> cell -> (p, c) -> cell -> ... -> (p, c) -> head -> logits

Inside a cell seven states are made. States 0 and 1 are the current and the previous output, brought to the cell's
number of channels; each of states 2 to 6 is the sum of two operations on earlier states. The tables below say which.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.models.layers import ClassifierHead

Pair = tuple[Tensor, Tensor]
Step = tuple[str, int]


@dataclass(frozen=True)
class CellTable:
    """The wiring of a cell: pairs of (operation, index of the state it reads), and the states that make the output."""

    sums: tuple[tuple[Step, Step], ...]
    output: tuple[int, ...]


# The output is that of the published implementation and of GPipe's parameter counts; the paper's figure has [4, 5, 6].
NORMAL_CELL = CellTable(
    sums=(
        (("conv_1x1", 1), ("max_pool_3x3", 1)),
        (("none", 1), ("conv_1x7_7x1", 0)),
        (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
        (("max_pool_3x3", 2), ("none", 2)),
        (("avg_pool_3x3", 1), ("conv_1x1", 5)),
    ),
    output=(0, 3, 4, 6),
)
REDUCTION_CELL = CellTable(
    sums=(
        (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
        (("none", 2), ("conv_3x3", 1)),
        (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
        (("none", 3), ("max_pool_2x2", 1)),
        (("avg_pool_3x3", 2), ("conv_1x1", 3)),
    ),
    output=(4, 5, 6),
)


def _relu_conv_norm(
    in_channels: int, out_channels: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _bottleneck(channels: int, *inner: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Convolutions of these kernels and strides on a quarter of the channels."""
    narrow = channels // 4
    middle = (_relu_conv_norm(narrow, narrow, kernel, stride) for kernel, stride in inner)
    return nn.Sequential(_relu_conv_norm(channels, narrow), *middle, _relu_conv_norm(narrow, channels))


# By name: what makes an operation on so many channels, of this stride.
OPERATIONS: Mapping[str, Callable[[int, int], nn.Module]] = MappingProxyType(
    {
        "none": lambda channels, stride: nn.Identity(),
        "avg_pool_3x3": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
        "max_pool_3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
        # An odd size is rounded up, as by every other operation of stride 2 in the cell.
        "max_pool_2x2": lambda channels, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
        "conv_1x1": lambda channels, stride: _relu_conv_norm(channels, channels, stride=(stride, stride)),
        "conv_3x3": lambda channels, stride: _bottleneck(channels, ((3, 3), (stride, stride))),
        "conv_1x7_7x1": lambda channels, stride: _bottleneck(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1))),
    }
)


class FactorizedReduce(nn.Module):
    """Halve H and W (rounded up) with two 1x1 convolutions of stride 2, one of them shifted by one pixel.

    Together they see half of the pixels where one would see a quarter. (batch, in_channels, H, W) to (batch,
    out_channels, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.straight = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.shifted = nn.Conv2d(in_channels, out_channels - out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        # Padded before it is cut, so that an image of one row never becomes one of none.
        moved = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.straight(x), self.shifted(moved)], dim=1))


class Stem(nn.Module):
    """The first convolution, of stride 2: an image to the pair whose members are both its output."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Pair:
        x = self.norm(self.conv(image))
        return x, x


class Cell(nn.Module):
    """One cell: the pair (previous, current) to (current, output).

    `output` has `channels` times the number of the table's output states channels, and the size of `current`, halved
    and rounded up if `stride` is 2. `previous_is_larger` says that `previous` has twice the size of `current`.
    """

    def __init__(
        self,
        table: CellTable,
        previous_channels: int,
        current_channels: int,
        channels: int,
        stride: int,
        previous_is_larger: bool,
    ) -> None:
        super().__init__()
        self.table = table
        self.match_current = _relu_conv_norm(current_channels, channels)
        self.match_previous: nn.Module
        if previous_is_larger:
            self.match_previous = FactorizedReduce(previous_channels, channels)
        elif previous_channels != channels:
            self.match_previous = _relu_conv_norm(previous_channels, channels)
        else:
            self.match_previous = nn.Identity()
        # Only the two states that come from outside still have the full size.
        self.operations = nn.ModuleList(
            OPERATIONS[operation](channels, stride if state < 2 else 1)
            for pair in table.sums
            for operation, state in pair
        )

    def forward(self, pair: Pair) -> Pair:
        previous, current = pair
        states = [self.match_current(current), self.match_previous(previous)]
        for i, ((_, left), (_, right)) in enumerate(self.table.sums):
            states.append(self.operations[2 * i](states[left]) + self.operations[2 * i + 1](states[right]))
        return current, torch.cat([states[i] for i in self.table.output], dim=1)


class AmoebaNetHead(nn.Module):
    """The classifier's head on the current member of the pair."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.head = ClassifierHead(channels, num_classes)

    def forward(self, pair: Pair) -> Tensor:
        _, current = pair
        return self.head(F.relu(current))


def amoebanetd(
    num_layers: int = 18, num_filters: int = 208, num_classes: int = 1000, in_channels: int = 3
) -> nn.Sequential:
    """Build AmoebaNet-D (L = `num_layers`, D = `num_filters`): images (batch, in_channels, H, W) to logits.

    `num_layers` counts normal cells, in three groups of equal size, each followed by a halving of H and W, in front of
    which the stem divides them by 8. Any H and W of at least one pixel will do. The returned `nn.Sequential` has
    `num_layers` + 6 layers.

    Real et al. 2018, "Regularized Evolution for Image Classifier Architecture Search",
    https://arxiv.org/abs/1802.01548, in the configurations of Huang et al. 2018, "GPipe", https://arxiv.org/abs/1811.06965.

    Raises:
        ValueError: `num_layers` is no positive multiple of 3, or `num_filters` no multiple of 4 from 8 on.
    """
    if num_layers < 3 or num_layers % 3:
        raise ValueError(
            f"num_layers={num_layers} cannot be split into AmoebaNet-D's three groups of normal cells: "
            "choose 3, 6, 9, ..."
        )
    if num_filters < 8 or num_filters % 4:
        raise ValueError(
            f"num_filters={num_filters} cannot be quartered for AmoebaNet-D's stem and bottlenecks: "
            "choose a multiple of 4 that is at least 8"
        )
    channels = num_filters // 4
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(in_channels, channels))
    previous_channels = current_channels = channels
    previous_is_larger = False

    def append_cell(name: str, table: CellTable, stride: int) -> None:
        nonlocal previous_channels, current_channels, previous_is_larger
        layers[name] = Cell(table, previous_channels, current_channels, channels, stride, previous_is_larger)
        previous_channels, current_channels = current_channels, channels * len(table.output)
        previous_is_larger = stride == 2

    for name in ("stem_reduction1", "stem_reduction2"):
        channels *= 2
        append_cell(name, REDUCTION_CELL, stride=2)
    for group in (1, 2, 3):
        if group > 1:
            channels *= 2
            append_cell(f"reduction{group - 1}", REDUCTION_CELL, stride=2)
        for i in range(num_layers // 3):
            append_cell(f"normal{group}_{i + 1}", NORMAL_CELL, stride=1)
    layers["head"] = AmoebaNetHead(current_channels, num_classes)
    return nn.Sequential(layers)
