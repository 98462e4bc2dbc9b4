"""What other frameworks were tried on, and most failed: a 1 x 4 x 64 x 32 image, its rows spread over 4 ranks."""

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.spatial.comparing import Arrangement, Case, check_table
from tests.pool.ranks import Ranks

IMAGE = (1, 4, 64, 32)


def of_rows(rows: int) -> tuple[int, ...]:
    return (1, 4, rows, 32)


class TwoKernels(nn.Module):
    """A 3x3 and a 1x1 convolution of one input, added."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(4, 6, 3, padding=1)
        self.narrow = nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.narrow(x)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


def mini_resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(4, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return nn.Sequential(*stem, ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), *head)


CASES = {
    "conv3 p1": Case(lambda: nn.Conv2d(4, 6, 3, padding=1), (IMAGE,)),
    "conv7 s2 p3": Case(lambda: nn.Conv2d(4, 6, 7, 2, 3), (IMAGE,)),
    "conv3 s2 p0": Case(lambda: nn.Conv2d(4, 6, 3, 2), (IMAGE,)),
    "conv3 s2 p1, rows that do not divide": Case(
        lambda: nn.Conv2d(4, 6, 3, 2, 1), (of_rows(66), of_rows(68), of_rows(63))
    ),
    "conv4 s2 p1": Case(lambda: nn.Conv2d(4, 6, 4, 2, 1), (IMAGE,)),
    "transposed conv3 s2 p1 op1": Case(lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (IMAGE,)),
    "maxpool3 s2 p1": Case(lambda: nn.MaxPool2d(3, 2, 1), (IMAGE,)),
    "avgpool3 s1 p1 without padding": Case(lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False), (IMAGE,)),
    "batch norm, training": Case(lambda: nn.BatchNorm2d(4), (IMAGE,)),
    "bilinear x2": Case(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (IMAGE,)),
    "k3 and k1 convolution on one input": Case(TwoKernels, (IMAGE,)),
    "62 and 65 rows": Case(lambda: nn.Conv2d(4, 6, 3, padding=1), (of_rows(62), of_rows(65))),
    "halo wider than a tile": Case(lambda: nn.Conv2d(4, 6, 5, padding=2), (of_rows(4),)),
    "mini-ResNet": Case(mini_resnet, (IMAGE, of_rows(62)), spread=False),
}


@pytest.mark.parametrize("arrangement", [Arrangement(4, 1), Arrangement(2, 1)], ids=str)
def test_the_acceptance_list(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
