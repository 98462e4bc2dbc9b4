"""Convolution on tiles, of any kernel, stride, padding, dilation and groups, transposed or not.

What is saved for the backward pass is the activation itself, which its producer keeps alive anyway, and the strips that
came from the neighbours: the input with its halo lives only while a convolution runs, if at all (`seams`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mpi4dl.geometry import COLS, ROWS, TransposedWindow, Window
from mpi4dl.parallel.spatial.rules.seams import ConvolutionOptions, Joined, Way, choose
from mpi4dl.parallel.spatial.rules.windows import cast, check_image, output_shape, pair, slide
from mpi4dl.parallel.spatial.tensor import function_name, refusal, register, wrap


class Later(Protocol):
    """Takes note of `gradients`: called with `held`, it computes the gradients of a layer's weight and bias."""

    def __call__(self, gradients: Callable[..., tuple[Tensor | None, ...]], *held: Tensor) -> None: ...


class Convolution(torch.autograd.Function):
    """A convolution in a way of `seams`. What is saved for backward is the tile itself and the strips that came.

    With `later`, weight and bias come without a graph of their own, and backward tells `later` how to compute their
    gradients. `anchor` is then any tensor that requires a gradient, of which it gets none: it makes this a part of the
    graph even if x is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        way: Way,
        shape: Sequence[int],
        later: Later | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        ctx.way, ctx.has_bias, ctx.later = way, bias is not None, later
        y, strips = way.forward(x, weight, bias, shape)
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *strips = ctx.saved_tensors
        way: Way = ctx.way
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        of_x = of_weight = of_bias = None
        if ctx.later is not None:
            ctx.later(partial(_of_parameters, way, strips, weight, ctx.has_bias), gradient, x.detach())
        if need_x:
            of_x = way.of_input(gradient, x, weight)
        if need_weight or need_bias:
            of_weight, of_bias = way.of_parameters(gradient, x, strips, weight, (False, need_weight, need_bias))
        return (
            of_x() if of_x is not None else None,
            of_weight if need_weight else None,
            of_bias if need_bias else None,
            *(None,) * 4,
        )


def _of_parameters(
    way: Way, strips: list[Tensor], weight: Tensor, has_bias: bool, gradient: Tensor, x: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    return way.of_parameters(gradient, x, strips, weight, (False, True, has_bias))


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, options: ConvolutionOptions) -> None:
    """Raise on all ranks what PyTorch raises only where a tile has pixels."""
    dtypes = [t.dtype for t in (input, weight, bias) if t is not None]
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"input, weight and bias of a convolution must be of one type, but are {dtypes}")
    channels, groups = weight.shape[0 if options.transposed else 1], options.groups
    expected = channels if options.transposed else channels * groups
    if input.shape[1] != expected or weight.shape[0] % groups:
        raise RuntimeError(
            f"a weight of shape {tuple(weight.shape)} in {groups} groups needs {expected} input channels and "
            f"a first dim that {groups} divides, but the input has {input.shape[1]} channels"
        )


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, way: Way, shape: Sequence[int]) -> Tensor:
    """Convolve this rank's part in that way, to an output of `shape`.

    It can be overridden with `__torch_function__`, as PyTorch's own operators can.
    """
    if has_torch_function_variadic(input, weight, bias):
        tensors = (input, weight, bias)
        return handle_torch_function(convolve, tensors, *tensors, way, shape)
    input, weight, bias = cast(input, weight, bias)
    _check(input, weight, bias, way.options)
    if way.exchange is None and 0 not in shape and input.numel():
        return torch.convolution(input, weight, bias, *way.options)
    return Convolution.apply(input, weight, bias, way, shape)


def _padding(padding: str | int | Sequence[int], kernel: int, dilation: int, which: int) -> tuple[int, int]:
    """Rows (or columns) of padding before and after."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    assert not isinstance(padding, str)
    return pair(padding)[which], pair(padding)[which]


@register(torch.conv2d)
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    x = check_image(input, "torch.conv2d")
    if x.dim() == 3:
        return conv2d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    stride, dilation = pair(stride), pair(dilation)
    around = [_padding(padding, weight.shape[2 + i], dilation[i], i) for i in (0, 1)]
    if padding == "same" and stride != (1, 1):
        raise RuntimeError(f"padding='same' is not supported for strided convolutions, but stride is {stride}")
    windows = tuple(Window(weight.shape[2 + i], stride[i], around[i][0], around[i][1], dilation[i]) for i in (0, 1))
    reached, own = slide(x, (windows[0], windows[1]))
    if any(itself and before != after for itself, (before, after) in zip(own, around, strict=True)):
        # An even kernel with padding "same" on an axis that is not cut: the operator cannot pad one side alone.
        (top, bottom), (left, right) = around
        return conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, stride, 0, dilation, groups)
    remaining = tuple(before if itself else 0 for itself, (before, _) in zip(own, around, strict=True))
    if weight.shape[2:] == (1, 1) and weight.is_cpu:
        # Dilation means nothing to a kernel of one pixel, except that PyTorch then takes it to oneDNN on a rank of one
        # thread too, and not to an older kernel that takes twice the time.
        dilation = (2, 2)
    options = ConvolutionOptions(stride, (remaining[0], remaining[1]), dilation, False, (0, 0), groups)
    shape = output_shape(reached, x.local, (windows[0], windows[1]), weight.shape[0])
    local = reached.crop(x.local) if reached.exchange is None else x.local
    way = choose(reached, local, weight, {ROWS: windows[0], COLS: windows[1]}, options)
    return wrap(convolve(local, weight, bias, way, shape), reached.output)


@register(torch.conv_transpose2d)
def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    x = check_image(input, "torch.conv_transpose2d")
    if x.dim() == 3:
        y = conv_transpose2d(x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return y.squeeze(0)
    stride, padding, output_padding, dilation = pair(stride), pair(padding), pair(output_padding), pair(dilation)
    windows = tuple(
        TransposedWindow(weight.shape[2 + i], stride[i], padding[i], output_padding[i], dilation[i]) for i in (0, 1)
    )
    reached, own = slide(x, (windows[0], windows[1]))
    keep = [(p, q) if itself else (0, 0) for itself, p, q in zip(own, padding, output_padding, strict=True)]
    options = ConvolutionOptions(stride, (keep[0][0], keep[1][0]), dilation, True, (keep[0][1], keep[1][1]), groups)
    local = reached.crop(x.local) if reached.exchange is None else x.local
    # What the needed rows add to, in the coordinates of the output; then that is cropped, or padded, to what is asked.
    shape = output_shape(reached, local, (windows[0], windows[1]), weight.shape[1] * groups)
    covered, crop = list(shape), []
    for i, axis in ((1, COLS), (0, ROWS)):
        if own[i]:
            crop += [0, 0]
            continue
        needed, wanted = reached.needed[axis], reached.output.held[axis]
        first = needed.start * stride[i] - padding[i]
        length = (needed.length - 1) * stride[i] + windows[i].extent if needed.length else 0
        covered[-2 + i] = length
        crop += [first - wanted.start, wanted.stop - first - length] if length else [0, wanted.length]
    y = convolve(local, weight, None, Joined(reached.exchange, options), covered)
    if any(crop):
        y = F.pad(y, crop)
    if bias is not None:
        y = y + cast(bias)[0].view(-1, 1, 1)
    return wrap(y, reached.output)


def _refused(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Tensor:
        raise refusal(function_name(function), "tiles are two-dimensional")

    return rule


for function in (torch.conv1d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose3d):
    register(function)(_refused(function))
