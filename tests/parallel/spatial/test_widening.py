"""One exchange at the entry of a block instead of one for each layer: how many there are, where, and exactness."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import BATCH, GridShape, Interval, Tiling
from mpi4dl.parallel import spatial
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial import Layout, SpatialTensor
from mpi4dl.parallel.spatial.dry_run_grid import dry_run_grid
from mpi4dl.parallel.streaming.wide_halos import fetch_at_entries
from tests.parallel.spatial.comparing import Traffic, compare_models, difference, on_ranks, sum_gradients
from tests.pool.ranks import Ranks
from tests.short_runs import DENSE, Task, TILES_1x2, TILES_2x2, check


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
    start = Exchange.start

    def counted(self: Exchange, *args: Any) -> Any:
        counts.append(bool(self.plan.sends or self.plan.receives))
        return start(self, *args)

    grid = spatial.Grid(comm, rows=2, cols=2)
    Exchange.start = counted  # type: ignore[method-assign]
    try:
        x = spatial.shard(image.requires_grad_(), grid) * 1  # whose gradient the first exchange brings home, too
        stage(x)  # rehearses, which asks for pixels in vain
        counts.clear()
        y = stage(x)
        forward = sum(counts)
        y.square().sum().backward(torch.tensor(1.0 / grid.size, dtype=torch.float64))
    finally:
        Exchange.start = start  # type: ignore[method-assign]
    sum_gradients(stage, grid.comm)
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
    copied = copy.deepcopy(row)
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
