"""A rank of which no other exists does what it would do among others: its shapes, its messages, its gradients."""

import torch

from mpi4dl.comm import Communicator
from mpi4dl.geometry import BATCH, GridShape, Tiling
from mpi4dl.models import build
from mpi4dl.parallel.spatial import SpatialTensor
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator, dry_run_grid
from mpi4dl.parallel.spatial.grid import Grid, Layout
from tests.parallel.spatial.comparing import Traffic
from tests.pool.ranks import on_ranks

SHAPE, IMAGE = GridShape(1, 1, 3), (2, 3, 32, 36)


def run(grid: Grid) -> tuple[tuple[int, ...], int]:
    """The shape of what a model makes of this rank's tile, and how many bytes of gradients it has then."""
    torch.manual_seed(0)
    model = build("resnet_v2", 10, depth=11)[:3]
    layout = Layout(grid, Tiling.even(grid.shape, (2, *IMAGE[2:])).drop(BATCH), (None, 2, 3))
    y = model(SpatialTensor(torch.rand(layout.local_shape(IMAGE)), layout))
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    return tuple(y.local.shape), sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@on_ranks(3)
def test_an_imagined_rank_is_like_each_real_one(comm: Communicator) -> None:
    traffic = Traffic(comm)
    result, sent = run(Grid.of(comm, SHAPE)), traffic.bytes
    grid = dry_run_grid(SHAPE, comm.rank)
    assert run(grid) == result
    assert grid.comm.counts["halo_bytes"] == sent > 0


def test_some_axes_have_fewer_ranks() -> None:
    grid = dry_run_grid(GridShape(2, 3, 4), 5)
    assert [grid.along(axes).size for axes in ((0,), (1,), (1, 2), (0, 1, 2))] == [2, 3, 12, 24]
    assert DryRunCommunicator(1, 3).all_gather(torch.ones(2)).shape == (3, 2)
    assert DryRunCommunicator(1, 3).all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
