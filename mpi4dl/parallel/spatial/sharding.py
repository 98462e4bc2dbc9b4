"""How a tensor comes to be spread over a grid."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from mpi4dl.comm.exchange import linear, narrow
from mpi4dl.comm.streams import carried
from mpi4dl.geometry import BATCH, Split, Tiling
from mpi4dl.parallel.spatial import halo
from mpi4dl.parallel.spatial.alignment import part as part_of
from mpi4dl.parallel.spatial.grid import Dims, Grid, Layout
from mpi4dl.parallel.spatial.halo_prefetch import Source
from mpi4dl.parallel.spatial.tensor import SpatialTensor, wrap


def image_dims(grid: Grid, ndim: int, has_samples: bool = False) -> Dims:
    """The dims of each axis in such images, of space the last; a batch that is not tracked counts as any other.

    `has_samples`: dim 0 are the samples, also of what has no channels, such as (N, tokens).
    """
    count = len(grid.space)
    samples = 0 if grid.tracks_batch and (has_samples or ndim > count + 1) else None
    return (samples, *range(ndim - count, ndim), *(None,) * (len(grid.axes) - 1 - count))


def even_layout(grid: Grid, shape: Sequence[int], has_samples: bool = True) -> Layout:
    """How ranks hold batches of this shape, (N, C, H, W), or (N, tokens), that are cut evenly."""
    dims = image_dims(grid, len(shape), has_samples)
    return Layout(grid, _tiling(dims, Tiling.even(grid.shape, (shape[0], *shape[-len(grid.space) :]))), dims)


def _tiling(dims: Dims, tiling: Tiling) -> Tiling:
    return tiling if dims[BATCH] is not None else tiling.drop(BATCH)


def shard(image: Tensor, grid: Grid) -> SpatialTensor:
    """Spread a tensor that every rank has whole: each keeps its own tile.

    `image` is (N, C, H, W), or any tensor whose last two dims are height and width; on a grid with a depth (N, C, D, H,
    W), on one of tokens (N, C, L). Raises `Refusal` on all ranks if the image has fewer pixels than the grid has ranks
    along an axis, or if the ranks pass different shapes or dtypes. Backward gives each rank the gradient of its own
    tile, and zeros around it: like that of everything that ranks hold copies of, the gradient of `image` is the sum
    over ranks.
    """
    _agree(grid, tuple(image.shape), str(image.dtype))
    return spread_evenly(image, grid)


def spread_evenly(image: Tensor, grid: Grid) -> SpatialTensor:
    """The same of a tensor that is known to be alike on all ranks, and large enough."""
    layout = even_layout(grid, image.shape, has_samples=False)
    grid.halo_prefetch.enter()
    return SpatialTensor(narrow(image, layout.dims, layout.tiling.whole, layout.owned), layout)


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Spread a tensor that every rank has whole as `like` is spread; both have the same number of dims.

    Along the axes that `like` has cut, x has its size, such as (N, other channels, H, W); ValueError otherwise. A
    spread tensor is cut anew. If `like` is plain, so is the result.
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
    return wrap(part_of(x, layout), layout)


def _agree(grid: Grid, shape: tuple[int, ...], dtype: str) -> None:
    problem, names = None, grid.names[1 : 1 + len(grid.space)]
    if len(shape) < len(names):
        problem = f"an image has at least the dims {_listed(names)}, but this tensor has shape {shape}"
    else:
        for name, tiles, pixels in zip(names, grid.shape.space, shape[-len(names) :], strict=True):
            if tiles > pixels:
                problem = f"an image of {pixels} {name} cannot be cut into {tiles} tiles along them: use a smaller grid"
    grid.comm.agree(problem, shape=shape, dtype=dtype)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + [names[-1]])


def from_tile(tile: Tensor, grid: Grid, size: Sequence[int]) -> SpatialTensor:
    """Spread an image of `size` (H, W) of which each rank passes the tile that it holds: (N, C, h, w), or just (h, w).

    On a grid with a depth, or of tokens, `size` is (D, H, W), or (L,), and tiles have these as their last dims.

    Tiles may be cut anywhere, as long as those of one row of the grid are equally high, those of one column equally
    wide, and together they make up the image; `Grid.box` gives the even cut. With a grid that cuts the batch, N may
    differ from replica to replica; without N, each replica passes the same image. Raises `Refusal` on all ranks
    otherwise.
    """
    answers = grid.comm.all_gather_object((tuple(tile.shape), str(tile.dtype), tuple(size)))
    shapes = [shape for shape, _, _ in answers]
    names, count = grid.names[1 : 1 + len(grid.space)], len(grid.space)
    if any(len(shape) < count for shape in shapes):
        grid.comm.agree(f"an image has at least the dims {_listed(names)}, but the ranks passed tiles of {shapes}")
    samples, problem = 0 if tile.dim() > count + 1 else None, None
    first = 0 if samples is None else 1
    if len({(dtype, asked, len(shape), shape[first:-count]) for shape, dtype, asked in answers}) > 1:
        grid.comm.agree(f"the ranks passed tiles of different kinds: {answers}")
    splits = []
    for axis, dim, name in zip((BATCH, *grid.space), (samples, *range(-count, 0)), ("samples", *names), strict=True):
        lengths: list[int] = []
        for part in range(grid.shape[axis]):
            ranks = [rank for rank in range(grid.size) if grid.shape.coordinates(rank)[axis] == part]
            found = sorted({1 if dim is None else shapes[rank][dim] for rank in ranks})
            if len(found) > 1:
                problem = f"the ranks {ranks} share one part of the {name}, but passed tiles of {found} {name}"
            lengths.append(found[0])
        splits.append(Split.at([0, *accumulate(lengths)]))
    for split, pixels, name in zip(splits[BATCH + 1 :], size, names, strict=True):
        if problem is None and split.size != pixels:
            problem = f"the tiles make up {split.size} {name}, but size={tuple(size)} says {pixels}"
    if problem is not None:
        grid.comm.agree(problem)
    return _spread(tile, grid, Tiling.of_images(grid.shape, splits))


def from_tiling(tile: Tensor, grid: Grid, tiling: Tiling, device: torch.device | None = None) -> SpatialTensor:
    """Spread images whose tiling all ranks know, so that they need not ask each other. Raises ValueError on this rank
    if its tile, such as (N, C, h, w), is not what it owns by that.

    With a `device` they are brought there, with the halo that what followed them before asked for. That comes from the
    other ranks while the tile is where it is, mostly on the host.
    """
    found = (tile.shape[0], *tile.shape[-len(grid.space) :])
    mine = tiling.owned(grid.rank).shape[: len(found)]
    if found != mine:
        has, part = (f"{shape[0]} samples of {' x '.join(map(str, shape[1:]))} px" for shape in (found, mine))
        raise ValueError(f"this rank's tile has {has}, but its part of the batch is {part}")
    x = _spread(tile, grid, tiling, has_samples=True)
    if device is None:
        return x
    owned = x.layout.tiling
    held = halo.retile(x, grid.halo_prefetch.held(grid, owned))
    brought = held.like(carried(held.local, device))
    brought.halo_sources = (Source(grid.halo_prefetch, grid, owned),)
    return brought


def _spread(tile: Tensor, grid: Grid, tiling: Tiling, has_samples: bool = False) -> SpatialTensor:
    dims = image_dims(grid, tile.dim(), has_samples)
    grid.halo_prefetch.enter()
    if tile.requires_grad:  # `Tiles.backward` sums no gradients of what other ranks have not
        tile = tile if tile.is_leaf else linear(tile, Tensor.detach, lambda gradient: gradient)
        (tile if tile.is_leaf else tile.grad_fn).is_of_one_rank = True  # type: ignore[union-attr]
    return SpatialTensor(tile, Layout(grid, _tiling(dims, tiling), dims))


def spread_buffer(modules: Iterable[nn.Module]) -> str | None:
    """Why a model cannot go on: a buffer that its forward assigned is spread over ranks; None if there is none."""
    for module in modules:
        for name, value in module._buffers.items():
            if isinstance(value, SpatialTensor):
                return (
                    f"the buffer {name} of {type(module).__name__} became a tensor that is spread over ranks: write to "
                    "it in place, keep what mpi4dl.parallel.spatial.gather returns, or a number for each channel"
                )
    return None
