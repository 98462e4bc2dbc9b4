"""Convolution on tiles, of any kernel, stride, padding, dilation and groups, transposed or not.

The input with its halo lives only while the convolution runs: what is saved for the backward pass is the activation
itself, which its producer keeps alive anyway, and the strips that came from the neighbours.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mpi4dl.comm.exchange import Exchange
from mpi4dl.geometry import COLS, ROWS, TransposedWindow, Window
from mpi4dl.parallel.spatial.rules.windows import cast, check_image, output_shape, pair, slide
from mpi4dl.parallel.spatial.tensor import function_name, refusal, register, wrap


class ConvolutionOptions(NamedTuple):
    """The arguments of `aten::convolution` that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Later(Protocol):
    """Takes note of `gradients`: called with `held`, it computes the gradients of a layer's weight and bias."""

    def __call__(self, gradients: Callable[..., tuple[Tensor | None, ...]], *held: Tensor) -> None: ...


class Convolution(torch.autograd.Function):
    """Fetch the halo, convolve. Backward: rebuild the input, and send the halo's gradients home meanwhile.

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
        exchange: Exchange | None,
        options: ConvolutionOptions,
        shape: Sequence[int],
        later: Later | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        ctx.exchange, ctx.options, ctx.has_bias, ctx.later = exchange, options, bias is not None, later
        strips: list[Tensor] = []
        padded = x
        if exchange is not None:
            incoming = exchange.start(x)
            strips, padded = incoming.strips, exchange.assemble(x, incoming)
        ctx.padded_size, ctx.padded_stride = padded.shape, padded.stride()
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
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        gradient_x = gradient_weight = gradient_bias = None
        if ctx.later is not None:
            ctx.later(
                partial(_of_parameters, strips, weight, exchange, ctx.options, ctx.has_bias), gradient, x.detach()
            )
            # The gradient of the input depends on the input's shape alone.
            padded = x if exchange is None else x.new_empty_strided(ctx.padded_size, ctx.padded_stride)
        else:
            padded = x if exchange is None else exchange.assemble(x, exchange.again(strips))
        if need_x:
            gradient_x = _gradients(gradient, padded, weight, ctx.options, (True, False, False))[0]
            back = exchange.adjoint.start(gradient_x) if exchange is not None else None
        if need_weight or need_bias:
            mask = (False, need_weight, need_bias)
            _, gradient_weight, gradient_bias = _gradients(gradient, padded, weight, ctx.options, mask)
        if need_x and exchange is not None and back is not None:
            gradient_x = exchange.adjoint.assemble(gradient_x, back)
        return (
            gradient_x,
            gradient_weight if need_weight else None,
            gradient_bias if need_bias else None,
            None,
            None,
            None,
            None,
            None,
        )


def _of_parameters(
    strips: list[Tensor],
    weight: Tensor,
    exchange: Exchange | None,
    options: ConvolutionOptions,
    has_bias: bool,
    gradient: Tensor,
    x: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of weight and bias alone."""
    padded = x if exchange is None else exchange.assemble(x, exchange.again(strips))
    return _gradients(gradient, padded, weight, options, (False, True, has_bias))[1:]


def _gradients(
    gradient: Tensor, padded: Tensor, weight: Tensor, options: ConvolutionOptions, mask: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Those gradients of input, weight and bias that the mask asks for."""
    if gradient.numel() == 0 or padded.numel() == 0:
        bias_gradient = gradient.sum(dim=[dim for dim in range(gradient.dim()) if dim != 1])
        return padded.new_zeros(padded.shape), weight.new_zeros(weight.shape), bias_gradient
    bias_sizes = [gradient.shape[1]] if mask[2] else None
    return torch.ops.aten.convolution_backward(gradient, padded, weight, bias_sizes, *options, mask)


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


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    exchange: Exchange | None,
    options: ConvolutionOptions,
    shape: Sequence[int],
) -> Tensor:
    """Convolve this rank's part, after an exchange if there is one, to an output of `shape`.

    It can be overridden with `__torch_function__`, as PyTorch's own operators can.
    """
    if has_torch_function_variadic(input, weight, bias):
        tensors = (input, weight, bias)
        return handle_torch_function(convolve, tensors, *tensors, exchange, options, shape)
    input, weight, bias = cast(input, weight, bias)
    _check(input, weight, bias, options)
    if exchange is None and 0 not in shape and input.numel():
        return torch.convolution(input, weight, bias, *options)
    return Convolution.apply(input, weight, bias, exchange, options, shape)


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
    return wrap(convolve(local, weight, bias, reached.exchange, options, shape), reached.output)


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
    y = convolve(local, weight, None, reached.exchange, options, covered)
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
