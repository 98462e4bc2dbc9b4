"""The operator on windows, which fetches a halo and calls PyTorch's function; fold and unfold.

Windows slide along the last dims of a tensor: one of sequences, two of images, three of volumes.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from math import prod
from operator import and_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import exchange
from mpi4dl.comm.exchange import Dims, Exchange, Like, LocalFunction, at, no_view, once_differentiable
from mpi4dl.geometry import BATCH, AxisMap, Interval, OfPart, Split, TransposedWindow, Window, plan_axis
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import HaloPlan, gather_axes, plan_halo
from mpi4dl.parallel.spatial.sums import shared
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    copied,
    function_name,
    owned,
    place_of,
    refusal,
    register,
    same_memory,
    wrap,
)


def each(value: Any, count: int) -> tuple[Any, ...]:
    """An argument that PyTorch lets one give once, or for each of so many dims."""
    if not isinstance(value, Sequence):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value[:count])


def check_image(x: Tensor, function: str, count: int = 2, each_channel: bool = False) -> SpatialTensor:
    """x, if windows along its last `count` dims are along axes of space, and no other dim is one; refuse it otherwise.

    A batch that is cut is the first dim. An operator on `each_channel` alone also takes channels that ranks share.
    """
    if not isinstance(x, SpatialTensor):
        raise refusal(function, "an argument other than the input is a SpatialTensor")
    layout, first = x.layout, len(x.shape) - count
    if not layout.cached((check_image, first, each_channel), lambda: _slides(x, first, each_channel)):
        raise refusal(
            function, f"it slides along the last {count} dims, but those of {layout.grid.names} are {layout.dims}"
        )
    return x


def _slides(x: SpatialTensor, first: int, each_channel: bool) -> bool:
    dims = x.layout.dims[:-1] if each_channel and shared(x, first - 1) else x.layout.dims
    return not any(
        dim is not None and (dim != 0 or first == 0 if axis == BATCH else dim < first) for axis, dim in enumerate(dims)
    )


def axes_of(x: SpatialTensor, count: int) -> tuple[int | None, ...]:
    """The axes that the last `count` dims of x are."""
    return _axes_of(x.layout.dims, x.local.dim(), count)


@lru_cache(maxsize=1024)
def _axes_of(dims: Dims, ndim: int, count: int) -> tuple[int | None, ...]:
    return tuple(dims.index(dim) if dim in dims else None for dim in range(ndim - count, ndim))


class Sliding(NamedTuple):
    """Windows that slide along the last dims of a tensor: which rows along each of them this rank computes from what.

    `needed` are the rows of the input, from the first that the operator's own `padding` leaves; along dims that are cut
    they may reach beyond the image. `made` are the rows of the output.
    """

    halo_plan: HaloPlan
    padding: tuple[int, ...]
    needed: tuple[Interval, ...]
    made: tuple[Interval, ...]

    def shape(self, local: Tensor, channels: int | None = None) -> list[int]:
        """The shape of the local output of an operator with these windows over `local`, the part of its input."""
        before = list(local.shape[: -len(self.made)])
        if channels is not None:
            before[-1] = channels
        return [*before, *(rows.length for rows in self.made)]


def slide(x: SpatialTensor, windows: Sequence[AxisMap], fill: float = 0.0) -> Sliding:
    """The reach of windows that slide along the last dims of x, of an operator that pads where it can."""
    axes = axes_of(x, len(windows))
    maps = {axis: window for axis, window in zip(axes, windows, strict=True) if axis is not None}
    halo_plan = plan_halo(x, maps, fill, pads=True)
    padding, needed, made = [], [], []
    for size, axis, window in zip(x.shape[-len(windows) :], axes, windows, strict=True):
        needed.append(Interval(0, size) if axis is None else halo_plan.needed[axis])
        made.append(Interval(0, window.output_size(size)) if axis is None else halo_plan.output.held[axis])
        padding.append(0 if made[-1].empty else max(0, needed[-1].start - window.needs(made[-1], size).start))
    return Sliding(halo_plan, tuple(padding), tuple(needed), tuple(made))


def places_of(indices: Tensor, size: Sequence[int]) -> list[Tensor]:
    """Where pixels of these numbers are in an image of such a size: their row, column and the like."""
    places = []
    for length in reversed(size[1:]):
        places.append(indices % length)
        indices = indices // length
    return [indices, *reversed(places)]


def flat_index(places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """The numbers of the pixels at these places, as they are counted in an image of such a size."""
    found = places[0]
    for place, length in zip(places[1:], size[1:], strict=True):
        found = found * length + place
    return found


def cast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype that autocast wants for convolutions and matrix products; as they are without autocast."""
    first = tensors[0]
    kind = first.device.type  # type: ignore[union-attr]
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)  # float64 stays, as in PyTorch
    return [t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors]


