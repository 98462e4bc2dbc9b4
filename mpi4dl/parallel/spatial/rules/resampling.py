"""Interpolation to another size: each output row is a weighted sum of a few input rows."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from math import floor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Like
from mpi4dl.geometry import Interval, ceil_div
from mpi4dl.parallel.spatial.halo import reach
from mpi4dl.parallel.spatial.interpolation import Kernel, Resampling
from mpi4dl.parallel.spatial.rules.weighing import Weighing, channels_last, sums_of, transposed, weigh
from mpi4dl.parallel.spatial.rules.windows import axes_of, check_image, each, in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

aten = torch.ops.aten
# The modes for sequences, images and volumes, and what each is along one axis.
NEAREST = {"nearest": "nearest", "nearest-exact": "nearest-exact", "area": "area"}
MODES: dict[int, dict[str, Any]] = {
    1: NEAREST | {"linear": "linear"},
    2: NEAREST | {"bilinear": "linear", "bicubic": "cubic"},
    3: NEAREST | {"trilinear": "linear"},
}
# PyTorch's own that are faster than sums of weighted rows.
OPERATORS: dict[str, Any] = {
    "nearest": aten.upsample_nearest2d,
    "nearest-exact": aten._upsample_nearest_exact2d,
    "linear": aten.upsample_bilinear2d,
}


class Resampled(NamedTuple):
    """The rows (or columns) that this rank makes, of those that it holds or has been sent."""

    mapping: Resampling
    rows: Interval
    held: Interval


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
    name, count = "torch.nn.functional.interpolate", input.dim() - 2
    one_axis = MODES.get(count, {}).get(mode)
    if one_axis is None or not input.is_floating_point() or (align_corners is not None and mode in NEAREST):
        raise refusal(name, f"shape {tuple(input.shape)}, {input.dtype}, {mode}, {align_corners=}")
    if antialias and not mode.startswith("bi"):
        raise refusal(name, f"mode {mode!r} with antialias")
    x = check_image(input, name, count, True)
    factors: tuple[float | None, ...] = (None,) * count
    if scale_factor is not None:
        factors = each(scale_factor, count)
        sizes = tuple(floor(n * float(factor or 0)) for n, factor in zip(x.shape[2:], factors, strict=True))
    else:
        assert size is not None
        sizes = each(size, count)
    if recompute_scale_factor:
        factors = (None,) * count
    x = in_plain_dtype(x, lambda image: F.interpolate(image, scale_factor=2.0, mode=mode), count)
    kernel = _kernel(x.local, sizes, mode)
    mappings = [
        _mapping(n, output, factor, one_axis, bool(align_corners), antialias, kernel)
        for n, output, factor in zip(x.shape[2:], sizes, factors, strict=True)
    ]
    if not any(mappings):
        return x.clone()
    if count == 1:
        row = x.unsqueeze(-2)
        return _last_two(row, None, *mappings).squeeze(-2)
    # Along the depth first where that leaves less to do for the other two axes.
    early = count == 3 and sizes[0] < x.shape[2]
    y = _along_depth(x, mappings[0]) if early else x
    y = _last_two(y, *mappings[-2:])
    return _along_depth(y, mappings[0]) if count == 3 and not early else y


@lru_cache(maxsize=4096)
def _mapping(
    size: int, output: int, factor: float | None, mode: Any, align_corners: bool, antialias: bool, kernel: Kernel
) -> Resampling | None:
    """None where every row stays as it is."""
    if align_corners:
        scale = (size - 1) / (output - 1) if output > 1 else 0.0
    else:
        scale = 1 / factor if factor else size / output
    mapping = Resampling(size, output, mode, align_corners, scale, antialias, kernel)
    return None if mapping.identity else mapping


def _kernel(x: Tensor, output: Sequence[int], mode: str) -> Kernel:
    """By which PyTorch finds the nearest pixels of such an image; other modes do not care."""
    last = channels_last(x) if x.dim() == 4 else x.dim() == 5 and Like.of(x).memory_format == torch.channels_last_3d
    quick = x.dim() > 3 and ((last and x.shape[-3] > 3) or sum(output) <= 128)
    if not mode.startswith("nearest") or not x.is_cpu or quick:
        return "quick"
    return "float64" if x.dtype == torch.float64 else "float32"


def _last_two(x: Tensor, *mappings: Resampling | None) -> Tensor:
    """Along the last two dims, as the mappings say."""
    if not any(mappings):
        return x
    assert isinstance(x, SpatialTensor)
    in_periods = all(mapping is None or mapping.period for mapping in mappings)
    for i, (mapping, other) in enumerate(zip(mappings, reversed(mappings), strict=True)):
        # What gets smaller without an exchange leaves less to exchange.
        along = mapping and not in_periods and mapping.output < mapping.size
        if along and other and x.layout.cut(x.dim() - 1 - i) and not x.layout.cut(x.dim() - 2 + i):
            y = _last_two(x, *((mapping, None) if i == 0 else (None, mapping)))
            return _last_two(y, *((None, other) if i == 0 else (other, None)))
    axes = axes_of(x, 2)
    maps = {axis: mapping for axis, mapping in zip(axes, mappings, strict=True) if mapping and axis is not None}
    reached = reach(x, maps)
    local, held = (x.local, x.layout.held) if reached.exchange is None else (reached.fetch(x.local), reached.needed)
    parts: list[Resampled | None] = [None, None]
    for i, (axis, mapping) in enumerate(zip(axes, mappings, strict=True)):
        if mapping and axis is not None:
            parts[i] = Resampled(mapping, reached.output.held[axis], held[axis])
        elif mapping:
            parts[i] = Resampled(mapping, Interval(0, mapping.output), Interval(0, mapping.size))
    empty = 0 in local.shape or any(part is not None and part.rows.empty for part in parts)
    channels = local.shape[1:-2]  # of volumes with the depth
    images = local.flatten(1, -3)
    y = _sum(images, parts) if empty or not in_periods else _by_operator(images, parts)
    return wrap(y.unflatten(1, channels), reached.output)


def _along_depth(x: Tensor, mapping: Resampling | None) -> Tensor:
    """Volumes (N, C, D, H, W) along their depth: as images whose rows are layers, each of them a row of pixels."""
    if mapping is None:
        return x
    assert isinstance(x, SpatialTensor)
    axis = x.layout.axis(2)
    reached = reach(x, {} if axis is None else {axis: mapping})
    local, held = (x.local, x.layout.held) if reached.exchange is None else (reached.fetch(x.local), reached.needed)
    part = Resampled(mapping, Interval(0, mapping.output), Interval(0, mapping.size))
    if axis is not None:
        part = Resampled(mapping, reached.output.held[axis], held[axis])
    y = _sum(local.flatten(3), (part, None))
    return wrap(y.unflatten(3, local.shape[3:]), reached.output)


def _by_operator(x: Tensor, parts: Sequence[Resampled | None]) -> Tensor:
    """By PyTorch's own operator, from where a period of the part begins."""
    (mode, *_) = [part.mapping.mode for part in parts if part is not None]
    sizes, scales, wanted = [], [], []
    for dim, part in zip((-2, -1), parts, strict=True):
        if part is None:
            scale, rows, size = 1.0, Interval(0, x.shape[dim]), x.shape[dim]
        else:
            assert part.mapping.period is not None
            (inputs, outputs), scale = part.mapping.period, part.mapping.scale
            number = ceil_div(part.held.start, inputs)
            skipped = number * inputs - part.held.start
            x = x.narrow(dim, skipped, part.held.length - skipped) if skipped else x
            rows = part.rows.shift(-number * outputs)
            # PyTorch takes shortcuts to an image's own size and to twice that, which must be those of the whole.
            shortcuts = {times * x.shape[dim] for times in (1, 2) if scale * times != 1}
            size = next(size for size in count(rows.stop) if size not in shortcuts)
        sizes.append(size)
        scales.append(1 / scale)
        wanted.append(rows)
    y = OPERATORS[mode](x, sizes, *([False] if mode == "linear" else []), *scales)
    (top, bottom), (left, right) = wanted
    surplus = [left, y.shape[-1] - right, top, y.shape[-2] - bottom]
    if channels_last(y) and any(surplus):
        # A view is made faster, but its gradient would not be channels last, for which PyTorch is several times slower.
        return F.pad(y, [-amount for amount in surplus])
    for dim, rows in zip((-2, -1), wanted, strict=True):
        y = y if rows == (0, y.shape[dim]) else y.narrow(dim, rows.start, rows.length)
    return y


def _sum(x: Tensor, parts: Sequence[Resampled | None]) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, cols = (part and _weighing(part, wide, x.device) for part in parts)
    return weigh(x, rows, cols)


@lru_cache(maxsize=256)
def _weighing(part: Resampled, dtype: torch.dtype, device: torch.device) -> Weighing:
    mapping, like = part.mapping, torch.empty(0, dtype=dtype, device=device)
    weighted = not mapping.mode.startswith("nearest")

    def taps(mapping: Resampling) -> list[list[tuple[int, float]]]:
        return [[(i - part.held.start, weight) for i, weight in mapping.taps(row)] for row in range(*part.rows)]

    forward = sums_of(taps(mapping), weighted, like)
    return Weighing(forward, sums_of(transposed(taps(mapping.backward), part.held.length), weighted, like))
