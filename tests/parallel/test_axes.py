"""Training on volumes, on sequences and with vision transformers, by plans of all kinds, equals plain PyTorch."""

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.support.short_runs import NUM_CLASSES, Task, check


class Volumes(nn.Module):
    """A small network for volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, 4, 3, 1, 1),
            nn.BatchNorm3d(4),
            nn.SiLU(),
            nn.MaxPool3d(3, 2, 1),
            nn.Conv3d(4, 6, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
            nn.InstanceNorm3d(6, affine=True),
            nn.Conv3d(6, 6, (3, 1, 1), padding=(1, 0, 0)),
            nn.AdaptiveAvgPool3d(1),
        )
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


class Dilated(nn.Module):
    """Convolutions that see ever further along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 5, 2, 2)
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=2**i, dilation=2**i) for i in range(4))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x).amax(-1))


class Transformer(nn.Module):
    """Patches with a class token that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(Tensor(1, 1, 8).fill_(0.1))
        self.positions = nn.Parameter(Tensor(1, 25, 8).fill_(0.2))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True) for _ in range(2))
        )
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.blocks(x + self.positions)[:, 0])


class Windows(nn.Module):
    """Attention within windows of 4 x 4 pixels, whose border tiles cross."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(8, NUM_CLASSES)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        n, c, h, w = x.shape
        for i, layer in enumerate(self.layers):
            x = x.roll((2 * i, 2 * i), (2, 3))
            y = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
            y = layer(y, y, y, need_weights=False)[0]
            y = y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)
            x = x + y
        return self.head(x.mean((2, 3)))


VOLUMES = Task(Volumes, (5, 11, 9))
SEQUENCES = Task(Dilated, (43,))
TRANSFORMER = Task(Transformer, (24, 16))
WINDOWS = Task(Windows, (24, 20))
PLANS = [
    (VOLUMES, Plan(tiles=((1, 1, 2),))),
    (VOLUMES, Plan(tiles=((2, 1, 1),), data=2, zero=3)),
    (VOLUMES, Plan(tiles=((1, 2, 1), (1, 1, 1)), microbatches=2)),
    (VOLUMES, Plan(tiles=((1, 2),))),  # along rows and columns alone
    (SEQUENCES, Plan(tiles=((4,),))),
    (SEQUENCES, Plan(tiles=((3,), (1,)))),
    (SEQUENCES, Plan(tiles=((2,),), data=2, zero=2)),
    (TRANSFORMER, Plan(tiles=((2, 2),))),
    (TRANSFORMER, Plan(tiles=((1, 2),), data=2, zero=3)),
    (TRANSFORMER, Plan(tiles=((1, 2), (1, 1)), microbatches=2)),
    (TRANSFORMER, Plan(tiles=((2, 1), (1, 2)))),
    (TRANSFORMER, Plan(tiles=((2, 2), (2, 2)), microbatches=2)),
    (WINDOWS, Plan(tiles=((2, 2),))),
    (WINDOWS, Plan(tiles=((1, 3), (1, 1)))),
    (WINDOWS, Plan(tiles=((2, 2), (1, 3)))),
    (WINDOWS, Plan(tiles=((2, 1),), data=2, zero=1)),
]


@pytest.mark.parametrize(("task", "plan"), PLANS, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.sample(5)
def test_training_equals_plain_pytorch(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)
