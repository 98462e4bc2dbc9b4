"""Convolution on tiles, of any kernel, stride, padding, dilation and groups, transposed or not.

The input with its halo lives only while the convolution runs: what is saved for the backward pass is the activation
itself, which its producer keeps alive anyway, and the strips that came from the neighbours.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import COLS, ROWS, TransposedWindow, Window
from mpi4dl.parallel.spatial.rules.windows import cast, check_image, output_shape, pair, slide
from mpi4dl.parallel.spatial.tensor import function_name, refusal, register, wrap


class Options(NamedTuple):
    """The arguments of `aten::convolution` that are not tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    transposed: bool
    output_padding: tuple[int, int]
    groups: int


class _Convolution(torch.autograd.Function):
    """Fetch the halo, convolve. Backward: rebuild the input, and send the halo's gradients home meanwhile."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exchange: Exchange | None,
        options: Options,
        shape: list[int],
    ) -> Tensor:
        ctx.exchange, ctx.options, ctx.has_bias = exchange, options, bias is not None
        strips: list[Tensor] = []
        padded = x
        if exchange is not None:
            strips, pending = exchange.start(x)
            padded = exchange.assemble(x, strips, pending)
        ctx.save_for_backward(x, weight, *strips)
        if 0 in shape or padded.numel() == 0:
            y = x.new_zeros(shape)
            return y if bias is None else y + bias.view(-1, 1, 1)
        return torch.convolution(padded, weight, bias, *options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *strips = ctx.saved_tensors
        exchange: Exchange | None = ctx.exchange
        padded = x if exchange is None else exchange.assemble(x, strips)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        empty = gradient.numel() == 0 or padded.numel() == 0

        def part(*mask: bool) -> tuple[Tensor, Tensor, Tensor]:
            if empty:
                bias_gradient = gradient.sum(dim=[d for d in range(gradient.dim()) if d != gradient.dim() - 3])
                return padded.new_zeros(padded.shape), weight.new_zeros(weight.shape), bias_gradient
            bias_sizes = [gradient.shape[-3]] if ctx.has_bias else None
            return torch.ops.aten.convolution_backward(gradient, padded, weight, bias_sizes, *ctx.options, mask)

        gradient_x = gradient_weight = gradient_bias = None
        if need_x:
            gradient_x = part(True, False, False)[0]
            sent = exchange.start_adjoint(gradient_x) if exchange is not None else None
        if need_weight or need_bias:
            _, gradient_weight, gradient_bias = part(False, need_weight, need_bias)
        if need_x and exchange is not None and sent is not None:
            gradient_x = exchange.finish_adjoint(sent)
        return (
            gradient_x,
            gradient_weight if need_weight else None,
            gradient_bias if need_bias else None,
            None,
            None,
            None,
        )


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
    options = Options(stride, (remaining[0], remaining[1]), dilation, False, (0, 0), groups)
    local, weight, bias = cast(x.local, weight, bias)
    shape = output_shape(reached, local, (windows[0], windows[1]), weight.shape[0])
    if reached.exchange is None:
        local = reached.crop(local)
        if 0 not in shape and local.numel():
            return wrap(torch.convolution(local, weight, bias, *options), reached.output)
    return wrap(_Convolution.apply(local, weight, bias, reached.exchange, options, shape), reached.output)


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
    options = Options(stride, (keep[0][0], keep[1][0]), dilation, True, (keep[0][1], keep[1][1]), groups)
    local, weight, bias = cast(x.local, weight, bias)
    if reached.exchange is None:
        local = reached.crop(local)
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
    y = _Convolution.apply(local, weight, None, reached.exchange, options, covered)
    if any(crop):
        y = F.pad(y, crop)
    if bias is not None:
        y = y + bias.view(-1, 1, 1)
    return wrap(y, reached.output)


def _refused(function: Any) -> Any:
    def rule(*args: Any, **kwargs: Any) -> Tensor:
        raise refusal(function_name(function), "tiles are two-dimensional")

    return rule


for function in (torch.conv1d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose3d):
    register(function)(_refused(function))
