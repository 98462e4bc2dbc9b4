"""Dropout on tiles: the mask of plain PyTorch; of what is large one of its own on every tile, of right statistics."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import draws
from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, Case, arrange, table_test
from tests.pool.ranks import on_ranks


@pytest.mark.parametrize("inplace", [False, True])
@on_ranks(4)
def test_each_tile_has_a_mask_of_its_own(comm: Communicator, inplace: bool) -> None:
    """Statistics of what dropout does to ones, and of its gradient."""
    image = torch.ones(2, 8, 64, 64, requires_grad=True)
    tiles = arrange(image, comm, Arrangement(2, 2))
    with mock.patch.object(draws, "DRAWN_WHOLE", 0):
        dropped = spatial.gather(F.dropout(tiles * 1, 0.25, inplace=inplace))
    dropped.sum().backward()
    dropped = dropped.detach()
    gradient = comm.all_reduce(image.grad) / comm.size
    quarters = dropped.unflatten(3, (2, 32)).unflatten(2, (2, 32))
    corners = [quarters[:, :, i, :, j].reshape(-1) for i in (0, 1) for j in (0, 1)]
    alike = [float((a == b).float().mean()) for i, a in enumerate(corners) for b in corners[:i]]
    comm.agree(None, kept=float(dropped.mean()), next_draw=float(torch.rand(())))
    assert float((dropped > 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert float(dropped.max()) == pytest.approx(4 / 3)
    assert torch.equal(gradient, dropped)
    assert max(alike) < 0.65  # 0.75^2 + 0.25^2 = 0.625 by chance


@on_ranks(2)
def test_dropout_repeats_by_the_seed_and_only_by_it(comm: Communicator) -> None:
    tiles = spatial.shard(torch.ones(1, 4, 16, 16), spatial.Grid(comm, cols=2))
    torch.manual_seed(3)
    first, second = F.dropout(tiles), F.dropout(tiles)
    torch.manual_seed(3)
    again = F.dropout(tiles)
    assert torch.equal(first.local, again.local)
    assert not torch.equal(first.local, second.local)


def drawn(function: Callable[..., Tensor], *args: Any) -> Case:
    """What it makes of a copy of an image, from one seed, and the numbers that follow."""

    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        return function(x * 1, *args), torch.rand(3)

    return Case(lambda: draw, ((3, 16, 6, 5),), spread=False)


# Where channels are dropped, on images, lines and volumes of one sample.
CHANNELS: dict[str, Callable[[Tensor, float, bool], Tensor]] = {
    "dropout": lambda x, p, inplace: F.dropout(x, p, True, inplace),
    "dropout of a turned image": lambda x, p, inplace: F.dropout(x.transpose(0, 1), p, True, inplace).transpose(0, 1),
    "dropout of samples that come second": lambda x, p, inplace: F.dropout(
        x.transpose(0, 1).contiguous() * 1, p, True, inplace
    ).transpose(0, 1),
    "dropout of tokens": lambda x, p, inplace: F.dropout(x.flatten(2), p).unflatten(2, (6, 5)),
    "dropout2d": lambda x, p, inplace: F.dropout2d(x, p, True, inplace),
    "dropout1d": lambda x, p, inplace: F.dropout1d(x.flatten(0, 1), p, True, inplace).unflatten(0, (3, 16)),
    "dropout1d, one sample": lambda x, p, inplace: F.dropout1d(x.sum((0, 1)), p, True, inplace).expand(3, 16, 6, 5),
    "dropout3d, one sample": lambda x, p, inplace: F.dropout3d(x, p, True, inplace),
}
DROPPED = {
    f"{name}{' in place' * inplace}": drawn(function, 0.4, inplace)
    for inplace in (False, True)
    for name, function in CHANNELS.items()
}
test_dropped_pixels_and_channels_are_those_of_plain_pytorch = table_test(__name__, SOME_ARRANGEMENTS, "DROPPED")


@on_ranks(2)
def test_dropout_at_its_ends_and_in_evaluation(comm: Communicator) -> None:
    tiles = spatial.shard(torch.ones(1, 2, 4, 4), spatial.Grid(comm, cols=2))
    layers = [nn.Dropout(1.0), nn.Dropout(0.0), nn.Dropout(0.9).eval(), nn.Dropout2d(0.9).eval()]
    assert [float(spatial.gather(layer(tiles)).mean()) for layer in layers] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("in_place", [False, True])
@on_ranks(2)
def test_dropout_of_what_holds_a_halo(comm: Communicator, in_place: bool) -> None:
    """A pixel of a halo is dropped as its owner drops it."""
    tiles = spatial.widen(spatial.shard(torch.ones(2, 2, 8, 8), spatial.Grid(comm, cols=2)), 1) * 1
    torch.manual_seed(0)
    y = F.dropout(tiles, 0.5, inplace=in_place)
    around = spatial.widen(y, 1)
    whole = spatial.gather(around)
    held = around.layout.held.cols
    assert y.layout.wide
    assert torch.equal(around.local, whole[..., held.start : held.stop])


def chosen(x: Tensor) -> Tensor:
    """A class for each pixel."""
    rows = x.softmax(1).permute(0, 2, 3, 1).flatten(0, 2)
    return torch.multinomial(rows, 2, True)[:, 0].view(3, 6, 5) + 0 * x.sum(1)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x) * x,
    "randn_like of a turned image": lambda x: x + torch.randn_like(x.transpose(0, 1)).transpose(0, 1) * x,
    "randint_like": lambda x: x * torch.randint_like(x, 2, 9),
    "float32": lambda x: x * torch.rand_like(x, dtype=torch.float32).double(),
    "tokens": lambda x: x * torch.randn_like(x.flatten(2)).unflatten(2, (6, 5)),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1.0, 2.0),
    "exponential_": lambda x: x * torch.zeros_like(x).exponential_(3.0),
    "a share": lambda x: x * torch.bernoulli(x.detach(), 0.3),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "poisson": lambda x: x * torch.poisson(x.exp()),
    "normal": lambda x: x * torch.normal(x.detach(), 2.0),
    "normal of both": lambda x: x * torch.normal(x.detach(), x.detach().exp()),
    "rsample": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "gumbel": lambda x: F.gumbel_softmax(x, 0.7, dim=1),
    "gumbel, hard": lambda x: F.gumbel_softmax(x, 0.7, hard=True, dim=1),
    "gumbel of a turned image": lambda x: F.gumbel_softmax(x.transpose(0, 1), 0.7, dim=0).transpose(0, 1),
    "multinomial": chosen,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "rrelu in evaluation": lambda x: F.rrelu(x),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "alpha dropout of all": lambda x: F.alpha_dropout(x, 1.0, True),
    "a generator": lambda x: x * x.detach().clone().normal_(generator=torch.Generator().manual_seed(5)),
}
DRAWN = {name: drawn(function) for name, function in DRAWS.items()}
test_random_pixels_are_those_of_plain_pytorch = table_test(__name__, SOME_ARRANGEMENTS, "DRAWN")


@on_ranks(4)
def test_large_tiles_have_random_pixels_of_their_own(comm: Communicator) -> None:
    x = spatial.shard(torch.zeros(1, 2, 64, 64), spatial.Grid(comm, 2, 2))
    with mock.patch.object(draws, "DRAWN_WHOLE", 0):
        pixels = spatial.gather(torch.randn_like(x))
        wide = torch.randn_like(spatial.widen(x, 2))
    assert abs(float(pixels.mean())) < 0.05
    assert abs(float(pixels.std()) - 1) < 0.05
    assert len(pixels.unique()) > 8000
    held = wide.layout.held
    assert wide.layout.wide
    assert torch.equal(wide.local, spatial.gather(wide)[..., slice(*held.rows), slice(*held.cols)])
