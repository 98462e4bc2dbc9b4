"""One exchange at the entry of blocks in place of one for each layer: how many there are, where, and exactness."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import BATCH, GridShape, Tiling
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import Layout, SpatialTensor
from mpi4dl.parallel.spatial.dry_run_grid import dry_run_grid
from mpi4dl.parallel.spatial.wide import fetch_at_entries
from tests.pool.ranks import Ranks
from tests.short_runs import DENSE, Task, TILES_1x2, TILES_2x2, check

LAYERS, BLOCKS = 4, 2


class Residual(nn.Module):
    """3x3 convolutions in a row, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).relu() + x


def stage_of_blocks() -> nn.Sequential:
    return nn.Sequential(*(Residual() for _ in range(BLOCKS)))


def exchanges(comm: Communicator, halo: str) -> tuple[int, int, float]:
    """How often pixels are exchanged forward and backward, and how far gradients are from those of one process."""
    torch.manual_seed(0)
    stage, image = stage_of_blocks().double(), torch.randn(1, 3, 72, 76, dtype=torch.float64)
    stage(image).square().sum().backward()
    expected = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    stage.zero_grad()
    if halo != "layer":
        fetch_at_entries(stage)
    counts: list[bool] = []
    trade = Exchange.trade

    def counted(self: Exchange, *args: Any) -> Any:
        counts.append(bool(self.plan.sends or self.plan.receives))
        return trade(self, *args)

    grid = spatial.Grid(comm, rows=2, cols=2)
    Exchange.trade = counted  # type: ignore[method-assign]
    try:
        x = spatial.shard(image.requires_grad_(), grid) * 1  # whose gradient the first exchange brings home, too
        stage(x)  # rehearses, which asks for pixels in vain
        counts.clear()
        y = stage(x)
        forward = sum(counts)
        y.square().sum().backward(torch.tensor(1.0 / grid.size, dtype=torch.float64))
    finally:
        Exchange.trade = trade  # type: ignore[method-assign]
    spatial.sum_gradients(stage, grid)
    error = max(
        float((p.grad - e).abs().max() / e.abs().max())
        for p, e in zip(stage.parameters(), expected, strict=True)
        if p.grad is not None
    )
    return forward, sum(counts) - forward, error


@pytest.mark.parametrize(("halo", "count"), [("layer", BLOCKS * LAYERS), ("block", BLOCKS)])
def test_exchanges_are_as_many_as_was_chosen(ranks: Ranks, halo: str, count: int) -> None:
    for forward, backward, error in ranks(4).run(exchanges, halo):
        assert (forward, backward) == (count, count)
        assert error < 1e-10


def test_what_is_chosen_is_explained() -> None:
    stage = stage_of_blocks()
    fetch_at_entries(stage)
    found = spatial.explain(stage, (72, 76), dry_run_grid(GridShape(1, 2, 2)))
    assert [(name, halo.margin, halo.exchanges_saved) for name, halo in found.halos.items()] == [
        ("0", LAYERS, LAYERS - 1),
        ("1", LAYERS, LAYERS - 1),
    ]
    assert found.total("messages") == 3 * BLOCKS
    assert 0 < found.halos["0"].computed_twice < 1
    assert found.total("halo_bytes") > 0
    assert [o.name for o in found.operators if o.communicates] == ["wide_halo"] * BLOCKS
    assert found.halos["0"].reason in str(found)


def test_tiles_that_are_too_small_fetch_by_layer() -> None:
    stage = stage_of_blocks()
    fetch_at_entries(stage)
    found = spatial.explain(stage, (4 * LAYERS, 76), dry_run_grid(GridShape(1, 2, 2)))
    assert [halo.margin for halo in found.halos.values()] == [0] * BLOCKS
    assert "a tile's side" in found.halos["0"].reason


def test_a_copy_of_blocks_has_blocks_of_its_own() -> None:
    row = nn.Sequential(*(Residual() for _ in range(150)))
    fetch_at_entries(row)
    copied = deepcopy(row)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(copied(x), x)
    assert not torch.equal(row(x), x)
    found = spatial.explain(copied[:3], (64, 64), dry_run_grid(GridShape(1, 1, 2)))
    assert [halo.margin for halo in found.halos.values()] == [LAYERS] * 3


def test_all_ranks_find_the_same_margin() -> None:
    # Rank 0 needs nothing of its neighbours, nor they of it: 10 rows are 5 windows. Rank 2 has half a window.
    block, shape, margins = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 3, 1)), GridShape(1, 4, 1), []
    fetch_at_entries([block])
    for rank in range(4):
        grid = dry_run_grid(shape, rank)
        layout = Layout(grid, Tiling.even(shape, (1, 42, 6)).drop(BATCH), (None, 2, 3))
        block(SpatialTensor(torch.zeros(layout.local_shape((1, 3, 42, 6))), layout))
        assert grid.choices is not None
        margins += [choice.margin for choice in grid.choices[block].values()]
    assert margins == [1, 1, 1, 1]


RESNET = Task("resnet_v2", (97, 131), batch=4, model_options=(("depth", 20),))


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (RESNET.with_engine(halo="block"), TILES_2x2),
        pytest.param(
            RESNET.with_engine(halo="block"),
            Plan(((1, 2), (1, 1)), microbatches=2),
            marks=pytest.mark.exhaustive,
        ),
        (DENSE.with_engine(halo="block"), TILES_1x2),
    ],
    ids=str,
)
@pytest.mark.exhaustive
def test_models(ranks: Ranks, task: Task, plan: Plan) -> None:
    check(ranks, task, plan)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiles", [(1, 1, 2), (1, 2, 2)])
def test_volumes(ranks: Ranks, tiles: tuple[int, ...]) -> None:
    task = Task("resnet3d", (37, 42, 45), batch=2, num_steps=1)
    check(ranks, task.with_engine(halo="block"), Plan((tiles,)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("resnet18", {}),
        ("convnext_tiny", {"stochastic_depth_prob": 0.0}),
        ("efficientnet_b0", {"stochastic_depth_prob": 0.0, "dropout": 0.0}),
        ("densenet121", {}),
        # With 18 cells, untrained, plain PyTorch differs by 1.5e-10 if one bit of the images does.
        ("amoebanetd", {"num_layers": 3, "num_filters": 16}),
    ],
)
def test_well_known_models(ranks: Ranks, model: str, options: dict[str, float]) -> None:
    task = Task(model, (160, 192), batch=2, model_options=tuple(options.items()), num_steps=1)
    check(ranks, task.with_engine(halo="block"), TILES_2x2)
