"""Sampling an image at any places: each rank has the image whole for that, and samples at the places of its part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import BATCH, Tiling
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather_axes, part
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap


@register(F.grid_sample)
def grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """(N, C, H, W) at places (N, H', W', 2), or (N, C, D, H, W) at places (N, D', H', W', 3).

    Cut as the places are, or evenly where those are plain.
    """
    count = grid.dim() - 2
    if input.dim() != grid.dim() or count not in (2, 3) or input.shape[0] != grid.shape[0] or grid.shape[-1] != count:
        raise refusal("torch.nn.functional.grid_sample", f"shapes {tuple(input.shape)} and {tuple(grid.shape)}")
    image: Tensor = input
    if isinstance(image, SpatialTensor):
        image = gather_axes(image, [axis for axis, dim in enumerate(image.layout.dims) if dim not in (None, 0)])
    if isinstance(grid, SpatialTensor) and (axis := grid.layout.axis(grid.dim() - 1)) is not None:
        grid = gather_axes(grid, [axis])
    if isinstance(grid, SpatialTensor):
        layout = grid.layout.narrow
    else:
        assert isinstance(input, SpatialTensor)
        ranks = input.layout.grid
        dims = (None, *(dim - 1 for dim in range(input.dim() - len(ranks.space), input.dim())))
        sizes = [1 if dim is None else grid.shape[dim] for dim in dims]
        tiling = Tiling.even(ranks.shape, sizes).replace(BATCH, input.layout.tiling.splits[BATCH].narrow())
        layout = Layout(ranks, tiling, dims)
    if isinstance(image, SpatialTensor) and layout.dims[BATCH] is None:
        tiling = layout.tiling.replace(BATCH, image.layout.tiling.splits[BATCH].narrow())
        layout = replace(layout, tiling=tiling, dims=(0, *layout.dims[1:]))
    places = part(grid, layout)
    whole = replace(layout, dims=(layout.dims[BATCH], *(None for _ in layout.dims[1:])))
    y = F.grid_sample(part(image, whole), places, *args, **kwargs)
    return wrap(y, replace(layout, dims=tuple(None if dim is None else dim + (dim > 0) for dim in layout.dims)))


@register(F.affine_grid)
def affine_grid(theta: SpatialTensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """The places of maps whose batch is cut."""
    if any(dim not in (None, 0) for dim in theta.layout.dims):
        raise refusal("torch.nn.functional.affine_grid", "its maps are spread over ranks by more than the batch")
    y = F.affine_grid(theta.local, [theta.local.shape[0], *size[1:]], align_corners)
    return wrap(y, theta.layout)
