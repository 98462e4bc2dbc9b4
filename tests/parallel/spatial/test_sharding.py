"""Spreading an image, from the whole or from tiles, and gathering it; ranks that pass what does not fit are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.geometry import BATCH, Split, Tiling
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Shape
from tests.pool.ranks import Ranks, on_ranks


def shard_and_gather(comm: Communicator, grid_shape: Shape, shape: Shape) -> Shape:
    batch, rows, cols = grid_shape
    grid = spatial.Grid(comm, rows, cols, batch)
    image = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = spatial.shard(image, grid)
    assert tuple(x.shape) == shape
    assert torch.equal(spatial.gather(x), image)
    own = image
    for dim, part, parts in zip((0, -2, -1), grid.coordinates, grid_shape, strict=True):
        own = own.tensor_split([own.shape[dim] * i // parts for i in range(1, parts)], dim)[part]
    assert torch.equal(x.local, own)
    return tuple(x.local.shape)


@pytest.mark.parametrize(
    ("grid", "shape", "tiles"),
    [
        ((1, 2, 2), (2, 3, 5, 7), [(2, 3, 2, 3), (2, 3, 2, 4), (2, 3, 3, 3), (2, 3, 3, 4)]),
        ((1, 2, 1), (3, 5, 7), [(3, 2, 7), (3, 3, 7)]),
        ((1, 1, 2), (5, 7), [(5, 3), (5, 4)]),
        ((1, 2, 1), (2, 3, 4, 5, 7), [(2, 3, 4, 2, 7), (2, 3, 4, 3, 7)]),
        ((2, 1, 2), (3, 2, 4, 4), [(1, 2, 4, 2), (1, 2, 4, 2), (2, 2, 4, 2), (2, 2, 4, 2)]),
        ((1, 4, 1), (1, 1, 4, 1), [(1, 1, 1, 1)] * 4),
    ],
)
def test_each_rank_keeps_its_own_tile(ranks: Ranks, grid: Shape, shape: Shape, tiles: list[Shape]) -> None:
    assert ranks(len(tiles)).run(shard_and_gather, grid, shape) == tiles


@on_ranks(2)
def test_the_gradient_of_an_image_is_the_sum_over_ranks(comm: Communicator) -> None:
    """The gradient of the image that every rank has is its tile's, zeros around it; over ranks it sums to the whole."""
    image = torch.randn(1, 2, 6, 5, requires_grad=True)
    weight = torch.randn(1, 2, 6, 5)
    x = spatial.shard(image, spatial.Grid(comm, rows=2))
    (spatial.gather(x) * weight).sum().div(comm.size).backward()
    mine = image.grad.clone()
    rows = slice(0, 3) if comm.rank == 0 else slice(3, 6)
    inside = torch.equal(mine[:, :, rows], weight[:, :, rows])
    mine[:, :, rows] = 0
    assert inside
    assert not mine.any()
    assert torch.equal(comm.all_reduce(image.grad), weight)


def start_from_tiles(comm: Communicator, row_cuts: list[int], col_cuts: list[int], batch_cuts: list[int]) -> bool:
    """Tiles cut anywhere are the image: gathered, convolved, and in their gradients."""
    torch.set_default_dtype(torch.float64)
    grid = spatial.Grid(comm, len(row_cuts) - 1, len(col_cuts) - 1, len(batch_cuts) - 1)
    image = torch.randn(batch_cuts[-1], 3, row_cuts[-1], col_cuts[-1])
    slices = [
        slice(cuts[at], cuts[at + 1])
        for cuts, at in zip((batch_cuts, row_cuts, col_cuts), grid.coordinates, strict=True)
    ]
    tile = image[slices[0], :, slices[1], slices[2]].clone().requires_grad_()
    x = spatial.from_tile(tile, grid, (row_cuts[-1], col_cuts[-1]))
    assert x.shape == image.shape
    assert torch.equal(x.local, tile)
    layer = nn.Conv2d(3, 4, 5, stride=2, padding=2)
    whole = image.clone().requires_grad_()
    expected, found = layer(whole), spatial.gather(layer(x))
    expected.square().sum().backward()
    found.square().sum().div(grid.size).backward()
    gradient = whole.grad[slices[0], :, slices[1], slices[2]]
    return torch.allclose(found, expected, atol=1e-12) and torch.allclose(tile.grad, gradient, atol=1e-12)


