"""Dropout: independent on every tile, alike on all ranks where a mask covers whole channels.

Ranks that share an image draw from generators in the same state, so that whatever is drawn for a replicated tensor is
the same on all. A mask for tiles is drawn from another generator, seeded by one such draw and the tile's place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap


def _tile_generator(x: SpatialTensor) -> torch.Generator | None:
    if x.is_meta:
        return None
    seed, layout = int(torch.randint(2**62, ())), x.layout
    place = 0  # of the tile, alike for ranks that hold copies
    for axis, dim in enumerate(layout.dims):
        place = place * layout.grid.shape[axis] + (layout.grid.coordinates[axis] if dim is not None else 0)
    return torch.Generator(x.local.device).manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)


@register(F.dropout, torch.dropout, flat=True)
def dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    if input.layout.wide:  # the halo that is held would be dropped otherwise than its owner's
        if inplace:
            input.hold_less(input.layout.narrow.tiling)
        else:
            input = retile(input, input.layout.narrow.tiling)
    generator, keep = _tile_generator(input), torch.empty_like(input.local)
    for flat in input.layout.flat:  # what every rank has is dropped alike
        keep.narrow(flat.dim, 0, flat.prefix).bernoulli_(1 - p)
    behind = keep
    for flat in input.layout.flat:
        behind = behind.narrow(flat.dim, flat.prefix, behind.shape[flat.dim] - flat.prefix)
    behind.bernoulli_(1 - p, generator=generator)
    scaled = keep.div_(1 - p) if p < 1 else keep
    return wrap(input.local.mul_(scaled) if inplace else input.local * scaled, input.layout)


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
