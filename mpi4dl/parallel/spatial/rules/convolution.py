"""Convolution on tiles, of any kernel, stride, padding, dilation and groups, transposed or not, in 1, 2 and 3 dims.

What is saved for the backward pass is the activation itself, which its producer keeps alive anyway, and the strips that
came from the neighbours: the input with its halo lives only while a convolution runs, if at all (`seams`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mpi4dl.geometry import TransposedWindow, Window
from mpi4dl.parallel.spatial.halo import Reach, gather_axes
from mpi4dl.parallel.spatial.redistribution import as_image
from mpi4dl.parallel.spatial.rules.channels import with_cut_channels
from mpi4dl.parallel.spatial.rules.seams import ConvolutionOptions, Joined, Way, choose
from mpi4dl.parallel.spatial.rules.windows import axes_of, cast, check_image, each, hashable, output_shape, slide
from mpi4dl.parallel.spatial.tensor import SpatialTensor, register, wrap

WORTH_ONEDNN = 1 << 22  # multiplications


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
    if input.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        dtypes = [t.dtype for t in (input, weight, bias) if t is not None]
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


def _padding(padding: str | int | Sequence[int], kernel: int, dilation: int, which: int, count: int) -> tuple[int, int]:
    """Rows of padding before and after, along one of `count` dims."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = dilation * (kernel - 1)
        return total // 2, total - total // 2
    return (each(padding, count)[which],) * 2


class _Planned(NamedTuple):
    """How a convolution is computed: in which way, to which shape; or of an image that is padded first."""

    reached: Reach
    way: Way
    shape: list[int]
    first: list[int] | None


def _convolution(
    count: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    x = check_image(input, f"torch.conv{count}d", count)
    local = x.local
    if local.dim() == count + 1:
        y = _convolution(count, x.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return y.squeeze(0)
    options = hashable(stride), hashable(padding), hashable(dilation), groups
    key = _convolution, count, options, local.shape, local.dtype, weight.shape, weight.dtype, weight.device
    planned = x.layout.known(key, lambda: _plan(count, x, weight, *options))
    if planned.first is not None:
        return _convolution(count, F.pad(x, planned.first), weight, bias, stride, 0, dilation, groups)
    reached, way, shape, _ = planned
    reached.ask(x)
    if reached.exchange is None:
        local = reached.crop(local)
    return wrap(convolve(local, weight, bias, way, shape), reached.output)


def _plan(
    count: int,
    x: SpatialTensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> _Planned:
    kernel, stride, dilation = weight.shape[2:], each(stride, count), each(dilation, count)
    around = [_padding(padding, kernel[i], dilation[i], i, count) for i in range(count)]
    if padding == "same" and set(stride) != {1}:
        raise RuntimeError(f"padding='same' is not supported for strided convolutions, but stride is {stride}")
    windows = [Window(kernel[i], stride[i], *around[i], dilation[i]) for i in range(count)]
    reached, own = slide(x, windows)
    sides = None
    if any(itself and before != after for itself, (before, after) in zip(own, around, strict=True)):
        # An even kernel with padding "same" on an axis that is not cut: the operator cannot pad one side alone.
        sides = [side for pair in reversed(around) for side in pair]
    remaining = tuple(before if itself else 0 for itself, (before, _) in zip(own, around, strict=True))
    if kernel == (1,) * count and weight.is_cpu and x.local.numel() * weight.shape[0] >= WORTH_ONEDNN:
        # Dilation means nothing to a kernel of one pixel, except that PyTorch then takes it to oneDNN on a rank of one
        # thread too, and not to an older kernel, which takes twice the time, or, of little work, half of it.
        dilation = (2,) * count
    options = ConvolutionOptions(stride, remaining, dilation, False, (0,) * count, groups)
    local = reached.crop(x.local) if reached.exchange is None else x.local
    shape = output_shape(reached, x, local, windows, weight.shape[0])
    return _Planned(reached, choose(reached, x, local, weight, windows, options), shape, sides)


def _transposed_convolution(
    count: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    x = check_image(input, f"torch.conv_transpose{count}d", count)
    if x.local.dim() == count + 1:
        args = stride, padding, output_padding, groups, dilation
        return _transposed_convolution(count, x.unsqueeze(0), weight, bias, *args).squeeze(0)
    stride, padding, output_padding, dilation = (each(n, count) for n in (stride, padding, output_padding, dilation))
    windows = [
        TransposedWindow(*numbers)
        for numbers in zip(weight.shape[2:], stride, padding, output_padding, dilation, strict=True)
    ]
    reached, own = slide(x, windows)
    kept = [both if itself else (0, 0) for itself, *both in zip(own, padding, output_padding, strict=True)]
    options = ConvolutionOptions(
        stride, tuple(before for before, _ in kept), dilation, True, tuple(after for _, after in kept), groups
    )
    local = reached.crop(x.local) if reached.exchange is None else x.local
    # What the needed rows add to, in the coordinates of the output; then that is cropped, or padded, to what is asked.
    covered, crop = output_shape(reached, x, local, windows, weight.shape[1] * groups), []
    for i, (axis, window) in reversed(list(enumerate(zip(axes_of(x, count), windows, strict=True)))):
        if own[i]:
            crop += [0, 0]
            continue
        assert axis is not None
        touched, wanted = window.adds_to(reached.needed[axis]), reached.output.held[axis]
        covered[i - count] = touched.length
        crop += [touched.start - wanted.start, wanted.stop - touched.stop] if touched.length else [0, wanted.length]
    y = convolve(local, weight, None, Joined(reached.exchange, options), covered)
    if any(crop):
        y = F.pad(y, crop)
    if bias is not None:
        y = y + cast(bias)[0].view(-1, *(1,) * count)
    return wrap(y, reached.output)


def _along_tokens(function: Callable[..., Tensor], rule: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """The rule; tokens (N, heads, tokens, features) are cut as the rows and columns of an image first."""

    def opened(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, SpatialTensor) or not input.layout.flat:
            return rule(input, *args, **kwargs)
        image = input.dim() == count + 2 and len(input.layout.grid.space) == count
        return function(as_image(input) if image else gather_axes(input, ()), *args, **kwargs)

    return opened


for count in (1, 2, 3):
    for name, rule, out in (
        (f"conv{count}d", _convolution, 0),
        (f"conv_transpose{count}d", _transposed_convolution, 1),
    ):
        function = getattr(torch, name)
        rule = with_cut_channels(function, partial(rule, count), out)
        register(function, flat=out == 0)(_along_tokens(function, rule, count) if out == 0 else rule)
