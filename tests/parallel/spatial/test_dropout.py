"""Dropout on tiles: the mask of plain PyTorch; of what is large one of its own on every tile, of right statistics."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from mpi4dl.parallel.spatial.rules import pointwise
from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, arrange, difference, on_ranks
from tests.pool.ranks import Ranks


def drop_pixels(comm: Communicator, inplace: bool) -> dict[str, float]:
    """Statistics of what dropout does to ones, and of its gradient."""
    image = torch.ones(2, 8, 64, 64, requires_grad=True)
    tiles = arrange(image, comm, Arrangement(2, 2))
    with mock.patch.object(pointwise, "DRAWN_WHOLE", 0):
        dropped = spatial.gather(F.dropout(tiles * 1, 0.25, inplace=inplace))
    dropped.sum().backward()
    dropped = dropped.detach()
    gradient = comm.all_reduce(image.grad) / comm.size
    quarters = dropped.unflatten(3, (2, 32)).unflatten(2, (2, 32))
    corners = [quarters[:, :, i, :, j].reshape(-1) for i in (0, 1) for j in (0, 1)]
    alike = [float((a == b).float().mean()) for i, a in enumerate(corners) for b in corners[:i]]
    return {
        "kept": float((dropped > 0).float().mean()),
        "largest": float(dropped.max()),
        "gradient is the mask": float(torch.equal(gradient, dropped)),
        "most alike": max(alike),
        "next draw": float(torch.rand(())),
    }


@pytest.mark.parametrize("inplace", [False, True])
def test_each_tile_has_a_mask_of_its_own(ranks: Ranks, inplace: bool) -> None:
    first, *others = ranks(4).run(drop_pixels, inplace)
    assert others == [first] * 3
    assert first["kept"] == pytest.approx(0.75, abs=0.01)
    assert first["largest"] == pytest.approx(4 / 3)
    assert first["gradient is the mask"] == 1
    assert first["most alike"] < 0.65  # 0.75^2 + 0.25^2 = 0.625 by chance


@on_ranks(2)
def test_dropout_repeats_by_the_seed_and_only_by_it(comm: Communicator) -> None:
    tiles = spatial.shard(torch.ones(1, 4, 16, 16), spatial.Grid(comm, cols=2))
    torch.manual_seed(3)
    first, second = F.dropout(tiles), F.dropout(tiles)
    torch.manual_seed(3)
    again = F.dropout(tiles)
    assert torch.equal(first.local, again.local)
    assert not torch.equal(first.local, second.local)


CHANNELS = {
    "dropout": lambda x, p, inplace: F.dropout(x, p, True, inplace),
    "dropout of a turned image": lambda x, p, inplace: F.dropout(x.transpose(0, 1), p, True, inplace).transpose(0, 1),
    "dropout of tokens": lambda x, p, inplace: F.dropout(x.flatten(2), p).unflatten(2, (6, 5)),
    "dropout2d": lambda x, p, inplace: F.dropout2d(x, p, True, inplace),
    "dropout1d": lambda x, p, inplace: F.dropout1d(x.flatten(0, 1), p, True, inplace).unflatten(0, (3, 16)),
    "dropout1d, one sample": lambda x, p, inplace: F.dropout1d(x.sum((0, 1)), p, True, inplace).expand(3, 16, 6, 5),
    "dropout3d, one sample": lambda x, p, inplace: F.dropout3d(x, p, True, inplace),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("arrangement", SOME_ARRANGEMENTS, ids=str)
@on_ranks()
def test_dropped_pixels_and_channels_are_those_of_plain_pytorch(
    comm: Communicator, arrangement: Arrangement, inplace: bool
) -> None:
    """Values and gradients where channels are dropped, on images, lines and volumes of one sample."""
    wrong = []
    for name, function in CHANNELS.items():
        image = torch.randn(3, 16, 6, 5, dtype=torch.float64)
        plain, ours = image.clone().requires_grad_(), image.clone().requires_grad_()
        torch.manual_seed(4)
        expected = function(plain * 1, 0.4, inplace)
        torch.manual_seed(4)
        found = spatial.gather(function(arrange(ours, comm, arrangement) * 1, 0.4, inplace))
        weights = torch.randn_like(image).reshape(expected.shape)
        (expected * weights).sum().backward()
        (found * weights).sum().div(comm.size).backward()
        wrong += difference(name, found, expected)
        wrong += difference(f"gradient of {name}", comm.all_reduce(ours.grad), plain.grad)
    assert not wrong, wrong


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


@on_ranks(2)
def test_random_numbers_that_would_differ_between_holders_are_refused(comm: Communicator) -> None:
    tiles = spatial.shard(torch.ones(2, 2, 8, 8), spatial.Grid(comm, cols=2))
    for function in (torch.rand_like, torch.randn_like, torch.bernoulli, F.alpha_dropout, F.feature_alpha_dropout):
        with pytest.raises(spatial.NoRule, match="random"):
            function(tiles)
