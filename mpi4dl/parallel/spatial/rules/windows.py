"""Common parts of sliding windows; fold and unfold.

Windows slide along the last dims of a tensor: one of sequences, two of images, three of volumes.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import exchange
from mpi4dl.comm.exchange import Dims
from mpi4dl.geometry import BATCH, AxisMap, Interval, Split, TransposedWindow, Window, plan_axis
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import HaloPlan, gather_axes, reach
from mpi4dl.parallel.spatial.sums import shared
from mpi4dl.parallel.spatial.tensor import SpatialTensor, copied, owned, place_of, refusal, register, same_memory, wrap


def each(value: Any, count: int) -> tuple[Any, ...]:
    """An argument that PyTorch lets one give once, or for each of so many dims."""
    if not isinstance(value, Sequence):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value[:count])


def hashable(value: Any) -> Any:
    """The same argument, such as a list of numbers, as something that can be looked up by."""
    return tuple(value) if isinstance(value, list) else value


def check_image(x: Tensor, function: str, count: int = 2, each_channel: bool = False) -> SpatialTensor:
    """x, if windows along its last `count` dims are along axes of space, and no other dim is one; refuse it otherwise.

    A batch that is cut is the first dim. An operator on `each_channel` alone also takes channels that ranks share.
    """
    if not isinstance(x, SpatialTensor):
        raise refusal(function, "an argument other than the input is a SpatialTensor")
    layout, first = x.layout, x.dim() - count
    dims = layout.dims[:-1] if each_channel and shared(x, first - 1) else layout.dims
    if not layout.known((check_image, first, each_channel), lambda: _slides(dims, first)):
        raise refusal(
            function, f"it slides along the last {count} dims, but those of {layout.grid.names} are {layout.dims}"
        )
    return x


def _slides(dims: Dims, first: int) -> bool:
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

    A dim that is not cut is the operator's `own`: there it adds its own padding, and nothing is copied. Along others
    the rows `needed` may reach beyond the image. `made` are the rows of the output.
    """

    reached: HaloPlan
    own: tuple[bool, ...]
    needed: tuple[Interval, ...]
    made: tuple[Interval, ...]

    def shape(self, local: Tensor, channels: int | None = None) -> list[int]:
        """The shape of the local output of an operator with these windows over `local`, the part of its input."""
        before = list(local.shape[: -len(self.made)])
        if channels is not None:
            before[-1] = channels
        return [*before, *(rows.length for rows in self.made)]


def slide(x: SpatialTensor, windows: Sequence[AxisMap], fill: float = 0.0) -> Sliding:
    """The reach of windows that slide along the last dims of x."""
    axes, parts = axes_of(x, len(windows)), x.layout.grid.shape
    own = tuple(axis is None or parts[axis] == 1 for axis in axes)
    maps = {axis: window for axis, window in zip(axes, windows, strict=True) if axis is not None}
    uncut = tuple(axis for axis, itself in zip(axes, own, strict=True) if itself and axis is not None)
    reached = reach(x, maps, fill, uncut)
    needed, made = [], []
    for size, axis, itself, window in zip(x.shape[-len(windows) :], axes, own, windows, strict=True):
        needed.append(Interval(0, size) if itself or axis is None else reached.needed[axis])
        made.append(Interval(0, window.output_size(size)) if axis is None else reached.output.held[axis])
    return Sliding(reached, own, tuple(needed), tuple(made))


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
    for at, length in zip(places[1:], size[1:], strict=True):
        found = found * length + at
    return found


def cast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype that autocast wants for convolutions and matrix products; as they are without autocast."""
    kind = next(t for t in tensors if t is not None).device.type
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
        reached = tuple(window.adds_to(split.owned(part)) for part in range(split.parts))
        patches = patches.replace(axis, Split(image.splits[axis].cuts, reached))
        lengths[i], around[i] = reached[grid.coordinates[axis]].length, 0
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
    reached = reach(x, {axis: Window(size, step)})
    local = reached.fetch(x.local)
    if reached.output.held[axis].empty:
        shape = [*local.shape, size]
        shape[dim] = 0
        windows = (local.sum() * local.new_zeros(shape)).to(local.dtype)  # of integers the sum is a wider one
    else:
        windows = local.unfold(dim, size, step)
    if reached.exchange is None and not x.layout.wide:
        return SpatialTensor(windows, reached.output)
    # Of the windows over a pixel of a halo, this rank may not have all: so they are no view of it.
    windows = windows if reached.exchange is not None else windows.clone()
    return copied(SpatialTensor(windows, reached.output), x)


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
