"""Max, average and Lp pooling on tiles, and unfolding; nothing but indices is saved for the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import Interval, Window
from mpi4dl.parallel.spatial.halo import Reach, reach
from mpi4dl.parallel.spatial.rules.windows import IMAGE_AXES, check_image, output_shape, pair, slide
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, refusal, register, wrap

aten = torch.ops.aten
Size = int | Sequence[int]


class _Pool(torch.autograd.Function):
    """Fetch the halo and pool. `options` are those of max pooling, or of average pooling over whole windows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange | None, maximum: bool, options: tuple[Any, ...], shape: list[int]
    ) -> Tensor:
        padded = x if exchange is None else exchange.assemble(x, *exchange.start(x))
        ctx.exchange, ctx.maximum, ctx.options = exchange, maximum, options
        ctx.like = padded.new_empty(0), padded.shape
        if 0 in shape:
            return x.new_zeros(shape)
        if not maximum:
            return aten.avg_pool2d(padded, *options)
        y, indices = aten.max_pool2d_with_indices(padded, *options)
        ctx.save_for_backward(indices)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
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
            gradient = exchange.finish_adjoint(exchange.start_adjoint(gradient))
        return gradient, None, None, None, None


def _windows(
    kernel: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
) -> tuple[Window, Window]:
    kernel, padding, dilation = pair(kernel), pair(padding), pair(dilation)
    stride = kernel if stride is None or stride == [] else pair(stride)
    if any(2 * padding[i] > kernel[i] for i in (0, 1)):
        raise RuntimeError(f"pad should be at most half of the effective kernel size, but got {padding} and {kernel}")
    rows, cols = (Window(kernel[i], stride[i], padding[i], padding[i], dilation[i], ceil_mode) for i in (0, 1))
    return rows, cols


def _pool(x: SpatialTensor, windows: tuple[Window, Window], maximum: bool) -> tuple[Tensor, Reach]:
    lowest = float("-inf") if x.is_floating_point() else float(torch.iinfo(x.dtype).min)
    reached, own = slide(x, windows, lowest if maximum else 0.0)
    local = x.local if reached.exchange is not None else reached.crop(x.local)
    kernel, stride, dilation = ([getattr(w, name) for w in windows] for name in ("kernel", "stride", "dilation"))
    padding = [window.before if itself else 0 for window, itself in zip(windows, own, strict=True)]
    ceil_mode = windows[0].ceil_mode
    options = (
        (kernel, stride, padding, dilation, ceil_mode)
        if maximum
        else (kernel, stride, padding, ceil_mode, True, kernel[0] * kernel[1])
    )
    return _Pool.apply(local, reached.exchange, maximum, options, output_shape(reached, local, windows)), reached


@register(*named("max_pool2d"))
def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    if return_indices:
        raise refusal("torch.nn.functional.max_pool2d(return_indices=True)", "indices would count within a tile")
    x = check_image(input, "torch.nn.functional.max_pool2d")
    y, reached = _pool(x, _windows(kernel_size, stride, padding, dilation, ceil_mode), maximum=True)
    return wrap(y, reached.output)


@register(F.max_pool2d_with_indices)
def max_pool2d_with_indices(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return max_pool2d(input, 1, return_indices=True)


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
    y, reached = _pool(x, windows, maximum=False)
    area = windows[0].kernel * windows[1].kernel
    if divisor_override:
        return wrap(y * (area / divisor_override), reached.output)
    counts = []
    for axis, dim, window in zip(IMAGE_AXES, (-2, -1), windows, strict=True):
        size, margin = x.shape[dim], window.before if count_include_pad else 0
        image = Interval(-margin, size + margin)
        present = reached.output.dims[axis] is not None
        rows = reached.output.held[axis] if present else Interval(0, window.output_size(size))
        counts.append([window.needs(Interval(row, row + 1), size).intersect(image).length for row in range(*rows)])
    if all(count == window.kernel for axis, window in zip(counts, windows, strict=True) for count in axis):
        return wrap(y, reached.output)
    per_row, per_col = (torch.tensor(count, dtype=y.dtype, device=y.device) for count in counts)
    return wrap(y * (area / (per_row.unsqueeze(1) * per_col)), reached.output)


@register(*named("lp_pool2d"))
def lp_pool2d(
    input: Tensor, norm_type: float, kernel_size: Size, stride: Size | None = None, ceil_mode: bool = False
) -> Tensor:
    """(sum of x^p)^(1/p) over each window, with the sign convention of PyTorch's own."""
    count = pair(kernel_size)[0] * pair(kernel_size)[1]
    mean = avg_pool2d(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(count).pow(1.0 / norm_type)


@register(Tensor.unfold)
def unfold_dim(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, as a new last dim."""
    x = input
    assert isinstance(x, SpatialTensor)
    dim = dimension % x.dim()
    axis = x.layout.axis(dim)
    if axis is None:
        return wrap(x.local.unfold(dim, size, step), x.layout)
    if axis not in IMAGE_AXES:
        raise refusal("Tensor.unfold", "a batch that is cut cannot be unfolded")
    reached = reach(x, {axis: Window(size, step)})
    local = reached.fetch(x.local)
    if reached.output.held[axis].empty:
        shape = [*local.shape, size]
        shape[dim] = 0
        windows = local.sum() * local.new_zeros(shape)
    else:
        windows = local.unfold(dim, size, step)
    y = SpatialTensor(windows, reached.output)
    y.is_copy = True
    return y


@register(F.unfold)
def unfold(input: Tensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Tensor:
    """All windows as columns, (N, C * kernel, L). L counts over the whole image, so the result is gathered."""
    x = check_image(input, "torch.nn.functional.unfold")
    if pair(dilation) != (1, 1):
        raise refusal("torch.nn.functional.unfold(dilation > 1)")
    (kh, kw), (ph, pw), (sh, sw) = pair(kernel_size), pair(padding), pair(stride)
    windows = F.pad(x, (pw, pw, ph, ph)).unfold(2, kh, sh).unfold(3, kw, sw)  # (N, C, H', W', kh, kw)
    n, c, h, w = windows.shape[:4]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(n, c * kh * kw, h * w)