@pytest.mark.parametrize(
    ("row_cuts", "col_cuts", "batch_cuts"),
    [
        ([0, 5, 7], [0, 1, 11], [0, 2]),
        ([0, 9, 9, 10, 16], [0, 7], [0, 1]),
        ([0, 8], [0, 3, 13], [0, 1, 4]),
        ([0, 4, 8, 8], [0, 6], [0, 2]),
    ],
)
def test_tiles_may_be_cut_anywhere(
    ranks: Ranks, row_cuts: list[int], col_cuts: list[int], batch_cuts: list[int]
) -> None:
    n = (len(row_cuts) - 1) * (len(col_cuts) - 1) * (len(batch_cuts) - 1)
    assert ranks(n).run(start_from_tiles, row_cuts, col_cuts, batch_cuts) == [True] * n


def start_from_plain_tiles(comm: Communicator, rows: int, batch: int) -> None:
    """Tiles without a batch, or without channels too, of uneven heights; replicas pass the same."""
    grid = spatial.Grid(comm, rows=rows, batch=batch)
    cuts = [0, 5, 7, 13][: rows + 1]
    for leading in ((), (3,), (7,), (1, 3)):
        image = torch.randn(*leading, cuts[-1], 6)
        above = image[..., cuts[grid.coordinates[1]] : cuts[grid.coordinates[1] + 1], :]
        parts = above if batch == 1 or len(leading) < 2 else above.expand(grid.coordinates[BATCH] + 1, -1, -1, -1)
        x = spatial.from_tile(parts, grid, (cuts[-1], 6))
        whole = image if parts is above else image.expand(sum(range(1, batch + 1)), -1, -1, -1)
        assert x.shape == whole.shape
        assert torch.equal(spatial.gather(x * 2), whole * 2)
        assert torch.equal(spatial.gather(x.amax(-2)), whole.amax(-2))


@pytest.mark.parametrize(("rows", "batch"), [(2, 1), (3, 1), (2, 2)])
def test_tiles_need_neither_batch_nor_channels(ranks: Ranks, rows: int, batch: int) -> None:
    ranks(rows * batch).run(start_from_plain_tiles, rows, batch)


Wrong = Callable[[Communicator, spatial.Grid], Any]