def in_plain_dtype(x: SpatialTensor, probe: Callable[[Tensor], Tensor], count: int = 2) -> SpatialTensor:
    """x in the dtype in which autocast would let PyTorch's operator work; `probe` calls it with an image of 2x2 px.

    The image has `count` dims of space.
    """
    kind = x.local.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    dtype = probe(torch.ones(1, 1, *(2,) * count, dtype=x.dtype, device=x.device)).dtype
    return x if dtype == x.dtype else SpatialTensor(x.local.to(dtype), x.layout)


# One operator computes convolutions, transposed ones too, and pooling.
#
#     forward     tile  -> [ strip | tile | strip ] -> y      by PyTorch's function; kept are the tile and the strips,
#                                                             or what PyTorch keeps instead of its input: not the copy
#     backward    tile  <- [ strip | tile | strip ] <- y      the gradients of strips travel while those of parameters
#                                                             are computed

ONE_CALL = 1 << 22  # multiplications up to which one call finds all gradients: strips leave later, but it costs less

Gradients = tuple[Tensor | None, ...]
Mask = tuple[bool, ...]  # of the gradients of input, weight and bias those that are asked for


class Function(Protocol):
    """A function of PyTorch: of an input that has its halo, of a weight and a bias, which may be None.

    `reads`: which gradients depend on the values of the input, and not only on its shape.
    """

    @property
    def reads(self) -> Mask: ...

    def forward(self, x: Tensor, weight: Any, bias: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results, of which the first is differentiable; and what `backward` needs beside the input."""

    def backward(self, gradient: Tensor, x: Tensor, kept: Sequence[Tensor], mask: Mask) -> Gradients:
        """The gradients of input, weight and bias, those that the mask asks for."""


class WithHalo(NamedTuple):
    """A function on windows, and the exchange that brings the halo of its input, unless this rank holds all of it."""

    exchange: Exchange | None
    function: Function


class Later(Protocol):
    """Takes note of `gradients`: called with `held`, it computes the gradients of a layer's weight and bias."""

    def __call__(self, gradients: Callable[..., Gradients], *held: Tensor) -> None: ...


class Windowed(LocalFunction):
    """An operator on x and its halo. If backward reads its input, it saves x itself and the strips that came.

    With `later`, weight and bias come without a graph of their own, and backward tells `later` how to compute their
    gradients. `anchor` is then any tensor that requires a gradient, of which it gets none: it makes this a part of the
    graph even if x is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        operator: WithHalo,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        later: Later | None = None,
        anchor: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        exchange, function = operator
        padded, like, strips = x, None, list[Tensor]()
        if exchange is not None:
            strips, _, like, _ = incoming = exchange.start(x)
            padded = exchange.assemble(x, incoming)
        results, kept = function.forward(padded, weight, bias)
        ctx.operator, ctx.like, ctx.later = operator, like or Like.of(x), later
        ctx.has_bias, ctx.num_kept = bias is not None, len(kept)
        ctx.save_for_backward(*kept, *((x, *strips) if True in function.reads else ()))
        if len(results) > 1:
            ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Gradients:
        (exchange, function), like, saved = ctx.operator, ctx.like, ctx.saved_tensors
        kept, (x, *strips) = saved[: ctx.num_kept], saved[ctx.num_kept :] or (gradient,)

        def gradients(gradient: Tensor, x: Tensor, mask: Mask) -> Gradients:
            values = any(map(and_, mask, function.reads))
            if exchange is not None:
                x = exchange.again(x, strips) if values else exchange.memory(like)
            elif not values:
                x = torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=like.memory_format)
            return function.backward(gradient, x, kept, mask)

        needs_x, _, *others = (*ctx.needs_input_grad, False, False)[:4]
        if ctx.later is not None:
            parameters = False, True, ctx.has_bias
            ctx.later(lambda gradient, x: gradients(gradient, x, parameters)[1:], gradient, x.detach())
        together = not needs_x or True not in others or _is_small(gradient, *kept)
        of_x, *rest = gradients(gradient, x, (needs_x, *others) if together else (True, False, False))
        if exchange is not None and needs_x:
            back = exchange.adjoint.start(of_x)
            if not together:
                rest = list(gradients(gradient, x, (False, *others))[1:])
            of_x = exchange.adjoint.assemble(of_x, back)
        return of_x, None, *rest, None, None


def operate(x: SpatialTensor, local: Tensor, halo_plan: HaloPlan, operator: WithHalo) -> tuple[Tensor, ...]:
    """The results of an operator without a weight on x, of which this rank has `local`."""
    halo_plan.request_halo(x)
    results: tuple[Tensor, ...] = Windowed.apply(
        halo_plan.crop(local) if halo_plan.exchange is None else local, operator
    )
    return results


def _is_small(gradient: Tensor, weight: Tensor) -> bool:
    return gradient.is_cpu and gradient.numel() * weight.numel() <= ONE_CALL * len(weight)


class _Again(NamedTuple):
    """A function of x alone that backward calls again, so that nothing but x is kept: a function of `Windowed`."""

    function: Callable[[Tensor], Tensor]
    reads: Mask = (True, False, False)

    def forward(self, x: Tensor, weight: None, bias: None) -> tuple[tuple[Tensor], tuple[()]]:
        y = self.function(x)
        return (no_view(y, x) if y._is_view() else y,), ()

    def backward(self, gradient: Tensor, x: Tensor, kept: Sequence[Tensor], mask: Mask) -> Gradients:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return *torch.autograd.grad(self.function(x), x, gradient), None, None


def described(
    function: Callable[..., Tensor],
    count: int,
    windows: Callable[..., Sequence[Window | TransposedWindow]],
    each_channel: bool = False,
) -> Callable[..., Tensor]:
    """The rule of a function of PyTorch that looks through windows along the last `count` dims of its input.

    It is called with its own arguments, of which `windows` makes a window for each of these dims: on the rows that this
    rank's part of the output needs, of which the first is where a window begins. `each_channel`: each channel alone.
    """
    name = function_name(function)

    def plan(
        x: SpatialTensor, autocast: Any, args: Any, kwargs: Any
    ) -> tuple[HaloPlan, Callable[[Tensor], Tensor], bool]:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: x):
            y = function(torch.empty(x.shape, device="meta", requires_grad=True), *args, **kwargs)  # raises as PyTorch
        maps = [OfPart(window) for window in windows(*args, **kwargs)]
        halo_plan, _, needed, made = slide(x, maps)
        shape = halo_plan.output.local_shape(y.shape)
        first = [rows.start - each.begins(source.start) for each, source, rows in zip(maps, needed, made, strict=True)]
        crop = tuple((i - count, first[i], rows.length) for i, rows in enumerate(made))

        def of_part(part: Tensor) -> Tensor:
            if 0 in shape:
                return part.new_zeros(shape) * part.sum().to(part.dtype)
            with torch.autocast(*autocast) if autocast else nullcontext():  # in backward too
                return at(function(part, *args, **kwargs), crop)

        return halo_plan, of_part, bool(kept)

    def rule(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = check_image(input, name, count, each_channel)
        if 0 in x.shape[-count:]:
            return function(gather_axes(x, x.layout.grid.axes), *args, **kwargs)
        kind = x.local.device.type
        known = torch.amp.is_autocast_available(kind)
        autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) if known else None
        key = described, function, autocast, args, *kwargs.items(), x.local.shape
        halo_plan, of_part, keeps = x.layout.cached(key, lambda: plan(x, autocast, args, kwargs))
        if keeps:
            return wrap(
                operate(x, x.local, halo_plan, WithHalo(halo_plan.exchange, _Again(of_part)))[0], halo_plan.output
            )
        return wrap(of_part(halo_plan.fetch(x.local)), halo_plan.output)

    return rule


# Columns folded into an image, where each adds its window: the adjoint of unfolding.
#
#     columns    rank 0: a b c     rank 1: d e f       each rank adds up its own windows, in a patch
#     patches    [ a  b  c ]                           that reaches over the border of what it owns;
#                     [ d  e  f ]                      what lies there is sent to its owner, who adds it:
#     image      [ . . . . | . . . . ]                 the adjoint of a halo exchange
#
# What is sent are pixels of the image, and not columns, which are a kernel's size as many.

FixedSize = int | tuple[int, ...]


@register(F.fold, flat=True)
def fold(
    input: SpatialTensor,
    output_size: FixedSize,
    kernel_size: FixedSize,
    dilation: FixedSize = 1,
    padding: FixedSize = 0,
    stride: FixedSize = 1,
) -> Tensor:
    """The sums of all windows, (N, C * kernel, L) -> (N, C, H, W), cut where the windows of each rank are."""
    arguments = output_size, kernel_size, dilation, padding, stride
    F.fold(torch.empty(input.shape, dtype=input.dtype, device="meta"), *arguments)  # raises what PyTorch does
    if input.dim() == 2:
        return F.fold(input.unsqueeze(0), *arguments).squeeze(0)
    size = each(output_size, 2)
    numbers = list(zip(*(each(n, 2) for n in (kernel_size, stride, padding, dilation)), strict=True))
    counts = [Window(k, s, p, p, d).output_size(n) for n, (k, s, p, d) in zip(size, numbers, strict=True)]
    columns = gather_axes(input.unflatten(2, counts), ())  # (N, C * kernel, H', W')
    if not isinstance(columns, SpatialTensor):
        return F.fold(columns.flatten(2), *arguments)
    x = check_image(columns, "torch.nn.functional.fold")
    grid, source = x.layout.grid, x.layout.tiling.narrow
    image = patches = source
    # Of this rank's patch. It holds what of its windows lies in the padding, too, where the exchange leaves it.
    lengths, around = list(size), list(each(padding, 2))
    for i, (axis, (k, s, p, d)) in enumerate(zip(axes_of(x, 2), numbers, strict=True)):
        if axis is None:
            continue
        spare = size[i] - TransposedWindow(k, s, p, 0, d).output_size(counts[i])
        window, split = TransposedWindow(k, s, p, spare, d), source.splits[axis]
        image = image.replace(axis, Split.at(plan_axis(window, split).output.cuts))
        if grid.shape[axis] == 1:
            patches = patches.replace(axis, image.splits[axis])
            continue
        halo_plan = tuple(window.adds_to(split.owned(part)) for part in range(split.parts))
        patches = patches.replace(axis, Split(image.splits[axis].cuts, halo_plan))
        lengths[i], around[i] = halo_plan[grid.coordinates[axis]].length, 0
    y, layout = _summed(owned(x), lengths, numbers, around), Layout(grid, image, x.layout.dims)
    if patches == image:
        return wrap(y, layout)
    halo = layout.exchange_to(patches)

    def add_up(patch: Tensor) -> Tensor:
        total = halo.adjoint.bring(patch)
        return total.clone() if same_memory(total, patch) else total  # autograd would take it for a view

    return wrap(exchange.linear(y, add_up, halo.bring), layout)


def _summed(columns: Tensor, size: Sequence[int], numbers: Sequence[tuple[int, ...]], padding: Sequence[int]) -> Tensor:
    """This rank's patch, from its columns (N, C * kernel, H', W'); PyTorch's own fails where there are none."""
    kernel, stride, _, dilation = zip(*numbers, strict=True)
    if columns.numel() == 0:
        n, channels = columns.shape[:2]
        return (columns.new_zeros(n, channels // prod(kernel), *size) * columns.sum()).to(columns.dtype)
    return F.fold(columns.flatten(2), tuple(size), kernel, dilation, tuple(padding), stride)


# Windows laid out side by side: along one dim as a view of neighbours, or all windows of an image as columns.

Size = int | Sequence[int]


@register(Tensor.unfold)
def unfold_dim(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along one dim, as a new last dim."""
    x = input
    assert isinstance(x, SpatialTensor)
    dim = place_of(dimension, x.dim())
    axis = x.layout.axis(dim)
    if axis is None:
        return wrap(x.local.unfold(dim, size, step), x.layout)
    if axis == BATCH:
        raise refusal("Tensor.unfold", "a batch that is cut cannot be unfolded")
    halo_plan = plan_halo(x, {axis: Window(size, step)})
    local = halo_plan.fetch(x.local)
    if halo_plan.output.held[axis].empty:
        shape = [*local.shape, size]
        shape[dim] = 0
        windows = (local.sum() * local.new_zeros(shape)).to(local.dtype)  # of integers the sum is a wider one
    else:
        windows = local.unfold(dim, size, step)
    if halo_plan.exchange is None and not x.layout.wide:
        return SpatialTensor(windows, halo_plan.output)
    # Of the windows over a pixel of a halo, this rank may not have all: so they are no view of it.
    windows = windows if halo_plan.exchange is not None else windows.clone()
    return copied(SpatialTensor(windows, halo_plan.output), x)


@register(F.unfold)
def unfold(input: Tensor, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1) -> Tensor:
    """All windows as columns, (N, C * kernel, L). L is a flat dim: windows stay with their pixels."""
    x = check_image(input, "torch.nn.functional.unfold")
    if x.dim() == 3:
        return unfold(x.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    (kh, kw), (ph, pw), (sh, sw), (dh, dw) = (each(n, 2) for n in (kernel_size, padding, stride, dilation))
    windows = F.pad(x, (pw, pw, ph, ph)).unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
    windows = windows[..., ::dh, ::dw]  # (N, C, H', W', kh, kw)
    n, c, h, w = windows.shape[:4]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(n, c * kh * kw, h * w)
