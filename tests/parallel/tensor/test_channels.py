"""Convolutional networks whose channels are cut over ranks, on whole images and on tiles, against plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl._torchvision import import_torchvision
from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.tensor.cutting import cut_parameters
from mpi4dl.parallel.tensor.styles import Degrees, cutting_of
from tests.parallel.tensor.test_cut_parameters import assert_parts_learn_alike
from tests.pool.ranks import Ranks
from tests.support.short_runs import EXACT, Task, assert_close, check


class Network(nn.Module):
    """Convolutions of all kinds, and all that treats channels alone, or together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding="same", groups=12, bias=False)
        self.groups, self.group_norm = nn.Conv2d(12, 24, 3, 1, 1, groups=6), nn.GroupNorm(6, 24)
        self.squeeze, self.excite = nn.Conv2d(24, 5, 1), nn.Conv2d(5, 24, 1)
        self.second = nn.Conv2d(24, 16, 3, padding=1)
        self.few_groups, self.instance_norm = nn.GroupNorm(2, 16), nn.InstanceNorm2d(16, track_running_stats=True)
        self.larger = nn.ConvTranspose2d(16, 10, 3, 2, 1, 1)
        self.in_groups = nn.ConvTranspose2d(10, 20, 2, 2, groups=5)
        self.smaller = nn.ConvTranspose2d(20, 7, 3, 1, 1)
        self.head = nn.Linear(7 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu_(self.norm(self.first(x))), 3, 1, 1)
        x = self.group_norm(self.groups(self.depthwise(x)))
        x = x * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.instance_norm(self.few_groups(self.second(F.avg_pool2d(F.dropout2d(x, 0.25), 3, 1, 1))))
        x = self.in_groups(F.interpolate(F.gelu(self.larger(x)), scale_factor=0.5, mode="bilinear"))
        return self.head(F.adaptive_max_pool2d(self.smaller(x), 2).flatten(1))  # type: ignore[no-any-return]


STYLES = {
    **{name: "column" for name in ("first", "depthwise", "groups", "squeeze", "larger", "in_groups", "excite")},
    **{name: "row" for name in ("second", "smaller", "head")},
}
IMAGES = torch.randn(3, 3, 20, 22, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compare(comm: Communicator, cols: int, features: int) -> None:
    plain, model = (_built() for _ in range(2))
    grid = Grid(comm, cols=cols, features=features)
    layouts = cut_parameters(model, cutting_of(model, STYLES, Degrees(features)), grid)
    for training in (True, True, False):
        images = spatial.shard(IMAGES, grid) if cols > 1 else IMAGES
        torch.manual_seed(2)
        expected = plain.train(training)(IMAGES)
        torch.manual_seed(2)
        found = model.train(training)(images)
        assert_close(spatial.gather(found).detach(), expected.detach(), EXACT, "output")
    weights = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weights).sum().backward()
    (spatial.gather(found) * weights).sum().div(comm.size).backward()
    assert_parts_learn_alike(model, plain, layouts, grid)
    for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert_close(b.double(), c.double(), EXACT, name)


def _built() -> Network:
    torch.manual_seed(0)
    return Network().double()


@pytest.mark.parametrize(
    ("cols", "features"),
    [
        (1, 2),
        (1, 3),
        pytest.param(2, 2, marks=pytest.mark.exhaustive),
        pytest.param(1, 5, marks=pytest.mark.exhaustive),
    ],
)
def test_every_kind_of_layer(ranks: Ranks, cols: int, features: int) -> None:
    """Three ranks share 16 channels, which are those of two groups, and 5 groups."""
    ranks(cols * features).run(compare, cols, features)


class Added(nn.Module):
    """Adds in place to channels of which every rank has all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        y = self.second(x)
        y += x
        return self.head(y.square().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(((1, 2),), tensor=2)], ids=str)
def test_channels_of_a_rank_are_added_in_place_to_all(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Task(Added, (8, 6), styles=(("first", "column"), ("second", "row"))), plan)


class Turning(nn.Module):
    """Turns each image as a small network says."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.conv, self.head = nn.Linear(3, 6), nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = F.affine_grid(self.maps(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(self.conv(F.grid_sample(x, places, align_corners=False)).tanh().mean((2, 3)))


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(data=2), Plan(((1, 2),), tensor=2)], ids=str)
def test_images_are_turned_by_learnt_maps(ranks: Ranks, plan: Plan) -> None:
    """In the validation there are fewer of them than replicas."""
    check(ranks, Task(Turning, (8, 6), styles=(("conv", "column"),) * (plan.tensor > 1)), plan)


REFUSED = {
    "channels": ({"squeeze": "column"}, 6, "squeeze has 5 channels, which 6 ranks cannot share"),
    "groups": ({"groups": "column"}, 8, "groups has 6 groups, which 8 ranks cannot share"),
    "a row of groups": ({"groups": "row"}, 2, "groups is to be row, but a convolution of 6 groups can only be column"),
    "heads": ({"first": "heads"}, 2, "first is to be heads, but a convolution can only be column or row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut(name: str) -> None:
    styles, num_ranks, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        cutting_of(_built(), styles, Degrees(num_ranks))


def resnet50() -> nn.Module:
    import_torchvision()
    from torchvision.models import resnet50

    # Otherwise what differs by 1e-15 in the images makes 1e-7 of the loss after five steps, in plain PyTorch too.
    return resnet50(num_classes=10, zero_init_residual=True)  # type: ignore[no-any-return]


PLANS = {
    "tensor 2": Plan(((1, 1),), tensor=2),
    "tensor 2, tiles 1x2": Plan(((1, 2),), tensor=2),
    "tensor 2, data 2, ZeRO 3": replace(Plan(((1, 1),), tensor=2), data=2, zero=3),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANS)
def test_resnet_50(ranks: Ranks, name: str) -> None:
    check(ranks, Task(resnet50, (64, 64), optimizer="slow SGD", num_steps=5), PLANS[name])