def tile(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# What rank 1 does otherwise, or all do, on a grid of two rows; and what every rank is told.
MISTAKES: dict[str, tuple[Wrong, list[str]]] = {
    "shard: another shape on one rank": (
        lambda c, g: spatial.shard(tile(1, 3, 8, 8 + c.rank), g),
        ["shape is (1, 3, 8, 8) on rank 0 but (1, 3, 8, 9) on rank 1"],
    ),
    "shard: another dtype on one rank": (
        lambda c, g: spatial.shard(tile(1, 3, 8, 8, dtype=torch.float64 if c.rank else torch.float32), g),
        ["dtype is 'torch.float32' on rank 0 but 'torch.float64' on rank 1"],
    ),
    "shard: fewer rows than tiles": (
        lambda c, g: spatial.shard(tile(1, 3, 1, 8), g),
        ["an image of 1 rows cannot be cut into 2 tiles along them: use a smaller grid"],
    ),
    "shard: no image": (lambda c, g: spatial.shard(tile(5), g), ["at least the dims rows and cols", "(5,)"]),
    "from_tile: another width on one rank": (
        lambda c, g: spatial.from_tile(tile(1, 3, 4, 8 + c.rank), g, (8, 8)),
        ["the ranks [0, 1] share one part of the cols, but passed tiles of [8, 9] cols"],
    ),
    "from_tile: another batch on one rank": (
        lambda c, g: spatial.from_tile(tile(1 + c.rank, 3, 4, 8), g, (8, 8)),
        ["the ranks [0, 1] share one part of the samples, but passed tiles of [1, 2] samples"],
    ),
    "from_tile: tiles that do not make up the image": (
        lambda c, g: spatial.from_tile(tile(1, 3, 4, 8), g, (9, 8)),
        ["the tiles make up 8 rows, but size=(9, 8) says 9"],
    ),
    "from_tile: another number of channels on one rank": (
        lambda c, g: spatial.from_tile(tile(1, 3 + c.rank, 4, 8), g, (8, 8)),
        ["tiles of different kinds", "(1, 3, 4, 8)", "(1, 4, 4, 8)"],
    ),
    "from_tile: another number of channels on one rank, without a batch": (
        lambda c, g: spatial.from_tile(tile(3 + c.rank, 4, 8), g, (8, 8)),
        ["tiles of different kinds", "(3, 4, 8)", "(4, 4, 8)"],
    ),
    "from_tile: another number of dims on one rank": (
        lambda c, g: spatial.from_tile(tile(*[4] * (c.rank + 2)), g, (8, 4)),
        ["tiles of different kinds", "(4, 4)", "(4, 4, 4)"],
    ),
    "from_tile: another dtype on one rank": (
        lambda c, g: spatial.from_tile(tile(1, 3, 4, 8, dtype=torch.float16 if c.rank else torch.float32), g, (8, 8)),
        ["tiles of different kinds", "torch.float16", "torch.float32"],
    ),
    "from_tile: another size on one rank": (
        lambda c, g: spatial.from_tile(tile(1, 3, 4, 8), g, (8 + c.rank, 8)),
        ["(8, 8)", "(9, 8)"],
    ),
    "from_tile: no image": (
        lambda c, g: spatial.from_tile(tile(4), g, (8, 8)),
        ["at least the dims rows and cols", "(4,)"],
    ),
    "from_tile: no image on one rank": (
        lambda c, g: spatial.from_tile(tile(4) if c.rank else tile(1, 3, 4, 8), g, (8, 8)),
        ["at least the dims rows and cols", "(4,)"],
    ),
}


@on_ranks(2)
def test_mistakes_are_told_to_all_ranks_alike(comm: Communicator) -> None:
    told = {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake(comm, spatial.Grid(comm, rows=2))
        except Exception as error:
            told[name] = type(error).__name__, str(error)
    comm.agree(None, told=told)
    assert {name for name, (kind, _) in told.items() if kind != Refusal.__name__} == set()
    assert told.keys() == MISTAKES.keys()
    missing = {name: told[name] for name, (_, words) in MISTAKES.items() if any(w not in told[name][1] for w in words)}
    assert missing == {}, missing


@on_ranks(2)
def test_a_grid_that_does_not_fit_the_ranks_says_what_to_do(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"rows\(2\) x cols\(2\) = 4 ranks, but there are 2: start with mpirun -n 4"):
        spatial.Grid(comm, rows=2, cols=2)
    with pytest.raises(ValueError, match=r"batch\(2\) x rows\(2\) x cols\(1\) = 4 ranks, but there are 2"):
        spatial.Grid(comm, rows=2, batch=2)
    with pytest.raises(ValueError, match="at least one rank on each axis, but got 1 x 0 x 2"):
        spatial.Grid(comm, rows=0, cols=2)


@on_ranks(4)
def test_a_grid_knows_who_shares_an_axis(comm: Communicator) -> None:
    grid = spatial.Grid(comm, rows=1, cols=2, batch=2)
    along = [grid.along(axes).all_gather_object(comm.rank) for axes in ((0,), (2,), (0, 2), (1,), ())]
    assert grid.along((1, 2)) is grid.along((2,))
    assert (grid.coordinates, grid.box(3, (5, 7)).shape, along) == [
        ((0, 0, 0), (1, 5, 3), [[0, 2], [0, 1], [0, 1, 2, 3], [0], [0]]),
        ((0, 0, 1), (1, 5, 4), [[1, 3], [0, 1], [0, 1, 2, 3], [1], [1]]),
        ((1, 0, 0), (2, 5, 3), [[0, 2], [2, 3], [0, 1, 2, 3], [2], [2]]),
        ((1, 0, 1), (2, 5, 4), [[1, 3], [2, 3], [0, 1, 2, 3], [3], [3]]),
    ][comm.rank]


@on_ranks(4)
def test_retile_moves_pixels_and_gradients(comm: Communicator) -> None:
    """An image that moves to other cuts, to one rank alone, and back; and the gradient on the way back."""
    image = torch.randn(1, 2, 8, 6, requires_grad=True)
    x = spatial.shard(image, spatial.Grid(comm, rows=2, cols=2))
    batch, _, _ = x.layout.tiling.splits
    shapes = []
    y = x
    for row_cuts, col_cuts in (([0, 7, 8], [0, 0, 6]), ([0, 8, 8], [0, 6, 6]), ([0, 2, 8], [0, 5, 6])):
        y = spatial.retile(y, Tiling((batch, Split.at(row_cuts), Split.at(col_cuts))))
        shapes.append(tuple(y.local.shape[2:]))
    back = spatial.retile(y, x.layout.tiling)
    weight = torch.randn(1, 2, 8, 6)
    (spatial.gather(y) * weight).sum().div(comm.size).backward()
    assert spatial.retile(back, x.layout.tiling) is back
    assert (shapes, torch.equal(back.local, x.local), torch.allclose(comm.all_reduce(image.grad), weight)) == [
        ([(7, 0), (8, 6), (2, 5)], True, True),
        ([(7, 6), (8, 0), (2, 1)], True, True),
        ([(1, 0), (0, 6), (6, 5)], True, True),
        ([(1, 6), (0, 0), (6, 1)], True, True),
    ][comm.rank]


@on_ranks(2)
def test_what_every_rank_has_whole_is_plain(comm: Communicator) -> None:
    plain = torch.randn(3)
    whole = spatial.shard(torch.randn(1, 1, 4, 4), spatial.Grid(comm, rows=2)).mean((2, 3))
    assert spatial.gather(plain) is plain
    assert not isinstance(whole, spatial.SpatialTensor)
