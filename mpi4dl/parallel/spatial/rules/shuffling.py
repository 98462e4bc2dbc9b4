"""Pixel shuffle and its inverse: channels become blocks of pixels, blocks of pixels become channels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import TransposedWindow, Window
from mpi4dl.parallel.spatial.halo import gather, reach
from mpi4dl.parallel.spatial.rules.windows import axes_of, check_image
from mpi4dl.parallel.spatial.tensor import SpatialTensor, register, wrap


@register(F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(input: SpatialTensor, upscale_factor: int) -> Tensor:
    x, r = check_image(input, "torch.nn.functional.pixel_shuffle"), upscale_factor
    if 0 in x.shape[-2:]:
        return F.pixel_shuffle(gather(x), r)
    window = TransposedWindow(r, r)
    axes = axes_of(x, 2)
    reached = reach(x, {axis: window for axis in axes if axis is not None})
    local = reached.fetch(x.local)
    *n, c, h, w = local.shape
    blocks = local.reshape(*n, c // r**2, r, r, h, w).movedim((-4, -3), (-3, -1))  # (N, C, H, r, W, r)
    y = blocks.reshape(*n, c // r**2, h * r, w * r)  # PyTorch's own fails where a tile has no pixels
    for axis, dim in zip(axes, (-2, -1), strict=True):
        if axis is not None:
            wanted = reached.output.held[axis]
            y = y.narrow(dim, wanted.start - reached.needed[axis].start * r if wanted.length else 0, wanted.length)
    return wrap(y, reached.output)


@register(F.pixel_unshuffle, torch.pixel_unshuffle)
def pixel_unshuffle(input: SpatialTensor, downscale_factor: int) -> Tensor:
    x, r = check_image(input, "torch.nn.functional.pixel_unshuffle"), downscale_factor
    if x.shape[-2] % r or x.shape[-1] % r:
        raise ValueError(f"height and width {tuple(x.shape[-2:])} must be divisible by `downscale_factor` (={r})")
    if 0 in x.shape[-2:]:
        return F.pixel_unshuffle(gather(x), r)
    reached = reach(x, {axis: Window(r, r) for axis in axes_of(x, 2) if axis is not None})
    local = reached.fetch(x.local)
    *n, c, h, w = local.shape
    blocks = local.reshape(*n, c, h // r, r, w // r, r).movedim((-3, -1), (-4, -3))  # (N, C, r, r, H, W)
    return wrap(blocks.reshape(*n, c * r**2, h // r, w // r), reached.output)
