"""How a tensor comes to be spread over a grid, and how the gradients of replicated parameters come together."""

from itertools import accumulate

import torch
from torch import Tensor, nn

from mpi4dl.comm.exchange import narrow
from mpi4dl.comm.streams import carried
from mpi4dl.geometry import BATCH, COLS, ROWS, Box, Interval, Split, Tiling
from mpi4dl.parallel.replicas.reducer import Reducer
from mpi4dl.parallel.spatial import halo
from mpi4dl.parallel.spatial.foresight import Source
from mpi4dl.parallel.spatial.grid import Dims, Grid, Layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap


def image_dims(grid: Grid, ndim: int) -> Dims:
    """The dims of batch, rows and columns of such images; a batch that is not tracked counts as any other."""
    return (0 if grid.tracks_batch and ndim > 3 else None, ndim - 2, ndim - 1)


def _tiling(dims: Dims, splits: tuple[Split, Split, Split]) -> Tiling:
    tiling = Tiling(splits)
    return tiling if dims[BATCH] is not None else tiling.drop(BATCH)


def shard(image: Tensor, grid: Grid) -> SpatialTensor:
    """Spread a tensor that every rank has whole: each keeps its own tile.

    `image` is (N, C, H, W), or any tensor whose last two dims are height and width. Raises `Refusal` on all ranks if
    the image has fewer rows or columns than the grid, or if the ranks pass different shapes or dtypes. Backward gives
    each rank the gradient of its own tile, and zeros around it: like that of everything that ranks hold copies of, the
    gradient of `image` is the sum over ranks.
    """
    _agree(grid, tuple(image.shape), str(image.dtype))
    dims = image_dims(grid, image.dim())
    size = (image.shape[0], image.shape[-2], image.shape[-1])
    tiling = _tiling(dims, Tiling.even(grid.shape, size).splits)
    layout = Layout(grid, tiling, dims)
    grid.foresight.enter()
    whole = Box(Interval(0, tiling.size[BATCH]), Interval(0, size[ROWS]), Interval(0, size[COLS]))
    return SpatialTensor(narrow(image, dims, whole, layout.owned), layout)


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Spread a tensor that every rank has whole as `like` is spread; both have the same number of dims.

    Along the axes that `like` has cut, x has its size, such as (N, other channels, H, W); ValueError otherwise. What is
    spread already is cut anew. If `like` is plain, so is the result.
    """
    if not isinstance(like, SpatialTensor):
        return halo.gather(x)
    layout = like.layout
    spread = [dim for dim in layout.dims if dim is not None]
    if x.dim() != like.dim() or any(x.shape[dim] != like.shape[dim] for dim in spread):
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} cannot be spread like one of {tuple(like.shape)}, whose dims {spread} "
            "are shared out: both must have the same number of dims, and the same sizes along those"
        )
    return wrap(halo.part(x, layout), layout)


def _agree(grid: Grid, shape: tuple[int, ...], dtype: str) -> None:
    problem = None
    if len(shape) < 2:
        problem = f"an image has at least the dims height and width, but this tensor has shape {shape}"
    else:
        for name, tiles, pixels in (("rows", grid.rows, shape[-2]), ("columns", grid.cols, shape[-1])):
            if tiles > pixels:
                problem = f"an image of {pixels} {name} cannot be cut into {tiles} {name} of tiles: use a smaller grid"
    grid.comm.agree(problem, shape=shape, dtype=dtype)


def from_tile(tile: Tensor, grid: Grid, size: tuple[int, int]) -> SpatialTensor:
    """Spread an image of `size` (H, W) of which each rank passes the tile that it holds: (N, C, h, w), or just (h, w).

    Tiles may be cut anywhere, as long as those of one row of the grid are equally high, those of one column equally
    wide, and together they make up the image; `Grid.box` gives the even cut. With a grid that cuts the batch, N may
    differ from replica to replica; without N, each replica passes the same image. Raises `Refusal` on all ranks
    otherwise.
    """
    answers = grid.comm.all_gather_object((tuple(tile.shape), str(tile.dtype), tuple(size)))
    shapes = [shape for shape, _, _ in answers]
    if any(len(shape) < 2 for shape in shapes):
        grid.comm.agree(f"an image has at least the dims height and width, but the ranks passed tiles of {shapes}")
    samples, problem = 0 if tile.dim() > 3 else None, None
    if (
        len({(dtype, asked, len(shape), shape[0 if samples is None else 1 : -2]) for shape, dtype, asked in answers})
        > 1
    ):
        problem = f"the ranks passed tiles of different kinds: {answers}"
        grid.comm.agree(problem)
    splits = []
    for axis, dim, name in ((BATCH, samples, "samples"), (ROWS, -2, "rows"), (COLS, -1, "columns")):
        lengths: list[int] = []
        for part in range(grid.shape[axis]):
            ranks = [rank for rank in range(grid.size) if grid.shape.coordinates(rank)[axis] == part]
            found = sorted({1 if dim is None else shapes[rank][dim] for rank in ranks})
            if len(found) > 1:
                problem = f"the ranks {ranks} share one part of the {name}, but passed tiles of {found} {name}"
            lengths.append(found[0])
        splits.append(Split.at([0, *accumulate(lengths)]))
    for split, pixels, name in zip(splits[ROWS:], size, ("rows", "columns"), strict=True):
        if problem is None and split.size != pixels:
            problem = f"the tiles make up {split.size} {name}, but size={tuple(size)} says {pixels}"
    if problem is not None:
        grid.comm.agree(problem)
    batch, rows, cols = splits
    return _spread(tile, grid, Tiling((batch, rows, cols)))


def from_tiling(tile: Tensor, grid: Grid, tiling: Tiling, device: torch.device | None = None) -> SpatialTensor:
    """Spread images whose tiling all ranks know, so that they need not ask each other. Raises ValueError on this rank
    if its tile, such as (N, C, h, w), is not what it owns by that.

    With a `device` they are brought there, with the halo that what followed them before asked for. That comes from the
    other ranks while the tile is where it is, mostly on the host.
    """
    box, found = tiling.owned(grid.rank), (tile.shape[0], tile.shape[-2], tile.shape[-1])
    if found != box.shape:
        raise ValueError(
            f"this rank's tile has {found[0]} samples of {found[1]} x {found[2]} px, but its part of the batch is "
            f"{box.shape[0]} samples of {box.shape[1]} x {box.shape[2]} px"
        )
    x = _spread(tile, grid, tiling)
    if device is None:
        return x
    owned = x.layout.tiling
    held = halo.retile(x, grid.foresight.held(grid, owned))
    brought = held.like(carried(held.local, device))
    brought.providers = (Source(grid.foresight, grid, owned),)
    return brought


def _spread(tile: Tensor, grid: Grid, tiling: Tiling) -> SpatialTensor:
    dims = image_dims(grid, tile.dim())
    grid.foresight.enter()
    return SpatialTensor(tile, Layout(grid, _tiling(dims, tiling.splits), dims))


def sum_gradients(model: nn.Module, grid: Grid) -> None:
    """Add up every parameter's gradient over the ranks of the grid: what each has is its tile's part of it."""
    Reducer(model.parameters(), grid.comm).reduce()
