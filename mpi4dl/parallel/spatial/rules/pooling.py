"""Max, average and Lp pooling on tiles; nothing but indices is saved for the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import COLS, Interval, Window
from mpi4dl.parallel.spatial.halo import Reach
from mpi4dl.parallel.spatial.rules.windows import IMAGE_AXES, check_image, output_shape, pair, slide
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register, wrap

aten = torch.ops.aten
Size = int | Sequence[int]


class _Pool(torch.autograd.Function):
    """Fetch the halo and pool. `options` are those of max pooling, or of average pooling over whole windows.

    Max pooling also gives the index of each maximum in the input with its halo, which begins at `corner`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Exchange | None,
        maximum: bool,
        options: tuple[Any, ...],
        shape: list[int],
        corner: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        padded = x if exchange is None else exchange.bring(x)
        ctx.exchange, ctx.maximum, ctx.options = exchange, maximum, options
        ctx.like = padded.new_empty(0), padded.shape
        if 0 in shape:
            return x.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=x.device) if maximum else None
        if not maximum:
            return aten.avg_pool2d(padded, *options), None
        y, indices = aten.max_pool2d_with_indices(padded, *options)
        indices = _inside(y, indices, padded.shape[-1], corner, options[3])
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return y, indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        exchange: Exchange | None = ctx.exchange
        kind, shape = ctx.like
        padded = kind.new_empty(shape)  # the backward passes of both read the shape of their input, not its values
        if gradient.numel() == 0:
            gradient = padded.zero_()
        elif ctx.maximum:
            (indices,) = ctx.saved_tensors
            gradient = aten.max_pool2d_with_indices_backward(gradient, padded, *ctx.options, indices)
        else:
            gradient = aten.avg_pool2d_backward(gradient, padded, *ctx.options)
        if exchange is not None:
            gradient = exchange.adjoint.bring(gradient)
        return gradient, None, None, None, None, None


def _lowest(x: Tensor) -> float:
    return float("-inf") if x.is_floating_point() else float(torch.iinfo(x.dtype).min)


def _inside(y: Tensor, indices: Tensor, width: int, corner: tuple[int, int], dilation: Sequence[int]) -> Tensor:
    """Indices of pixels of the image: where all of a window is as low as padding is, PyTorch takes its first pixel."""
    top, left = max(0, -corner[0]), max(0, -corner[1])
    if not (top or left) or y.is_meta or (y.is_cpu and not bool((y == _lowest(y)).any())):
        return indices  # to ask a GPU would stop it
    row, col = indices // width, indices % width
    row = row + (top - row).clamp(min=0).add(dilation[0] - 1).div(dilation[0], rounding_mode="floor") * dilation[0]
    col = col + (left - col).clamp(min=0).add(dilation[1] - 1).div(dilation[1], rounding_mode="floor") * dilation[1]
    return row * width + col


def _windows(
    kernel: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
) -> tuple[Window, Window]:
    kernel, padding, dilation = pair(kernel), pair(padding), pair(dilation)
    stride = kernel if stride is None or (not isinstance(stride, int) and not len(stride)) else pair(stride)
    if any(2 * padding[i] > kernel[i] for i in (0, 1)):
        raise RuntimeError(f"pad should be at most half of the effective kernel size, but got {padding} and {kernel}")
    rows, cols = (Window(kernel[i], stride[i], padding[i], padding[i], dilation[i], ceil_mode) for i in (0, 1))
    return rows, cols


def _pool(
    x: SpatialTensor, windows: tuple[Window, Window], maximum: bool, places: bool = False
) -> tuple[Tensor, Tensor, Reach]:
    """The pooled part, the `places` of its maxima in the whole image if they are asked for, and what it reached."""
    reached, own = slide(x, windows, _lowest(x) if maximum else 0.0)
    local = x.local if reached.exchange is not None else reached.crop(x.local)
    kernel, stride, dilation = ([getattr(w, name) for w in windows] for name in ("kernel", "stride", "dilation"))
    padding = [window.before if itself else 0 for window, itself in zip(windows, own, strict=True)]
    ceil_mode = windows[0].ceil_mode
    options = (
        (kernel, stride, padding, dilation, ceil_mode)
        if maximum
        else (kernel, stride, padding, ceil_mode, True, kernel[0] * kernel[1])
    )
    top, left = (
        0 if itself or x.layout.dims[axis] is None else reached.needed[axis].start
        for axis, itself in zip(IMAGE_AXES, own, strict=True)
    )
    shape = output_shape(reached, local, windows)
    y, indices = _Pool.apply(local, reached.exchange, maximum, options, shape, (top, left))
    if not places:
        return y, indices, reached
    width = local.shape[-1] if own[1] or x.layout.dims[COLS] is None else reached.needed[COLS].length
    return y, (indices // width + top) * x.shape[-1] + indices % width + left, reached


@register(*named("max_pool2d"))
def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maxima, of equal pixels the first; their indices, if they are asked for, are those of the whole image."""
    x = check_image(input, "torch.nn.functional.max_pool2d")
    y, indices, reached = _pool(x, _windows(kernel_size, stride, padding, dilation, ceil_mode), True, return_indices)
    pooled = reached.result(x, y)
    return (pooled, wrap(indices, reached.output)) if return_indices else pooled


@register(F.max_pool2d_with_indices)
def max_pool2d_with_indices(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Tensor]:
    return max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, True)


@register(F.avg_pool2d)
def avg_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window, put right where PyTorch counts other than a whole window's pixels, as at the edges."""
    x = check_image(input, "torch.nn.functional.avg_pool2d")
    windows = _windows(kernel_size, stride, padding, 1, ceil_mode)
    y, _, reached = _pool(x, windows, maximum=False)
    area = windows[0].kernel * windows[1].kernel
    if divisor_override == 0:
        raise RuntimeError("divisor must be not zero")
    if divisor_override is not None:
        return reached.result(x, y * (area / divisor_override))
    counts = []
    for axis, dim, window in zip(IMAGE_AXES, (-2, -1), windows, strict=True):
        size, margin = x.shape[dim], window.before if count_include_pad else 0
        image = Interval(-margin, size + margin)
        present = reached.output.dims[axis] is not None
        rows = reached.output.held[axis] if present else Interval(0, window.output_size(size))
        counts.append([window.needs(Interval(row, row + 1), size).intersect(image).length for row in range(*rows)])
    if all(count == window.kernel for axis, window in zip(counts, windows, strict=True) for count in axis):
        return reached.result(x, y)
    per_row, per_col = (torch.tensor(count, dtype=y.dtype, device=y.device) for count in counts)
    return reached.result(x, y * (area / (per_row.unsqueeze(1) * per_col)))


@register(*named("lp_pool2d"))
def lp_pool2d(
    input: Tensor, norm_type: float, kernel_size: Size, stride: Size | None = None, ceil_mode: bool = False
) -> Tensor:
    """(sum of x^p)^(1/p) over each window, with the sign convention of PyTorch's own."""
    count = pair(kernel_size)[0] * pair(kernel_size)[1]
    mean = avg_pool2d(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(count).pow(1.0 / norm_type)
