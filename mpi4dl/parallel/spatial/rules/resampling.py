"""Interpolation to another size, grid_sample, and pixel shuffle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import count
from math import ceil, floor, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from mpi4dl.comm.exchange import Like, linear
from mpi4dl.geometry import BATCH, Interval, Tiling, TransposedWindow, Window, ceil_div
from mpi4dl.parallel.spatial.alignment import part as part_of
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather_axes, gather_dim, plan_halo
from mpi4dl.parallel.spatial.rules.windows import check_image, described, each, in_plain_dtype
from mpi4dl.parallel.spatial.sharding import image_dims
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap

# Weighted sums of the rows and of the columns of this rank's part of an image, and their adjoint, which is such sums.
#
#     rows        0     1     2     3           a sum has a row as its first tap, another one as its second, and so on:
#                  \   / \   / \   /            all first taps are picked and weighted at once, then all second ones
#     sums          0     1     2               backward: the gradient of a row sums those of the sums that it is in
#
# Nothing is saved for backward but which rows, with which weights.

CACHED_BYTES = 1 << 20  # so large are images that stay in the cache of a core from one tap to the next


class Tap(NamedTuple):
    """One of the rows of each sum that has so many.

    `having`: which sums those are, None for all. `rows`: that row of each. `weight` (sums,), None for weights of 1.
    """

    having: Tensor | None
    rows: Tensor
    weight: Tensor | None


class Sums(NamedTuple):
    """So many sums, and the taps that they are made of."""

    length: int
    taps: Sequence[Tap]


class Weighing(NamedTuple):
    """The sums of rows, and those of gradients of sums that are the gradients of the rows."""

    forward: Sums
    backward: Sums


def sums_of(taps: Sequence[Sequence[tuple[int, float]]], weighted: bool, like: Tensor) -> Sums:
    """The sums whose taps are these rows with their weights, in the dtype and on the device of `like`."""
    found = []
    for number in range(max(map(len, taps), default=0)):
        having = [i for i, of_sum in enumerate(taps) if number < len(of_sum)]
        rows = torch.tensor([taps[i][number][0] for i in having], dtype=torch.int64, device=like.device)
        weight = torch.tensor([taps[i][number][1] for i in having], dtype=like.dtype, device=like.device)
        some = torch.tensor(having, device=like.device) if len(having) < len(taps) else None
        found.append(Tap(some, rows, weight if weighted else None))
    return Sums(len(taps), found)


def transposed(taps: Sequence[Sequence[tuple[int, float]]], num_rows: int) -> list[list[tuple[int, float]]]:
    """For each row the sums that it is in, with its weights."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(num_rows)]
    for number, of_sum in enumerate(taps):
        for row, weight in of_sum:
            found[row].append((number, weight))
    return found


def channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel of x (N, C, *) lie side by side, and not only since there is but a pixel."""
    return x.stride(1) == 1 and x.shape[1] > 1 and prod(x.shape[2:]) > 1


def weigh(x: Tensor, rows: Weighing | None, cols: Weighing | None) -> Tensor:
    """The sums of rows, and of columns, of x (N, C, H, W), in its memory format; None leaves them as they are."""
    last, both = channels_last(x), (rows, cols)
    return linear(
        x,
        lambda x: _weighted_sum(x, last, [each and each.forward for each in both]),
        lambda gradient: _weighted_sum(gradient, last, [each and each.backward for each in both]),
    )


def _weighted_sum(x: Tensor, last: bool, both: Sequence[Sums | None]) -> Tensor:
    """Sums of rows and of columns, not added up in 16 bits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if last:
        return _sum_both(x.permute(0, 2, 3, 1).to(wide), (1, 2), both).permute(0, 3, 1, 2).to(x.dtype)
    if not x.is_cpu or all(sums is None or len(sums.taps) < 2 for sums in both):
        return _sum_both(x.to(wide), (2, 3), both).to(x.dtype)
    sizes = [n if sums is None else sums.length for n, sums in zip(x.shape[-2:], both, strict=True)]
    images = x.reshape(prod(x.shape[:2]), 1, *x.shape[2:])
    result = x.new_empty(len(images), 1, *sizes)
    once = max(1, CACHED_BYTES // max(1, images[:1].nbytes, result[:1].nbytes))
    for some, into in zip(images.split(once), result.split(once), strict=True):
        into.copy_(_sum_both(some.to(wide), (2, 3), both))
    return result.view(*x.shape[:2], *sizes)


def _sum_both(x: Tensor, dims: tuple[int, int], both: Sequence[Sums | None]) -> Tensor:
    """Sums along two dims, first along that which gets smaller."""
    along = [(dim, sums) for dim, sums in zip(dims, both, strict=True) if sums is not None]
    for dim, sums in sorted(along, key=lambda each: each[1].length / max(1, x.shape[each[0]])):
        x = _sum_along(x, dim, sums)
    return x


def _sum_along(x: Tensor, dim: int, sums: Sums) -> Tensor:
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    # The dims in which PyTorch picks rows fastest, and without one of size 1, which would make it slow.
    inner = [prod(after)] if after else []
    flat = x.reshape(prod(before), x.shape[dim], *inner)
    y: Tensor | None = None
    for having, rows, weight in sums.taps:
        picked, weight = flat.index_select(1, rows), weight.unsqueeze(1) if inner and weight is not None else weight
        if having is not None:
            y = flat.new_zeros(prod(before), sums.length, *inner) if y is None else y
            y.index_add_(1, having, picked if weight is None else picked.mul_(weight))
        elif y is None:
            y = picked if weight is None else picked.mul_(weight)
        else:
            y = y.add_(picked) if weight is None else y.addcmul_(picked, weight)
    y = flat.new_zeros(prod(before), sums.length, *inner) if y is None else y
    return y.view(*before, sums.length, *after)


# Which rows of an image an interpolated row is made of, and how they are weighted: plain numbers, no torch.

LONGEST_PERIOD = 16
EXACT_IN_FLOAT32 = 1 << 24

Kernel = Literal["quick", "float32", "fused", "float64", "cuda", "cuda backward"]
OF_CPU: tuple[Kernel, ...] = ("quick", "float32", "fused", "float64")
OF_CUDA: tuple[Kernel, ...] = ("cuda", "cuda backward")


@dataclass(frozen=True)
class Resampling:
    """Interpolation to another size: an output row is a weighted sum of a few neighbouring input rows.

    `scale` is input rows per output row, as PyTorch computes it: size / output, or (size - 1) / (output - 1) where
    the corners are aligned, or the reciprocal of a scale factor that the caller gave. `kernel` is that of PyTorch's
    which finds the nearest rows: "quick", which copies and doubles rows where that makes the output's size, whatever
    the scale, and otherwise multiplies in float32; or the general one, which multiplies in float32 or in float64.
    "fused" is that of processors that multiply and add in float32 at once: (row + 0.5) * scale - 0.5, and 0.5. On
    it depends which of the needed rows are taken, but nothing that ranks must agree on: a part of a pixel or of none
    does not tell in which format the whole is. CUDA's multiplies in float32, and finds the rows for its backward by the
    reciprocal scale (aten/src/ATen/native/cuda/UpSample.cuh).
    """

    size: int
    output: int
    mode: Literal["nearest", "nearest-exact", "linear", "cubic", "area"]
    align_corners: bool = False
    scale: float = 0.0
    antialias: bool = False
    kernel: Kernel = "quick"

    def output_size(self, size: int) -> int:
        return self.output

    def output_cut(self, cut: int) -> int:
        return ceil_div(cut * self.output, self.size)

    @property
    def identity(self) -> bool:
        """Whether every row stays as it is: to their own size, most operators copy images, whatever the scale."""
        if self.size != self.output:
            return False
        copied = self.antialias or self.mode in ("linear", "area")
        return copied or self.scale == 1 or (self.align_corners and self.size == 1)

    @property
    def _times(self) -> int:
        """How often the nearest row is every row, where the kernel asks for no scale; otherwise 0."""
        quick = self.mode == "nearest" and self.kernel == "quick" and self.output in (self.size, 2 * self.size)
        return self.output // self.size if quick else 0

    @property
    def backward(self) -> "Resampling":
        """The rows for PyTorch's backward: the nearest ones that the quick kernel would have found."""
        return replace(self, kernel="quick" if self.kernel in OF_CPU else "cuda backward")

    @cached_property
    def period(self) -> tuple[int, int] | None:
        """After so many input rows and so many output rows all weights repeat; None if that takes many rows.

        A part that begins at a multiple of the first is resampled as the whole is, except for the rows that its edge
        changes. Only of modes that have PyTorch's own operators to gain by it.
        """
        if self.align_corners or self.antialias or self.mode in ("cubic", "area"):
            return None
        ratio = Fraction(self.scale).limit_denominator(LONGEST_PERIOD)
        if not 0 < ratio.numerator <= LONGEST_PERIOD or float(ratio) != self.scale:
            return None
        if self.mode != "linear":
            # Products that are rounded are rounded differently in a part.
            rounded = ratio.denominator.bit_count() > 1 or 2 * self.output * ratio.numerator > EXACT_IN_FLOAT32
            rounded |= self.kernel in OF_CUDA and ratio.numerator.bit_count() > 1
            shortcut = self.output in (self.size, 2 * self.size) and self.output * self.scale != self.size
            if rounded or shortcut:
                return None
        return ratio.as_integer_ratio()

    def taps(self, row: int) -> list[tuple[int, float]]:
        """The input rows that an output row reads, each with its weight; at the image's edge a row may repeat."""
        last = self.size - 1
        if self.antialias and not self.identity:
            return self._filtered(row)
        if self.mode == "area":
            rows = range(row * self.size // self.output, ceil_div((row + 1) * self.size, self.output))
            return [(source, 1 / len(rows)) for source in rows]
        if self.identity:
            return [(row, 1.0)]
        if self.kernel == "cuda backward":
            near = int((row if self.mode == "nearest" else row + 0.5) * self.scale)
            return [(i, 1.0) for i in range(max(0, near - 2), near + 3) if self._begins(i) <= row < self._begins(i + 1)]
        if self.kernel == "cuda" and self.size == self.output:
            return [(row, 1.0)]
        if self.mode.startswith("nearest"):
            centre = row if self.mode == "nearest" else row + 0.5
            if self.kernel == "float64":
                place: Any = centre * self.scale
            elif self.kernel == "fused" and self.mode == "nearest-exact":  # exact in float64, and rounded once
                place = np.float32(centre * float(np.float32(self.scale)) - 0.5) + np.float32(0.5)
            else:
                place = np.float32(centre) * np.float32(self.scale)
            return [(row // self._times if self._times else min(floor(np.float32(place)), last), 1.0)]
        position = row * self.scale if self.align_corners else (row + 0.5) * self.scale - 0.5
        if self.mode == "linear":
            position = max(position, 0.0)
            first = min(floor(position), last)
            weight = position - first
            return [(first, 1.0 - weight), (min(first + 1, last), weight)]
        first = floor(position)
        return [(min(max(first + k, 0), last), _cubic(abs(position - first - k), -0.75)) for k in range(-1, 3)]

    def _begins(self, row: int) -> int:
        """The first output row whose gradient CUDA's kernel adds to that of an input row."""
        place = np.float32(row) * np.float32(1 / self.scale) - np.float32(0.0 if self.mode == "nearest" else 0.5)
        return min(ceil(place), self.output)

    def _filtered(self, row: int) -> list[tuple[int, float]]:
        """All rows under a filter that is as much wider as the image gets smaller, as Pillow has it."""
        width, centre = max(self.scale, 1.0), self.scale * (row + 0.5)
        plan_halo = (1 if self.mode == "linear" else 2) * width
        rows = range(max(int(centre - plan_halo + 0.5), 0), min(int(centre + plan_halo + 0.5), self.size))
        distances = [abs(source - centre + 0.5) / width for source in rows]
        weights = [max(1 - x, 0.0) if self.mode == "linear" else _cubic(x, -0.5) for x in distances]
        total = sum(weights)
        return [(source, weight / total) for source, weight in zip(rows, weights, strict=True)]

    def needs(self, output: Interval, size: int) -> Interval:
        of_device = OF_CPU if self.kernel in OF_CPU else OF_CUDA
        kernels = of_device if self.mode.startswith("nearest") else (self.kernel,)
        mappings = [replace(self, kernel=kernel) for kernel in kernels]
        rows = [row for each in mappings for end in (output.start, output.stop - 1) for row, _ in each.taps(end)]
        start = min(rows)
        return Interval(start - start % self.period[0] if self.period else start, max(rows) + 1)


def _cubic(x: float, a: float) -> float:
    """Keys' cubic convolution kernel (IEEE TASSP 1981) at a distance x."""
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


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
    if kernel in OF_CUDA and sizes == tuple(x.shape[2:]):
        factors = (None,) * count  # a copy, whatever the factors
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
    if mode.startswith("nearest") and x.is_cuda:
        return "cuda"
    if not mode.startswith("nearest") or quick:
        return "quick"
    return "float64" if x.dtype == torch.float64 else general_kernel()


@lru_cache(maxsize=1)
def general_kernel() -> Kernel:
    """That of this processor for float32: of 4 rows made 218, which is row 54?"""
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # also of runs on shapes, and of counts
        rows = torch.arange(4, dtype=torch.float32, device="cpu").view(1, 1, 4, 1).expand(1, 4, 4, 200).contiguous()
        found = F.interpolate(rows, (218, 200), mode="nearest-exact")[0, 0, 54, 0]
        return "fused" if found.item() == 1 else "float32"


def _last_two(x: Tensor, *mappings: Resampling | None) -> Tensor:
    """Along the last two dims, as the mappings say."""
    if not any(mappings):
        return x
    assert isinstance(x, SpatialTensor)
    in_periods = all(mapping is None or mapping.period for mapping in mappings)
    for i, (mapping, other) in enumerate(zip(mappings, reversed(mappings), strict=True)):
        # Axes that shrink without an exchange leave less to exchange.
        along = mapping and not in_periods and mapping.output < mapping.size
        if along and other and x.layout.cut(x.dim() - 1 - i) and not x.layout.cut(x.dim() - 2 + i):
            y = _last_two(x, *((mapping, None) if i == 0 else (None, mapping)))
            return _last_two(y, *((None, other) if i == 0 else (other, None)))
    layout, local, parts = _reached(x, {x.dim() - 2: mappings[0], x.dim() - 1: mappings[1]})
    empty = 0 in local.shape or any(part is not None and part.rows.empty for part in parts)
    channels = local.shape[1:-2]  # of volumes with the depth
    images = local.flatten(1, -3)
    y = _sum(images, parts) if empty or not in_periods else _by_operator(images, parts)
    return wrap(y.unflatten(1, channels), layout)


def _along_depth(x: Tensor, mapping: Resampling | None) -> Tensor:
    """Volumes (N, C, D, H, W) along their depth: as images whose rows are layers, each of them a row of pixels."""
    if mapping is None:
        return x
    assert isinstance(x, SpatialTensor)
    layout, local, (part,) = _reached(x, {2: mapping})
    return wrap(_sum(local.flatten(3), (part, None)).unflatten(3, local.shape[3:]), layout)


def _reached(
    x: SpatialTensor, mappings: Mapping[int, Resampling | None]
) -> tuple[Layout, Tensor, list[Resampled | None]]:
    """The layout of x resampled along these dims; the pixels that this rank needs; what it makes of them."""
    axes = {dim: x.layout.axis(dim) for dim in mappings}
    halo_plan = plan_halo(
        x, {axis: mapping for dim, mapping in mappings.items() if mapping and (axis := axes[dim]) is not None}
    )
    local, held = (
        (x.local, x.layout.held) if halo_plan.exchange is None else (halo_plan.fetch(x.local), halo_plan.needed)
    )
    parts: list[Resampled | None] = []
    for dim, mapping in mappings.items():
        axis = axes[dim]
        if mapping is None:
            parts.append(None)
        elif axis is None:
            parts.append(Resampled(mapping, Interval(0, mapping.output), Interval(0, mapping.size)))
        else:
            parts.append(Resampled(mapping, halo_plan.output.held[axis], held[axis]))
    return halo_plan.output, local, parts


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


# Sampling an image at any places: each rank has the image whole for that, and samples at the places of its part.


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
    grid = gather_dim(grid, -1)
    if isinstance(grid, SpatialTensor):
        layout = grid.layout.narrow
    else:
        assert isinstance(input, SpatialTensor)
        ranks = input.layout.grid
        dims = (None, *image_dims(ranks, grid.dim() - 1)[1:])
        sizes = [1, *(grid.shape[dim] for dim in dims if dim is not None)]
        tiling = Tiling.even(ranks.shape, sizes).replace(BATCH, input.layout.tiling.splits[BATCH].narrow())
        layout = Layout(ranks, tiling, dims)
    if isinstance(image, SpatialTensor) and layout.dims[BATCH] is None:
        tiling = layout.tiling.replace(BATCH, image.layout.tiling.splits[BATCH].narrow())
        layout = replace(layout, tiling=tiling, dims=(0, *layout.dims[1:]))
    places = part_of(grid, layout)
    whole = replace(layout, dims=(layout.dims[BATCH], *(None for _ in layout.dims[1:])))
    y = F.grid_sample(part_of(image, whole), places, *args, **kwargs)
    return wrap(y, replace(layout, dims=tuple(None if dim is None else dim + (dim > 0) for dim in layout.dims)))


@register(F.affine_grid)
def affine_grid(theta: SpatialTensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """The places of maps whose batch is cut."""
    if any(dim not in (None, 0) for dim in theta.layout.dims):
        raise refusal("torch.nn.functional.affine_grid", "its maps are spread over ranks by more than the batch")
    maps, space = theta.local, size[2:]
    if len(maps) == 0:  # which PyTorch refuses
        y = maps.reshape(0, *(1 for _ in size[1:])).expand(0, *space, len(space))
    else:
        y = F.affine_grid(maps, [len(maps), *size[1:]], align_corners)
    return wrap(y, theta.layout)


# Pixel shuffle and its inverse: channels become blocks of pixels, blocks of pixels become channels.


register(F.pixel_shuffle, torch.pixel_shuffle)(
    described(F.pixel_shuffle, 2, lambda upscale_factor: (TransposedWindow(upscale_factor, upscale_factor),) * 2)
)
register(F.pixel_unshuffle, torch.pixel_unshuffle)(
    described(F.pixel_unshuffle, 2, lambda downscale_factor: (Window(downscale_factor, downscale_factor),) * 2)
)
