"""Maxima and minima over the image and where they are, by comparing alone: values are exact, also of equals and NaN.

Of equals, the first in reading order is the one that has a place; where PyTorch shares a gradient among them, it is
shared among those of all ranks. Which pixels are taken is settled without gradients; from then on, taking them is a
linear map, whose adjoint hands the gradient of all ranks' copies to them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, collectives, ordering
from mpi4dl.parallel.spatial.rules.pointwise import pointwise
from mpi4dl.parallel.spatial.rules.reductions import (
    DimsArgument,
    check_reduction,
    normalize_dims,
    owned_along,
    reduced_axes,
    reduced_layout,
)
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register, wrap

NOWHERE = torch.iinfo(torch.int64).max
LOWER = 1 << 31  # places from -LOWER to LOWER - 1 go into half an integer


def worst(x: Tensor, maximum: bool) -> Any:
    """What every value of x is at least as good as."""
    if x.is_floating_point():
        return float("-inf") if maximum else float("inf")
    if x.dtype == torch.bool:
        return not maximum
    return torch.iinfo(x.dtype).min if maximum else torch.iinfo(x.dtype).max


def first_of(
    values: Tensor, places: Tensor, num_places: int, comm: Communicator, maximum: bool = True
) -> tuple[Tensor, Tensor]:
    """The best of all ranks' candidates, and the first place that has it. A rank without candidates is NOWHERE.

    `num_places` is more than the magnitude of any place. One reduction finds both, of numbers of up to 32 bits: what
    orders the values in the upper half of an integer, and in the lower half what orders the places.
    """
    op = "max" if maximum else "min"
    if values.itemsize > 4 or num_places >= LOWER:
        best = comm.all_reduce(values.clone(memory_format=torch.contiguous_format), op)
        equal = (values == best) | (values.isnan() & best.isnan())
        return best, comm.all_reduce(torch.where(equal, places, NOWHERE), "min")
    # 0.0 added makes -0.0 the same number as 0.0, of which the first counts.
    keys = ordering.keys_of(values.float() + 0.0, op) if values.is_floating_point() else values.int()
    upper = (keys if maximum else ~keys).long()
    packed = comm.all_reduce((upper << 32) | (LOWER - 1 - places.clamp(max=LOWER - 1)), "max")
    found = (packed >> 32).int()
    found = found if maximum else ~found
    best = ordering.values_of(found, torch.float32) if values.is_floating_point() else found
    return best.to(values.dtype), LOWER - 1 - (packed & 0xFFFFFFFF)


def take(part: Tensor, chosen: Tensor, hand_out: Callable[..., Tensor], comm: Communicator, *also: Tensor) -> Tensor:
    """`chosen`, which was taken from all ranks' parts; `hand_out` gives its whole gradient to this rank's part.

    It is called with the sum over all ranks of the gradient, and of what is there `also`, of the same shape.
    """

    def adjoint(gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = comm.all_reduce(torch.stack([gradient.to(wide), *(each.to(wide) for each in also)]))
        return hand_out(sums[0].to(gradient.dtype), *sums[1:])

    return collectives.linear(part, lambda _: chosen, adjoint)


def _squeezed(y: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return y if keepdim else y.reshape([n for d, n in enumerate(y.shape) if d not in dims])


def extremum(x: SpatialTensor, dims: tuple[int, ...], keepdim: bool, maximum: bool, overall: bool = False) -> Tensor:
    """The best over these dims. Its gradient is shared evenly among equals: those that are not numbers give each other
    no share, as in `amax`, unless it is the best of a whole tensor, as in `max`.
    """
    axes = reduced_axes(x.layout, dims)
    comm, part = x.layout.grid.along(axes), owned_along(x, axes)
    with torch.no_grad():
        if any(part.shape[d] == 0 for d in dims):
            best = part.new_full([1 if d in dims else n for d, n in enumerate(part.shape)], worst(part, maximum))
        else:
            best = (torch.amax if maximum else torch.amin)(part, dims, keepdim=True)
        best = comm.all_reduce(best.clone(memory_format=torch.contiguous_format), "max" if maximum else "min")
    if not part.requires_grad:
        return wrap(_squeezed(best, dims, keepdim), reduced_layout(x.layout, dims, keepdim))
    with torch.no_grad():
        equal = part == best
        if overall:
            equal = torch.where(best.isnan(), part.isnan(), equal)

    def hand_out(gradient: Tensor, count: Tensor) -> Tensor:
        # In this order 0 / 0 makes the gradient of what is not a number one of what is not a number.
        wide = gradient.to(count.dtype)  # in 16 bits many equals would be too many to count
        shares = torch.where(equal, wide / count, 0) if overall else wide * equal / count
        return shares.to(gradient.dtype)

    y = take(part, best, hand_out, comm, equal.sum(dims, keepdim=True))
    return wrap(_squeezed(y, dims, keepdim), reduced_layout(x.layout, dims, keepdim))


def first_along(x: SpatialTensor, dim: int, keepdim: bool, maximum: bool) -> tuple[Tensor, Tensor]:
    """The best along one dim and its index, of equals the first; the gradient goes to that one."""
    axes = reduced_axes(x.layout, [dim])
    comm, part = x.layout.grid.along(axes), owned_along(x, axes)
    start, length = (x.layout.owned[axes[0]].start if axes else 0), part.shape[dim]
    with torch.no_grad():
        if length:
            values, places = (torch.max if maximum else torch.min)(part, dim, keepdim=True)
        else:
            shape = [1 if d == dim else n for d, n in enumerate(part.shape)]
            values, places = part.new_full(shape, worst(part, maximum)), part.new_full(shape, 0, dtype=torch.int64)
        best, first = first_of(values, places + start if length else places + NOWHERE, x.shape[dim], comm, maximum)

    def hand_out(gradient: Tensor) -> Tensor:
        mine = (first >= start) & (first < start + length)
        given = part.new_zeros(part.shape)
        return given.scatter_(dim, (first - start).where(mine, 0), gradient.where(mine, 0)) if length else given

    layout = reduced_layout(x.layout, [dim], keepdim)
    y = take(part, best, hand_out, comm)
    return wrap(_squeezed(y, [dim], keepdim), layout), wrap(_squeezed(first, [dim], keepdim), layout)


def _first_of_all(x: SpatialTensor, maximum: bool) -> Tensor:
    """The index of the best pixel in the flattened whole; of equals the first."""
    part, comm = owned_along(x, x.layout.grid.axes), x.layout.grid.along(reduced_axes(x.layout, range(x.dim())))
    with torch.no_grad():
        value, place = part.new_full((), worst(part, maximum)), torch.tensor(NOWHERE, device=part.device)
        if part.numel():
            found = part.argmax() if maximum else part.argmin()
            value, place = part.flatten()[found], torch.zeros_like(found)
            for dim, index in enumerate(torch.unravel_index(found, part.shape)):
                axis = x.layout.axis(dim)
                place = place * x.shape[dim] + index + (0 if axis is None else x.layout.owned[axis].start)
        return first_of(value, place, x.numel(), comm, maximum)[1]


def _over_dims(function: Any, maximum: bool) -> Callable[..., Any]:
    def rule(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False) -> Tensor:
        check_reduction(function, input, () if dim is None else dim, keepdim)
        return extremum(input, normalize_dims(input, dim), keepdim, maximum)

    return rule


def _of_all_along_or_of_two(function: Any, maximum: bool) -> Callable[..., Any]:
    kind = torch.return_types.max if maximum else torch.return_types.min

    def rule(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return pointwise(function)(input, dim if other is None else other)
        assert isinstance(input, SpatialTensor)
        if dim is None:
            check_reduction(function, input)
            return extremum(input, normalize_dims(input, None), False, maximum, overall=True)
        check_reduction(function, input, dim, keepdim)
        return kind(first_along(input, dim % input.dim(), keepdim, maximum))

    return rule


def _place(function: Any, maximum: bool) -> Callable[..., Any]:
    def rule(input: SpatialTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        check_reduction(function, input, dim, keepdim)
        if dim is not None:
            with torch.no_grad():
                return first_along(input, dim % input.dim(), keepdim, maximum)[1]
        place = _first_of_all(input, maximum)
        return place.view([1] * input.dim()) if keepdim else place

    return rule


for maximum, name in ((True, "max"), (False, "min")):
    for function in named(f"a{name}"):
        register(function)(_over_dims(function, maximum))
    for function in named(name):
        register(function)(_of_all_along_or_of_two(function, maximum))
    for function in named(f"arg{name}"):
        register(function)(_place(function, maximum))


@register(*named("aminmax"))
def aminmax(input: SpatialTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    check_reduction(torch.aminmax, input, dim=dim, keepdim=keepdim)
    both = partial(extremum, input, normalize_dims(input, dim), keepdim)
    return torch.return_types.aminmax((both(False), both(True)))
