"""Max, average and Lp pooling on tiles, in 1, 2 and 3 dims; nothing but indices is saved for the backward pass.

Large images on CPUs are pooled by `shifts`, all else by PyTorch's kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import Interval, Window
from mpi4dl.parallel.spatial.halo import Reach
from mpi4dl.parallel.spatial.rules import shifts
from mpi4dl.parallel.spatial.rules.windows import (
    axes_of,
    check_image,
    each,
    flat_index,
    hashable,
    output_shape,
    output_spans,
    places_of,
    slide,
)
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register, wrap

aten = torch.ops.aten
Size = int | Sequence[int]
# What pools in 2 and in 3 dims, and its gradient: one dim is pooled as images of one row.
MAXIMA = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}
MEANS = {2: (aten.avg_pool2d, aten.avg_pool2d_backward), 3: (aten.avg_pool3d, aten.avg_pool3d_backward)}


@dataclass(frozen=True)
class _Pooling:
    """What is pooled in each window, its maximum or its mean, and where it is to be.

    A dim that is not cut is the operator's `own`, as is its `padding` there. The input with its halo begins at
    `corner`, and the output is of this `shape`. With `places` the index of each maximum is asked for.
    """

    windows: Sequence[Window]
    maximum: bool
    places: bool
    own: tuple[bool, ...]
    padding: list[int]
    corner: tuple[int, ...]
    shape: list[int]

    @property
    def area(self) -> int:
        return shifts.area(self.windows)

    @cached_property
    def options(self) -> tuple[Any, ...]:
        """What PyTorch's kernel is told, of max pooling, or of average pooling over whole windows."""
        kernel, stride, dilation = (
            [getattr(w, name) for w in self.windows] for name in ("kernel", "stride", "dilation")
        )
        ceil_mode = self.windows[0].ceil_mode
        if self.maximum:
            return kernel, stride, self.padding, dilation, ceil_mode
        return kernel, stride, self.padding, ceil_mode, True, self.area


class _Pool(torch.autograd.Function):
    """Fetch the halo and pool. Max pooling may also give the index of each maximum in the input with its halo."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Exchange | None,
        pooling: _Pooling,
    ) -> tuple[Tensor, Tensor | None]:
        padded = x if exchange is None else exchange.bring(x)
        shape, maximum = pooling.shape, pooling.maximum
        ctx.exchange, ctx.pooling = exchange, pooling
        ctx.like = padded.new_empty(0), padded.shape
        ctx.count = len(pooling.windows)
        ctx.around = None
        if 0 in shape:
            return x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=x.device) if maximum else None
        if not pooling.places and shifts.worth(padded, shape, pooling.windows):
            around = shifts.fitting(padded.shape[-ctx.count :], shape[-ctx.count :], pooling.windows, pooling.padding)
            fitting = shifts.padded(padded, around, _lowest(x) if maximum else 0.0)
            if not maximum:
                ctx.around = around
                return shifts.means(fitting, pooling.windows, pooling.area), None
            found = shifts.maxima(fitting, pooling.windows)
            if found is not None:
                ctx.around = around
                ctx.save_for_backward(*found[1])
                return found[0], None
        options = pooling.options
        if not maximum:
            return MEANS[ctx.count][0](padded, *options), None
        y, indices = MAXIMA[ctx.count][0](padded, *options)
        indices = _inside(y, indices, padded.shape[-ctx.count :], pooling.corner, options[3])
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return y, indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        exchange: Exchange | None = ctx.exchange
        pooling: _Pooling = ctx.pooling
        kind, shape = ctx.like
        if ctx.around is not None:
            gradient = _by_shifts(gradient, ctx.saved_tensors, shape[-ctx.count :], pooling, ctx.around)
        else:
            padded = kind.new_empty(shape)  # the backward passes of both read the shape of their input, not its values
            if gradient.numel() == 0:
                gradient = padded.zero_()
            elif pooling.maximum:
                (indices,) = ctx.saved_tensors
                gradient = MAXIMA[ctx.count][1](gradient, padded, *pooling.options, indices)
            else:
                gradient = MEANS[ctx.count][1](gradient, padded, *pooling.options)
        if exchange is not None:
            gradient = exchange.adjoint.bring(gradient)
        return gradient, None, None


def _by_shifts(
    gradient: Tensor, chosen: Sequence[Tensor], size: Sequence[int], pooling: _Pooling, around: list[int]
) -> Tensor:
    """The gradient of an image of that size, which was pooled with so much around it."""
    windows = pooling.windows
    fitting = shifts.with_sides(size, around)
    if pooling.maximum:
        gradient = shifts.of_maxima(gradient, chosen, fitting, windows)
    else:
        gradient = shifts.of_means(gradient, fitting, windows, pooling.area)
    return shifts.trimmed(gradient, around)


def _lowest(x: Tensor) -> float:
    return float("-inf") if x.is_floating_point() else float(torch.iinfo(x.dtype).min)


def _inside(y: Tensor, indices: Tensor, size: Sequence[int], corner: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Indices of pixels of the image: where all of a window is as low as padding is, PyTorch takes its first pixel."""
    margins = [max(0, -start) for start in corner]
    if not any(margins) or y.is_meta or (y.is_cpu and not bool((y == _lowest(y)).any())):
        return indices  # to ask a GPU would stop it
    return flat_index(
        [
            at + (margin - at).clamp(min=0).add(step - 1).div(step, rounding_mode="floor") * step
            for at, margin, step in zip(places_of(indices, size), margins, dilation, strict=True)
        ],
        size,
    )


