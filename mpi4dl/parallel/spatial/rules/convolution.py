"""Convolution on tiles, transposed or not, in 1, 2 and 3 dims; with cut channels."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mpi4dl.comm import exchange
from mpi4dl.geometry import Interval, Split, TransposedWindow, Window
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import HaloPlan, gather_axes
from mpi4dl.parallel.spatial.redistribution import as_image
from mpi4dl.parallel.spatial.rules.windows import (
    Gradients,
    Mask,
    Windowed,
    WithHalo,
    axes_of,
    cast,
    check_image,
    each,
    slide,
)
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, local_part, refusal, register, wrap


class ConvolutionOptions(NamedTuple):
    """The arguments of `aten::convolution` that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Convolution(NamedTuple):
    """`torch.convolution` of an input, a weight and a bias, to an output of `shape`: a function of `Windowed`."""

    options: ConvolutionOptions
    shape: Sequence[int]
    reads: Mask = (False, True, False)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[tuple[Tensor], tuple[Tensor]]:
        if 0 in self.shape or not x.numel():
            y = x.new_zeros(self.shape)
            y = y if bias is None else y + bias.view(-1, *(1,) * (y.dim() - 2))
        else:
            y = torch.convolution(x, weight, bias, *self.options)
        return (y,), (weight,)

    def backward(self, gradient: Tensor, x: Tensor, kept: Sequence[Tensor], mask: Mask) -> Gradients:
        return gradients(gradient, x, kept[0], self.options, mask)


def gradients(gradient: Tensor, x: Tensor, weight: Tensor, options: ConvolutionOptions, mask: Mask) -> Gradients:
    """Those gradients of input, weight and bias that the mask asks for."""
    if gradient.numel() == 0 or x.numel() == 0:
        of_bias = gradient.sum(dim=[dim for dim in range(gradient.dim()) if dim != 1])
        found = x.new_zeros(x.shape), weight.new_zeros(weight.shape), of_bias
        return tuple(each if asked else None for each, asked in zip(found, mask, strict=True))
    bias_sizes = [gradient.shape[1]] if mask[2] else None
    return torch.ops.aten.convolution_backward(gradient, x, weight, bias_sizes, *options, mask)


# Layers of images of whose channels each rank has some: those that it has are treated as if they were all.
#
# column   weight (out | , in, k, k)   each rank computes some channels, of all of the input's
# row      weight (out, in | , k, k)   each rank has some channels of the input, and all add up
# groups   weight (out | , 1, k, k)    each rank has the same groups of the input's channels and of the output's


def own_channels(x: Tensor) -> Tensor:
    """This rank's channels of x, as if these were all."""
    if not isinstance(x, SpatialTensor):
        return x
    layout = x.layout
    return wrap(x.local, layout.with_dims([*layout.dims[:-1], None]))


def as_own(y: Tensor, grid: Grid, split: Split, dim: int) -> SpatialTensor:
    """y, made of this rank's own channels, as what it has of all of them, which are cut so."""
    layout = y.layout if isinstance(y, SpatialTensor) else Layout.of_copies(grid)
    tiling = layout.tiling.replace(grid.axes[-1], split)
    return SpatialTensor(local_part(y), Layout(grid, tiling, (*layout.dims[:-1], dim), layout.flat))


def of_channels(x: Tensor | None, channels: Interval) -> Tensor | None:
    """Those entries of x, which every rank has for all channels."""
    return None if x is None else x[channels.start : channels.stop]


Convolve = Callable[..., Tensor]
GROUPS = 3  # the place of `groups` in what follows a convolution's bias
BEHIND_BIAS = (
    ("stride", "padding", "dilation", "groups"),
    ("stride", "padding", "output_padding", "groups", "dilation"),
)


