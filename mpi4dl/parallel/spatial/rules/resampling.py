"""Interpolation to another size, and pixel shuffle: each output row is a weighted sum of a few input rows."""

from collections.abc import Sequence
from math import floor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Resampling, TransposedWindow, Window
from mpi4dl.parallel.spatial.halo import gather, reach
from mpi4dl.parallel.spatial.rules.adaptive import adaptive_avg_pool2d
from mpi4dl.parallel.spatial.rules.windows import IMAGE_AXES, check_image, pair
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

MODES: dict[str, Any] = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "bilinear": "linear",
    "bicubic": "cubic",
}


@register(F.interpolate)
def interpolate(
    input: SpatialTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    x = check_image(input, "torch.nn.functional.interpolate")
    if x.dim() != 4 or not x.is_floating_point() or (align_corners is not None and not mode.startswith("bi")):
        raise refusal("torch.nn.functional.interpolate", f"shape {tuple(x.shape)}, {x.dtype}, {mode}, {align_corners=}")
    if mode not in (*MODES, "area") or (antialias and not mode.startswith("bi")):
        raise refusal("torch.nn.functional.interpolate", f"mode {mode!r}{' with antialias' if antialias else ''}")
    factors: Sequence[float | None] = (None, None)
    if scale_factor is not None:
        factors = (scale_factor, scale_factor) if isinstance(scale_factor, int | float) else tuple(scale_factor)
        sizes = tuple(floor(x.shape[i - 2] * float(factors[i] or 0)) for i in (0, 1))
    else:
        assert size is not None
        sizes = pair(size)
    if recompute_scale_factor:
        factors = (None, None)
    if mode == "area":
        return adaptive_avg_pool2d(x, sizes)
    y: Tensor = x
    if sizes == tuple(x.shape[-2:]):
        y = x.clone()
    for i in (0, 1):
        y = _resample(y, i - 2, sizes[i], factors[i], mode, bool(align_corners), antialias)
    return y


def _resample(
    x: Tensor, dim: int, output: int, factor: float | None, mode: str, align_corners: bool, antialias: bool
) -> Tensor:
    """Interpolate along one dim."""
    size = x.shape[dim]
    if align_corners:
        scale = (size - 1) / (output - 1) if output > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / output
    mapping = Resampling(size, output, MODES[mode], align_corners, scale, antialias)
    if output == size and (scale == 1 or (align_corners and size == 1)):
        return x
    if not isinstance(x, SpatialTensor) or x.layout.axis(x.dim() + dim) is None:
        local, start, rows, layout = x.local if isinstance(x, SpatialTensor) else x, 0, range(output), None
        if isinstance(x, SpatialTensor):
            layout = x.layout
    else:
        axis = IMAGE_AXES[dim + 2]
        reached = reach(x, {axis: mapping})
        local, start = reached.fetch(x.local), reached.needed[axis].start
        rows, layout = range(*reached.output.held[axis]), reached.output
    taps = [mapping.taps(row) for row in rows]
    y = local.narrow(dim, 0, 0)
    for number in range(max(map(len, taps), default=0)):
        having = [row for row, of_row in enumerate(taps) if number < len(of_row)]
        tap = [taps[row][number] for row in having]
        index = torch.tensor([row - start for row, _ in tap], dtype=torch.int64, device=local.device)
        part = local.index_select(dim, index)
        if mode not in ("nearest", "nearest-exact"):
            weight = torch.tensor([w for _, w in tap], dtype=local.dtype, device=local.device)
            part = part * (weight.unsqueeze(-1) if dim == -2 else weight)
        if len(having) < len(taps):
            y = y.index_add(dim, torch.tensor(having, device=local.device), part)
        else:
            y = part if number == 0 else y + part
    return y if layout is None else wrap(y, layout)


@register(F.pixel_shuffle, torch.pixel_shuffle)
def pixel_shuffle(input: SpatialTensor, upscale_factor: int) -> Tensor:
    x, r = check_image(input, "torch.nn.functional.pixel_shuffle"), upscale_factor
    if 0 in x.shape[-2:]:
        return F.pixel_shuffle(gather(x), r)
    window = TransposedWindow(r, r)
    reached = reach(x, {axis: window for axis in IMAGE_AXES if x.layout.dims[axis] is not None})
    local = reached.fetch(x.local)
    *n, c, h, w = local.shape
    blocks = local.reshape(*n, c // r**2, r, r, h, w).movedim((-4, -3), (-3, -1))  # (N, C, H, r, W, r)
    y = blocks.reshape(*n, c // r**2, h * r, w * r)  # PyTorch's own fails where a tile has no pixels
    for axis, dim in zip(IMAGE_AXES, (-2, -1), strict=True):
        if x.layout.dims[axis] is not None:
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
    reached = reach(x, {axis: Window(r, r) for axis in IMAGE_AXES if x.layout.dims[axis] is not None})
    local = reached.fetch(x.local)
    *n, c, h, w = local.shape
    blocks = local.reshape(*n, c, h // r, r, w // r, r).movedim((-3, -1), (-4, -3))  # (N, C, r, r, H, W)
    return wrap(blocks.reshape(*n, c * r**2, h // r, w // r), reached.output)