def windows_of(
    count: int, kernel: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
) -> tuple[Window, ...]:
    return _windows(count, hashable(kernel), hashable(stride), hashable(padding), hashable(dilation), ceil_mode)


@lru_cache(maxsize=1024)
def _windows(
    count: int, kernel: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
) -> tuple[Window, ...]:
    kernels, paddings, dilations = each(kernel, count), each(padding, count), each(dilation, count)
    strides = kernels if stride is None or (not isinstance(stride, int) and not len(stride)) else each(stride, count)
    if any(2 * paddings[i] > kernels[i] for i in range(count)):
        raise RuntimeError(f"pad should be at most half of the effective kernel size, but got {paddings} and {kernels}")
    return tuple(
        Window(kernels[i], strides[i], paddings[i], paddings[i], dilations[i], ceil_mode) for i in range(count)
    )


def _pool(
    x: SpatialTensor, windows: tuple[Window, ...], maximum: bool, places: bool = False
) -> tuple[Tensor, Tensor, Reach]:
    """The pooled part, the `places` of its maxima in the whole image if they are asked for, and what it reached."""
    local = x.local
    key = _pool, windows, maximum, places, local.shape, local.dtype
    reached, pooling = x.layout.known(key, lambda: _plan(x, windows, maximum, places))
    reached.ask(x)
    if reached.exchange is None:
        local = reached.crop(local)
    y, indices = _Pool.apply(local, reached.exchange, pooling)
    if not places:
        return y, indices, reached
    count = len(windows)
    size = list(local.shape[-count:])
    for place, axis in enumerate(axes_of(x, count)):
        if axis is not None and not pooling.own[place]:
            size[place] = reached.needed[axis].length
    found = [at + start for at, start in zip(places_of(indices, size), pooling.corner, strict=True)]
    return y, flat_index(found, x.shape[-count:]), reached


def _plan(x: SpatialTensor, windows: Sequence[Window], maximum: bool, places: bool) -> tuple[Reach, _Pooling]:
    count = len(windows)
    reached, own = slide(x, windows, _lowest(x) if maximum else 0.0)
    local = x.local if reached.exchange is not None else reached.crop(x.local)
    padding = [window.before if itself else 0 for window, itself in zip(windows, own, strict=True)]
    axes = axes_of(x, count)
    corner = tuple(
        0 if itself or axis is None else reached.needed[axis].start for axis, itself in zip(axes, own, strict=True)
    )
    shape = output_shape(reached, x, local, windows)
    return reached, _Pooling(windows, maximum, places, own, padding, corner, shape)