def with_cut_channels(function: Any, convolution: Convolve, out: int = 0) -> Convolve:
    """The rule `convolution` of this function, for weights too that are cut; `out` is the weight's dim of outputs.

    Tokens (N, heads, tokens, features) are cut as the rows and columns of an image first.
    """

    @wraps(convolution)
    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any) -> Tensor:
        layout = input.layout if isinstance(input, SpatialTensor) else None
        if layout is not None and layout.flat:
            image = input.dim() == weight.dim() == len(layout.grid.space) + 2
            x = as_image(input) if image else gather_axes(input, ())  # type: ignore[arg-type]
            return function(x, weight, bias, *args, **options)
        dim = len(input.shape) - len(weight.shape) + 1
        if layout is not None and layout.grid.features is None and not isinstance(weight, SpatialTensor):
            return convolution(input, weight, bias, *args, **options)
        if not isinstance(weight, SpatialTensor) and not shared(input, dim):
            return convolution(input, weight, bias, *args, **options)
        if isinstance(weight, SpatialTensor) and not shared(weight, 0) and not shared(weight, 1):
            raise refusal(function_name(function), "an argument other than the input is a SpatialTensor")
        groups = options.get("groups", args[GROUPS] if len(args) > GROUPS else 1)
        if not isinstance(weight, SpatialTensor):
            return function(with_all_features(input), weight, bias, *args, **options)  # type: ignore[arg-type]
        grid, split = weight.layout.grid, weight.layout.tiling.splits[-1]
        if layout is not None and layout.dims[-1] not in (None, dim):  # ranks share tokens
            input = with_all_features(input)  # type: ignore[arg-type]
        if groups == 1 and shared(weight, out):
            x = with_all_features(input) if shared(input, dim) else input  # type: ignore[arg-type]
            y = function(x, weight.local, _own(bias, weight, split), *args, **options)
            return as_own(y, grid, split, dim)
        if groups == 1:
            x = _these(input, split, dim, grid)
            y = function(x, weight.local, None, *args, **options)
            total = exchange.all_reduce(local_part(y), grid.along((grid.axes[-1],)))
            y = wrap(total, y.layout) if isinstance(y, SpatialTensor) else total
            return y if bias is None else y + bias.view(-1, *[1] * (weight.dim() - 2))
        # Groups: some of the inputs make some of the outputs.
        if not shared(weight, 0) or weight.shape[0] % groups or any(n * groups % weight.shape[0] for n in split.cuts):
            raise refusal(function_name(function), f"a weight of {groups} groups is cut elsewhere than between these")
        cuts = [n * groups // weight.shape[0] for n in split.cuts]  # in groups
        number = cuts[grid.coordinates[-1] + 1] - cuts[grid.coordinates[-1]]
        own = {**dict(zip(BEHIND_BIAS[out], args, strict=False)), **options, "groups": number}
        x = _these(input, Split.at([n * (input.shape[dim] // groups) for n in cuts]), dim, grid)
        made = Split.at([n * (weight.shape[out] // (1 if out else groups)) for n in cuts])
        return as_own(function(x, weight.local, _own(bias, weight, split), **own), grid, made, dim)

    return rule


def _own(bias: Tensor | None, weight: SpatialTensor, split: Split) -> Tensor | None:
    if isinstance(bias, SpatialTensor):
        return bias.local
    return of_channels(bias, split.owned(weight.layout.grid.coordinates[-1]))


def _these(x: Tensor, split: Split, dim: int, grid: Grid) -> Tensor:
    """Of x this rank's channels by that split."""
    if shared(x, dim) and x.layout.tiling.splits[-1] == split:  # type: ignore[attr-defined]
        return own_channels(x)
    x = with_all_features(x) if shared(x, dim) else x  # type: ignore[arg-type]
    mine = split.owned(grid.coordinates[-1])
    return x.narrow(dim, mine.start, mine.length)


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


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, operator: WithHalo) -> Tensor:
    """Convolve this rank's part.

    It can be overridden with `__torch_function__`, as PyTorch's own operators can.
    """
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(convolve, (input, weight, bias), input, weight, bias, operator)
    input, weight, bias = cast(input, weight, bias)
    exchange, function = operator
    assert isinstance(function, Convolution)
    options, shape, _ = function
    _check(input, weight, bias, options)
    if exchange is None and 0 not in shape and input.numel():
        return torch.convolution(input, weight, bias, *options)
    return Windowed.apply(input, operator, weight, bias)[0]


class _Planned(NamedTuple):
    """How a convolution is computed; or, of an image that is padded `first`, by how much."""

    halo_plan: HaloPlan
    operator: WithHalo
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
    options = stride, padding, dilation, groups
    key = _convolution, count, options, local.shape, local.dtype, weight.shape, weight.dtype, weight.device
    planned = x.layout.cached(key, lambda: _plan(count, x, weight, *options))
    if planned.first is not None:
        return _convolution(count, F.pad(x, planned.first), weight, bias, stride, 0, dilation, groups)
    halo_plan, operator, _ = planned
    if halo_plan.missing_halo is not None:
        halo_plan.request_halo(x)
    if halo_plan.exchange is None:
        local = halo_plan.crop(local)
    return wrap(convolve(local, weight, bias, operator), halo_plan.output)


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
    if padding == "same":
        if set(stride) != {1}:
            raise RuntimeError(f"padding='same' is not supported for strided convolutions, but stride is {stride}")
        totals = [dilation[i] * (kernel[i] - 1) for i in range(count)]
        around = [(n // 2, n - n // 2) for n in totals]
    else:
        around = [(n, n) for n in each(0 if padding == "valid" else padding, count)]
    windows = [Window(kernel[i], stride[i], *around[i], dilation[i]) for i in range(count)]
    sliding, sides = slide(x, windows), None
    if any(axis is None and before != after for axis, (before, after) in zip(axes_of(x, count), around, strict=True)):
        # An even kernel with padding "same" along a dim that is no axis: the operator cannot pad one side alone.
        sides = [side for pair in reversed(around) for side in pair]
    options = ConvolutionOptions(stride, sliding.padding, dilation, False, (0,) * count, groups)
    shape = sliding.shape(sliding.halo_plan.begin(x), weight.shape[0])
    return _Planned(sliding.halo_plan, WithHalo(sliding.halo_plan.exchange, Convolution(options, shape)), sides)


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
    halo_plan, _, needed, made = sliding = slide(x, windows)
    own = [axis is None or x.layout.grid.shape[axis] == 1 for axis in axes_of(x, count)]
    kept = [both if itself else (0, 0) for itself, *both in zip(own, padding, output_padding, strict=True)]
    options = ConvolutionOptions(
        stride, tuple(before for before, _ in kept), dilation, True, tuple(after for _, after in kept), groups
    )
    local = halo_plan.begin(x)
    # The output rows to which the needed rows contribute; they are cropped, or padded, to the requested ones.
    covered, crop = sliding.shape(local, weight.shape[1] * groups), []
    for i in reversed(range(count)):
        touched, wanted = made[i] if own[i] else windows[i].adds_to(needed[i]), made[i]
        covered[i - count] = touched.length
        crop += [touched.start - wanted.start, wanted.stop - touched.stop] if touched.length else [0, wanted.length]
    y = convolve(local, weight, None, WithHalo(halo_plan.exchange, Convolution(options, covered)))
    if any(crop):
        y = F.pad(y, crop)
    if bias is not None:
        y = y + cast(bias)[0].view(-1, *(1,) * count)
    return wrap(y, halo_plan.output)


for count in (1, 2, 3):
    for name, rule, out in (
        (f"conv{count}d", _convolution, 0),
        (f"conv_transpose{count}d", _transposed_convolution, 1),
    ):
        function = getattr(torch, name)
        register(function, flat=out == 0)(with_cut_channels(function, partial(rule, count), out))
