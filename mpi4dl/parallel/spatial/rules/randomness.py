"""Dropout: independent on every tile, alike on all ranks where a mask covers whole channels.

Ranks that share an image draw from generators in the same state, so that whatever is drawn for a replicated tensor is
the same on all. A mask for tiles is drawn from another generator, seeded by one such draw and the tile's place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap


def _tile_generator(x: SpatialTensor) -> torch.Generator | None:
    if x.is_meta:
        return None
    seed, layout = int(torch.randint(2**62, ())), x.layout
    place = 0  # of the tile, alike for ranks that hold copies
    for axis, dim in enumerate(layout.dims):
        place = place * layout.grid.shape[axis] + (layout.grid.coordinates[axis] if dim is not None else 0)
    return torch.Generator(x.local.device).manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)


@register(F.dropout, torch.dropout)
def dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    if input.layout.wide:
        raise refusal(
            "torch.nn.functional.dropout", "the halo that is held would be dropped otherwise than its owner's"
        )
    keep = torch.empty_like(input.local).bernoulli_(1 - p, generator=_tile_generator(input))
    scaled = keep.div_(1 - p) if p < 1 else keep
    return wrap(input.local.mul_(scaled) if inplace else input.local * scaled, input.layout)


@register(F.dropout2d)
def whole_channels(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Channels are dropped in the whole image, by the mask that PyTorch would draw."""
    if not training or p == 0:
        return input
    if input.layout.axis(0) is not None or input.layout.axis(1) is not None or input.dim() != 4:
        raise refusal("torch.nn.functional.dropout2d", "dims 0 and 1 are not batch and channels here")
    mask = F.dropout2d(input.local.new_ones(*input.shape[:2], 1, 1), p, True)
    return wrap(input.local.mul_(mask) if inplace else input.local * mask, input.layout)


@register(*named("rand_like", "randn_like", "bernoulli", "rrelu", "alpha_dropout", "feature_alpha_dropout"))
def random_pixels(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    raise refusal("random pixels", "every rank would have to draw the random numbers of the whole image")