def _max_pool(
    count: int,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima, of equal pixels the first; their indices, if they are asked for, are those of the whole image."""
    x = check_image(input, f"torch.nn.functional.max_pool{count}d", count, True)
    windows = windows_of(count, kernel_size, stride, padding, dilation, ceil_mode)
    if count == 1:
        row = x.unsqueeze(-2)
        assert isinstance(row, SpatialTensor)
        y, indices, reached = _pool(row, (Window(1, ceil_mode=ceil_mode), *windows), True, return_indices)
        found = [wrap(y, reached.output).squeeze(-2)]
        return (*found, wrap(indices, reached.output).squeeze(-2)) if return_indices else found[0]
    y, indices, reached = _pool(x, windows, True, return_indices)
    pooled = reached.result(x, y)
    return (pooled, wrap(indices, reached.output)) if return_indices else pooled


def _max_pool_with_indices(count: int, *args: Any, **kwargs: Any) -> Any:
    return _max_pool(count, *args[:6], **{**kwargs, "return_indices": True})


def _avg_pool(
    count: int,
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window, put right where PyTorch counts other than a whole window's pixels, as at the edges."""
    x = check_image(input, f"torch.nn.functional.avg_pool{count}d", count, True)
    windows = windows_of(count, kernel_size, stride, padding, 1, ceil_mode)
    if count == 1:
        row = x.unsqueeze(-2)
        assert isinstance(row, SpatialTensor)
        x, windows = row, (Window(1, ceil_mode=ceil_mode), *windows)
    y, _, reached = _pool(x, windows, maximum=False)
    area = shifts.area(windows)
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    if divisor_override is not None:
        return reached.result(x, y * (area / divisor_override))
    key = _counts, windows, count_include_pad, x.local.shape
    counts = x.layout.known(key, lambda: _counts(reached, x, windows, count_include_pad))
    if counts:
        shares = [torch.tensor(numbers, dtype=y.dtype, device=y.device) for numbers in counts]
        divisor = reduce(lambda done, share: done.unsqueeze(-1) * share, shares)
        y = y * (area / divisor)
    pooled = reached.result(x, y)
    return pooled.squeeze(-2) if count == 1 else pooled


def _counts(reached: Reach, x: SpatialTensor, windows: Sequence[Window], count_include_pad: bool) -> list[list[int]]:
    """Along each dim, how many pixels of each window count, of those that this rank has; nothing if always all."""
    counts = []
    for size, window, rows in zip(x.shape[-len(windows) :], windows, output_spans(reached, x, windows), strict=True):
        margin = window.before if count_include_pad else 0
        image = Interval(-margin, size + margin)
        counts.append([window.needs(Interval(row, row + 1), size).intersect(image).length for row in range(*rows)])
    odd = any(number != window.kernel for numbers, window in zip(counts, windows, strict=True) for number in numbers)
    return counts if odd else []


def _lp_pool(
    count: int,
    input: Tensor,
    norm_type: float,
    kernel_size: Size,
    stride: Size | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """(sum of x^p)^(1/p) over each window, with the sign convention of PyTorch's own."""
    area = math.prod(each(kernel_size, count))
    mean = _avg_pool(count, input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(area).pow(1.0 / norm_type)


for count in (1, 2, 3):
    for kind, rule in (
        ("max_pool{}d", _max_pool),
        ("max_pool{}d_with_indices", _max_pool_with_indices),
        ("avg_pool{}d", _avg_pool),
        ("lp_pool{}d", _lp_pool),
    ):
        register(*named(kind.format(count)))(partial(rule, count))
