"""One wide halo for some layers instead of one for each, as `widen` brings it: messages, boxes and exactness."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl.comm import Communicator
from mpi4dl.geometry import Interval
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Traffic, compare_models, difference
from tests.pool.ranks import Ranks, on_ranks


def mixed_block() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 1),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    )


def without_group_norm() -> nn.Sequential:
    layers = list(mixed_block())
    return nn.Sequential(*(layer for layer in layers if not isinstance(layer, nn.GroupNorm)))


def run_widened(
    comm: Communicator, halo: int, group_norm: bool, grid_shape: tuple[int, int]
) -> tuple[int, int, list[str]]:
    """Messages of the block's forward pass and of all of backward, and what differs from plain PyTorch."""
    torch.set_default_dtype(torch.float64)
    model = mixed_block() if group_norm else without_group_norm()
    plain_model = copy.deepcopy(model)
    image = torch.randn(2, 3, 17, 13)
    our_image, plain_image = image.clone().requires_grad_(), image.clone().requires_grad_()
    plain = plain_model(plain_image)
    weight = torch.randn_like(plain)
    (plain * weight).sum().backward()
    tiles = spatial.shard(our_image, spatial.Grid(comm, *grid_shape))
    traffic = Traffic(comm)
    widened = spatial.widen(tiles, halo)
    result = model(widened)
    forward = traffic.pieces
    owned = spatial.retile(result, result.layout.narrow.tiling)
    rows, cols = owned.layout.owned[1:]
    traffic.clear()
    (owned.local * weight[:, :, rows.start : rows.stop, cols.start : cols.stop]).sum().backward()
    backward = traffic.pieces
    wrong = difference("output", spatial.gather(result), plain)
    wrong += difference("gradient of the image", comm.all_reduce(our_image.grad), plain_image.grad)
    return forward, backward, wrong + compare_models(comm, model, plain_model)


@pytest.mark.parametrize("halo", [0, 1, 2, 3, 5, 20])
def test_one_wide_exchange_replaces_one_for_each_layer(ranks: Ranks, halo: int) -> None:
    """The block's windows reach three pixels, one layer each."""
    needed = 3 if halo == 0 else 1 + max(0, 3 - halo)
    for forward, backward, wrong in ranks(2).run(run_widened, halo, False, (2, 1)):
        assert wrong == []
        assert (forward, backward) == (needed, needed)


@pytest.mark.parametrize("grid_shape", [(2, 2), (4, 1), (1, 3)])
@pytest.mark.parametrize("group_norm", [False, True])
def test_wide_results_are_those_of_the_whole_image(ranks: Ranks, grid_shape: tuple[int, int], group_norm: bool) -> None:
    n = grid_shape[0] * grid_shape[1]
    for forward, _, wrong in ranks(n).run(run_widened, 3, group_norm, grid_shape):
        assert wrong == []
        if not group_norm:
            assert forward <= n - 1  # at most one message to each other rank


def follow_what_is_held(comm: Communicator) -> list[Any]:
    """The rows that the first rank's tile holds after each layer."""
    x = spatial.widen(spatial.shard(torch.randn(1, 1, 20, 4), spatial.Grid(comm, rows=2)), 5)
    held = [x.layout.held.rows]
    for layer in (
        nn.Conv2d(1, 1, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(1, 1, 3, stride=2, padding=1),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(1, 1, 3, padding=1),
    ):
        x = layer(x)
        held.append(x.layout.held.rows)
        assert x.local.shape[2] == held[-1].length
    return held


def test_what_is_held_shrinks_by_what_each_layer_reads(ranks: Ranks) -> None:
    first, second = ranks(2).run(follow_what_is_held)
    assert first == [
        Interval(0, 15),  # 10 rows of its own, and 5
        Interval(0, 14),
        Interval(0, 14),
        Interval(0, 7),  # 5 of its own, and 2
        Interval(0, 6),
        Interval(0, 5),
    ]
    assert second[0] == Interval(5, 20)
    assert second[1] == Interval(6, 20)


@on_ranks(2)
def test_a_halo_ends_at_the_edge_of_the_image(comm: Communicator) -> None:
    x = spatial.shard(torch.arange(64.0).view(1, 1, 8, 8), spatial.Grid(comm, rows=2))
    wide = spatial.widen(x, 2)
    assert wide.shape == x.shape
    assert wide.layout.owned == x.layout.owned
    assert torch.equal(spatial.gather(wide), spatial.gather(x))
    assert spatial.widen(x, 0) is x
    assert wide.layout.held.rows == (Interval(0, 6), Interval(2, 8))[comm.rank]
    assert wide.layout.held.cols == Interval(0, 8)
