"""Dropout: by the mask that plain PyTorch would draw, of which each rank has its part; of what is large, another one.

Ranks that share an image draw from generators in the same state, so that whatever is drawn for a replicated tensor is
the same on all, and so is a mask for a whole that is small. A mask for tiles of what is too large to be drawn whole by
each rank is drawn from another generator, seeded by one such draw and the tile's place: independent on every tile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import narrow, shape_of
from mpi4dl.parallel.spatial.flattening import between_copies, copies_in, cut_out
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap

DRAWN_WHOLE = 1 << 24  # so many numbers at most: 64 MiB in float32, for a moment


def _generator(layout: Layout, rank: int, seed: int, device: torch.device) -> torch.Generator:
    """What the tile of a rank is drawn from, alike for ranks that hold copies."""
    place = 0
    for axis, (dim, coordinate) in enumerate(zip(layout.dims, layout.grid.shape.coordinates(rank), strict=True)):
        place = place * layout.grid.shape[axis] + (coordinate if dim is not None else 0)
    return torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)


def _draw(x: SpatialTensor, keep: Tensor, share: float) -> None:
    """Fill `keep`, of the size of x's local part, with ones for this share of the pixels, as their owners draw them."""
    if x.is_meta:
        return
    layout, seed = x.layout, int(torch.randint(2**62, ()))
    if not layout.wide:
        keep.bernoulli_(share, generator=_generator(layout, layout.grid.rank, seed, keep.device))
        return
    for rank in layout.grid.ranks_along(tuple(axis for axis, dim in enumerate(layout.dims) if dim is not None)):
        theirs = layout.tiling.owned(rank)
        both = theirs.intersect(layout.held)
        if not both.empty:
            drawn = keep.new_empty(shape_of(theirs, layout.dims, keep.shape))
            drawn.bernoulli_(share, generator=_generator(layout, rank, seed, keep.device))
            narrow(keep, layout.dims, layout.held, both).copy_(narrow(drawn, layout.dims, theirs, both))


@register(F.dropout, torch.dropout, flat=True)
def dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The halo that is held is dropped as its owner drops it."""
    if not training or p == 0:
        return input
    keep = _part_of_whole(input, 1 - p) if input.shape.numel() <= DRAWN_WHOLE else _of_tiles(input, 1 - p)
    scaled = keep.div_(1 - p) if p < 1 else keep
    return wrap(input.local.mul_(scaled) if inplace else input.local * scaled, input.layout)


def _part_of_whole(input: SpatialTensor, share: float) -> Tensor:
    """This rank's part of the mask of the whole, drawn in the order in which the input lies in memory."""
    local = input.local
    strides = local.stride()
    order = sorted(range(input.dim()), key=lambda dim: (-strides[dim], dim))
    whole = torch.empty_permuted(input.shape, order, dtype=local.dtype, device=local.device)
    keep = torch.empty_like(local)
    return keep.copy_(cut_out(whole.bernoulli_(share), input.layout))


def _of_tiles(input: SpatialTensor, share: float) -> Tensor:
    keep = torch.empty_like(input.local)
    for flat in input.layout.flat:  # what every rank has is dropped alike
        for start, length in copies_in(keep.shape[flat.dim], flat):
            keep.narrow(flat.dim, start, length).bernoulli_(share)
    rest = keep
    for flat in input.layout.flat:
        rest = between_copies(rest, flat)
    _draw(input, rest, share)
    return keep


def _whole_channels(function: Any, without_batch: int | None) -> Callable[..., Tensor]:
    """Channels are dropped in the whole image, by the mask that PyTorch would draw: for each entry of dims 0 and 1, or
    of dim 0 in a tensor of `without_batch` dims.
    """

    def rule(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = 1 if input.dim() == without_batch else 2
        mask = function(input.local.new_ones([n if d < kept else 1 for d, n in enumerate(input.shape)]), p, training)
        if not training or p == 0:
            return input
        return input.mul_(mask) if inplace else input * mask

    return rule


for function, without_batch in ((F.dropout1d, 2), (F.dropout2d, None), (F.dropout3d, 4)):
    register(function)(_whole_channels(function, without_batch))


@register(*named("rand_like", "randn_like", "bernoulli", "rrelu", "alpha_dropout", "feature_alpha_dropout"))
def random_pixels(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    raise refusal("random pixels", "every rank would have to draw the random numbers of the whole image")
