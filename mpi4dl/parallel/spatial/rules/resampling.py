"""Interpolation to another size, and pixel shuffle: each output row is a weighted sum of a few input rows."""

from collections.abc import Sequence
from functools import lru_cache
from math import floor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Interval, Resampling, TransposedWindow, Window
from mpi4dl.parallel.spatial.halo import gather, reach
from mpi4dl.parallel.spatial.rules.adaptive import adaptive_avg_pool2d
from mpi4dl.parallel.spatial.rules.windows import IMAGE_AXES, check_image, in_plain_dtype, pair
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
    x = in_plain_dtype(x, lambda image: F.interpolate(image, scale_factor=2.0, mode=mode))
    if sizes == tuple(x.shape[-2:]):
        return x.clone()
    mappings = [_mapping(x.shape[i - 2], sizes[i], factors[i], mode, bool(align_corners), antialias) for i in (0, 1)]
    wholes = [_whole_factor(mapping) for mapping in mappings]
    if None not in wholes:
        return _enlarge(x, mappings, wholes, mode)
    y: Tensor = x
    for i, mapping in enumerate(mappings):
        y = _resample(y, i - 2, mapping)
    return y


def _mapping(
    size: int, output: int, factor: float | None, mode: str, align_corners: bool, antialias: bool
) -> Resampling:
    if align_corners:
        scale = (size - 1) / (output - 1) if output > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / output
    return Resampling(size, output, MODES[mode], align_corners, scale, antialias)


def _whole_factor(mapping: Resampling) -> int | None:
    """How many output rows each input row makes, where all make as many: any part is then enlarged as the whole is."""
    if mapping.align_corners or mapping.antialias or not mapping.scale:
        return None
    factor = round(1 / mapping.scale)
    if factor * mapping.size != mapping.output or factor * mapping.scale != 1:
        return None
    # What is the nearest, PyTorch finds by products rounded to float32, exact in the whole as in a part for these.
    return factor if mapping.mode in ("linear", "cubic") or factor.bit_count() == 1 else None


def _enlarge(x: SpatialTensor, mappings: Sequence[Resampling], factors: Sequence[Any], mode: str) -> Tensor:
    """By PyTorch's own operator: beyond what a rank needs of its neighbours, nothing of a part depends on the rest."""
    maps = {axis: mappings[i] for i, axis in enumerate(IMAGE_AXES) if x.layout.dims[axis] is not None}
    reached = reach(x, maps)
    local = reached.fetch(x.local)
    if 0 in local.shape:
        y = local.repeat_interleave(factors[0], -2).repeat_interleave(factors[1], -1)
    else:
        y = F.interpolate(local, scale_factor=[float(factor) for factor in factors], mode=mode)
    for i, axis in enumerate(IMAGE_AXES):
        if axis in maps:
            held, start = reached.output.held[axis], reached.needed[axis].start * factors[i]
            y = y.narrow(i - 2, held.start - start if held.length else 0, held.length)
    return wrap(y, reached.output)


class Tap(NamedTuple):
    """One of the input rows of every output row that has so many: of which output rows, which one, how weighted."""

    having: Tensor
    rows: Tensor
    weight: Tensor


@lru_cache(maxsize=256)
def _taps(
    mapping: Resampling, start: int, stop: int, first: int, dtype: torch.dtype, device: torch.device
) -> list[Tap]:
    """What output rows from `start` to `stop` are made of, in a part of the input that begins at row `first`."""
    taps = [mapping.taps(row) for row in range(start, stop)]
    found = []
    for number in range(max(map(len, taps), default=0)):
        having = [row for row, of_row in enumerate(taps) if number < len(of_row)]
        tap = [taps[row][number] for row in having]
        index = torch.tensor([row - first for row, _ in tap], dtype=torch.int64, device=device)
        weight = torch.tensor([w for _, w in tap], dtype=dtype, device=device)
        found.append(Tap(torch.tensor(having, device=device), index, weight))
    return found


def _resample(x: Tensor, dim: int, mapping: Resampling) -> Tensor:
    """Interpolate along one dim."""
    if mapping.output == mapping.size and (mapping.scale == 1 or (mapping.align_corners and mapping.size == 1)):
        return x
    layout = x.layout if isinstance(x, SpatialTensor) else None
    if not isinstance(x, SpatialTensor) or x.layout.axis(x.dim() + dim) is None:
        local, first, rows = x.local if isinstance(x, SpatialTensor) else x, 0, Interval(0, mapping.output)
    else:
        axis = IMAGE_AXES[dim + 2]
        reached = reach(x, {axis: mapping})
        local, first = reached.fetch(x.local), reached.needed[axis].start
        rows, layout = reached.output.held[axis], reached.output
    y = local.narrow(dim, 0, 0)
    for number, tap in enumerate(_taps(mapping, *rows, first, local.dtype, local.device)):
        part = local.index_select(dim, tap.rows)
        if mapping.mode not in ("nearest", "nearest-exact"):
            part = part * (tap.weight.unsqueeze(-1) if dim == -2 else tap.weight)
        if number == 0:
            y = part
        elif len(tap.having) == rows.length:
            y = y + part
        else:
            y = y.index_add(dim, tap.having, part)
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
