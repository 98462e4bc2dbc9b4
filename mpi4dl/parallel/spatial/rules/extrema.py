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

from mpi4dl.comm import Communicator, collectives
from mpi4dl.geometry import AXES
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


def worst(x: Tensor, maximum: bool) -> Any:
    """What every value of x is at least as good as."""
    if x.is_floating_point():
        return float("-inf") if maximum else float("inf")
    if x.dtype == torch.bool:
        return not maximum
    return torch.iinfo(x.dtype).min if maximum else torch.iinfo(x.dtype).max


def agree_on_extremum(best: Tensor, comm: Communicator, maximum: bool) -> Tensor:
    """The best of all ranks; one that is not a number wins, which MPI does not promise."""
    total = comm.all_reduce(best.clone(memory_format=torch.contiguous_format), "max" if maximum else "min")
    if not best.is_floating_point():
        return total
    strange = comm.all_reduce(best.isnan(), "max")
    return torch.where(strange, float("nan"), total)


def first_of(values: Tensor, places: Tensor, comm: Communicator, maximum: bool = True) -> tuple[Tensor, Tensor]:
    """The best of all ranks' candidates, and the first place that has it. A rank without candidates is NOWHERE."""
    best = agree_on_extremum(values, comm, maximum)
    equal = (values == best) | (values.isnan() & best.isnan())
    return best, comm.all_reduce(torch.where(equal, places, NOWHERE), "min")


def take(part: Tensor, chosen: Tensor, hand_out: Callable[[Tensor], Tensor], comm: Communicator) -> Tensor:
    """`chosen`, which was taken from all ranks' parts; `hand_out` gives its whole gradient to this rank's part."""
    return collectives.linear(part, lambda _: chosen, lambda g: hand_out(comm.all_reduce(g.contiguous().clone())))


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
        best = agree_on_extremum(best, comm, maximum)
    if not part.requires_grad:
        return wrap(_squeezed(best, dims, keepdim), reduced_layout(x.layout, dims, keepdim))
    with torch.no_grad():
        equal = part == best
        if overall:
            equal = torch.where(best.isnan(), part.isnan(), equal)
        count = comm.all_reduce(equal.sum(dims, keepdim=True))

    def hand_out(gradient: Tensor) -> Tensor:
        # In this order 0 / 0 makes the gradient of what is not a number one of what is not a number.
        return torch.where(equal, gradient / count, 0) if overall else gradient * equal / count

    y = take(part, best, hand_out, comm)
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
        best, first = first_of(values, places + start if length else places + NOWHERE, comm, maximum)

    def hand_out(gradient: Tensor) -> Tensor:
        mine = (first >= start) & (first < start + length)
        given = part.new_zeros(part.shape)
        return given.scatter_(dim, (first - start).where(mine, 0), gradient.where(mine, 0)) if length else given

    layout = reduced_layout(x.layout, [dim], keepdim)
    y = take(part, best, hand_out, comm)
    return wrap(_squeezed(y, [dim], keepdim), layout), wrap(_squeezed(first, [dim], keepdim), layout)


def _first_of_all(x: SpatialTensor, maximum: bool) -> Tensor:
    """The index of the best pixel in the flattened whole; of equals the first."""
    part, comm = owned_along(x, AXES), x.layout.grid.along(reduced_axes(x.layout, range(x.dim())))
    with torch.no_grad():
        value, place = part.new_full((), worst(part, maximum)), torch.tensor(NOWHERE, device=part.device)
        if part.numel():
            found = part.argmax() if maximum else part.argmin()
            value, place = part.flatten()[found], torch.zeros_like(found)
            for dim, index in enumerate(torch.unravel_index(found, part.shape)):
                axis = x.layout.axis(dim)
                place = place * x.shape[dim] + index + (0 if axis is None else x.layout.owned[axis].start)
        return first_of(value, place, comm, maximum)[1]


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
