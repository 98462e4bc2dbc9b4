"""Sums, means and variances; vector norms; maxima and minima with their places; counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, communicator, exchange
from mpi4dl.geometry import Tiling
from mpi4dl.parallel.spatial.flattening import between_copies
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes, retile
from mpi4dl.parallel.spatial.rules.pointwise import pointwise
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, named, place_of, refusal, register, wrap

DimsArgument = int | Sequence[int] | None


def normalize_dims(x: Tensor, dim: DimsArgument) -> tuple[int, ...]:
    """The dims that a reduction is over, as positive numbers; None and () mean all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    dims = sorted(place_of(d, x.dim()) for d in ([dim] if isinstance(dim, int) else dim))
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"a dim appears more than once in dim={dim}")
    return tuple(dims)


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    """The layout of what is left: an axis that was reduced is gone from the tensor."""

    def moved(dim: int) -> int | None:
        if dim in dims:
            return None
        return dim if keepdim else dim - sum(d < dim for d in dims)

    return layout.cached((reduced_layout, tuple(dims), keepdim), lambda: layout.moved(moved))


def whole_along(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x; with its flat dims gathered, if one of them is among `dims`."""
    if not isinstance(x, SpatialTensor) or not any(flat.dim in dims for flat in x.layout.flat):
        return x
    return gather_axes(x, ())


def register_beside_flat(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the rule of functions along the dims that their second argument names.

    It gets tensors with flat dims, such as the rows (N * T, classes) of all tokens, unless it works along one of them:
    then these are gathered.
    """

    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            register(function, flat=True)(_beside_flat(function, rule))
        return rule

    return add


def _beside_flat(function: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(rule)
    def beside(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, SpatialTensor) and input.layout.flat:
            dim = kwargs.get("dim", args[0] if args else None)
            whole: Tensor = input
            if not isinstance(dim, Tensor) and kwargs.get("other") is None:  # those of two tensors have no dim
                whole = whole_along(input, normalize_dims(input, dim))
            if whole is not input:
                return function(whole, *args, **kwargs)
        return rule(input, *args, **kwargs)

    return beside


def check_reduction(function: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> None:
    """Raise what PyTorch raises for these arguments, as of an extremum of nothing."""
    # Of a few pixels: for a reduction of a meta tensor PyTorch imports sympy, which takes a second.
    few, dtype = tuple(min(n, 2) for n in x.shape), x.dtype
    key = check_reduction, function, few, dtype, args, tuple(kwargs.items())
    x.layout.cached(key, lambda: function(torch.zeros(few, dtype=dtype), *args, **kwargs))


def total(
    x: SpatialTensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None, add: Any = torch.sum
) -> Tensor:
    """The sum over these dims, by `add`; over axes of the image, the sum over all ranks' owned pixels.

    Where several ranks add up, 16 bits neither overflow nor are rounded in between: PyTorch adds in float32 too.
    """
    axes = x.layout.axes_at(dims)
    part = owned_along(x, axes)
    for flat in x.layout.flat:
        if flat.dim in dims and not x.layout.first_along(flat):  # what every rank has is counted by one
            part = between_copies(part, flat)
    if not any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = add(part, tuple(dims), keepdim=keepdim, dtype=dtype)
    else:
        kind = dtype or _dtype_of(x, add is torch.sum)
        wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
        y = add(part, tuple(dims), keepdim=keepdim, dtype=wide)
        y = exchange.all_reduce(y, x.layout.grid.along(axes)).to(kind)
    return wrap(y, reduced_layout(x.layout, dims, keepdim))


def _dtype_of(x: Tensor, plain: bool) -> torch.dtype:
    """The dtype of a sum of such numbers: of a plain one of 16 bits, CUDA's autocast makes float32."""
    kind = x.device.type
    if plain and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.sum(torch.ones(1, dtype=x.dtype, device=x.device), 0).dtype
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def owned_along(x: SpatialTensor, axes: Sequence[int]) -> Tensor:
    """x without held halos along these axes."""
    layout = x.layout

    def tiling() -> Tiling:
        splits = enumerate(layout.tiling.splits)
        return Tiling(tuple(split.narrow() if axis in axes else split for axis, split in splits))

    return retile(x, layout.cached((owned_along, tuple(axes)), tiling)).local


@register(*named("sum"), flat=True)
def sum_(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(input, normalize_dims(input, dim), keepdim, dtype)


@register(*named("mean"), flat=True)
def mean(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = normalize_dims(input, dim)
    dtype = dtype or input.dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        raise RuntimeError(f"mean(): the dtype should be floating point or complex, but is {dtype}")
    # Sums of low precision overflow and lose digits; they are taken in float32, as PyTorch's own mean does.
    wider = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (total(input, dims, keepdim, wider) / prod(map(input.shape.__getitem__, dims))).to(dtype)


@register(Tensor.sum_to_size, flat=True)
def sum_to_size(input: SpatialTensor, *size: Any) -> Tensor:
    """The sum over the dims along which a tensor of that size broadcasts."""
    wanted = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
    torch.empty(input.shape, device="meta").sum_to_size(wanted)  # raises what PyTorch does
    new = input.dim() - len(wanted)
    summed = [d for d, n in enumerate(input.shape) if d < new or (wanted[d - new] == 1 and n != 1)]
    return total(input, summed, True).squeeze(tuple(range(new))) if summed else input


@register(*named("nansum"), flat=True)
def nansum(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(input, normalize_dims(input, dim), keepdim, dtype, torch.nansum)


def _variance(function: Any) -> Callable[..., Any]:
    name = function_name(function).rsplit(".", 1)[-1]

    def rule(
        input: SpatialTensor,
        dim: DimsArgument | bool = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: int | None = None,
    ) -> Any:
        if isinstance(dim, bool):
            unbiased = dim
        dims = normalize_dims(input, None if isinstance(dim, bool) else dim)
        lost = int(unbiased) if correction is None else correction
        if input.local.numel() and not any(input.layout.cut(d) for d in dims):
            layout = reduced_layout(input.layout, dims, keepdim)
            own = function(input.local, dims, correction=lost, keepdim=keepdim)
            return tuple(wrap(y, layout) for y in own) if isinstance(own, tuple) else wrap(own, layout)
        dtype = input.dtype
        if input.itemsize < 4:
            input = SpatialTensor(input.local.float(), input.layout)
        centre = mean(input, dims, True)
        deviation = input - centre
        square = total(deviation * deviation, dims, keepdim)  # type: ignore[arg-type]
        spread = square / max(prod(map(input.shape.__getitem__, dims)) - lost, 0)
        if name.startswith("std"):
            constant = spread == 0  # where the square root has no derivative, PyTorch says 0
            spread = torch.where(constant, 0, torch.where(constant, 1, spread).sqrt())
        if not name.endswith("mean"):
            return spread.to(dtype)
        return spread.to(dtype), (centre if keepdim else mean(input, dims, False)).to(dtype)

    return rule


for function in named("var", "std", "var_mean", "std_mean"):
    register(function, flat=True)(_variance(function))


def _truth(function: Any, op: str) -> Callable[..., Any]:
    """`any` and `all`."""

    def rule(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False) -> Tensor:
        dims = normalize_dims(input, dim)
        axes = input.layout.axes_at(dims)
        local = function(owned_along(input, axes), dims, keepdim)
        return wrap(input.layout.grid.along(axes).all_reduce(local, op), reduced_layout(input.layout, dims, keepdim))

    return rule


register(*named("any"), flat=True)(_truth(torch.any, "max"))
register(*named("all"), flat=True)(_truth(torch.all, "min"))

# Vector norms over any dims, and what is made of them: normalized vectors, cosines, distances.
#
# A norm over parts is the norm of the parts' norms, which are gathered: each step is PyTorch's own, derivatives
# included.


def of_all_parts(x: SpatialTensor, dims: Sequence[int], result: Tensor) -> Tensor:
    """The results of the parts, on all ranks: along each reduced axis one entry for every part that has any pixels.

    `result` is this rank's, with one entry along each of `dims`.
    """
    axes, layout = x.layout.axes_at(dims), x.layout
    tiling = layout.tiling
    for axis in axes:
        tiling = tiling.drop(axis)
    every: Tensor = gather_axes(SpatialTensor(result, replace(layout, tiling=tiling)), axes)
    for axis in axes:
        split, dim = layout.tiling.splits[axis], layout.dims[axis]
        used = [part for part in range(split.parts) if not split.owned(part).empty]
        if len(used) < split.parts:
            assert dim is not None
            every = every.index_select(dim, torch.tensor(used, dtype=torch.int64, device=every.device))
    return every


def _own_part(x: SpatialTensor, dims: Sequence[int]) -> Tensor:
    """This rank's part along these dims; one pixel that counts nowhere, but hangs on the graph, if it has none."""
    part = owned_along(x, x.layout.axes_at(dims))
    if all(part.shape[dim] for dim in dims):
        return part
    if part.is_floating_point():
        return part.sum(tuple(dims), keepdim=True)
    return part.new_zeros([1 if dim in dims else n for dim, n in enumerate(part.shape)])


@register(torch.linalg.vector_norm, flat=True)
def vector_norm(
    x: Tensor, ord: Any = 2, dim: DimsArgument = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(sum of |x|^p)^(1/p) over these dims, with PyTorch's derivatives where x is zero and where maxima are equal."""
    dims = normalize_dims(x, dim)
    if not isinstance(x, SpatialTensor):
        return torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype)
    if not any(x.layout.cut(d) for d in dims):
        y = torch.linalg.vector_norm(x.local, ord, dims, keepdim, dtype=dtype)
        return wrap(y, reduced_layout(x.layout, dims, keepdim))
    if x.layout.flat:
        return vector_norm(gather_axes(x, ()), ord, dim, keepdim, dtype=dtype)
    if ord in (torch.inf, -torch.inf):
        values = x.abs() if dtype is None else x.abs().to(dtype)
        return values.amax(dims, keepdim) if ord > 0 else values.amin(dims, keepdim)
    x = in_plain_dtype(x, torch.linalg.vector_norm)
    result = dtype or x.dtype
    wider = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    own = torch.linalg.vector_norm(_own_part(x, dims), ord, dims, True, dtype=wider)
    every = of_all_parts(x, dims, own)
    return vector_norm(every, ord or 1, dims, keepdim).to(result)  # of order 0 are counts, which add up


@register(torch.norm, Tensor.norm, flat=True)
def norm(input: Tensor, p: Any = "fro", dim: DimsArgument = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    if p == "nuc":
        raise refusal("torch.norm", f"{p=}")
    return vector_norm(input, 2 if p in ("fro", None) else float(p), dim, keepdim, dtype=dtype)


@register(torch.linalg.norm, flat=True)
def linalg_norm(
    A: Tensor, ord: Any = None, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    dims = normalize_dims(A, dim)
    matrix = ord is not None and len(dims) == 2 and not isinstance(dim, int)
    if isinstance(ord, str) and ord != "fro":
        raise refusal("torch.linalg.norm", f"ord={ord!r}")
    if matrix and ord != "fro":
        raise refusal("torch.linalg.norm", "it is the norm of a matrix")
    return vector_norm(A, 2 if ord in (None, "fro") else ord, dims, keepdim, dtype=dtype)


@register(*named("cosine_similarity"), flat=True)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The lengths count as at least eps, which their derivatives do not see."""
    ndim = max(x1.dim(), x2.dim())
    dim = place_of(dim, ndim)
    x1, x2 = (x.reshape([1] * (ndim - x.dim()) + list(x.shape)) if x.dim() < ndim else x for x in (x1, x2))
    count = max(x1.shape[dim], x2.shape[dim])

    def direction(x: Tensor) -> Tensor:
        length = vector_norm(x, 2, dim, True)
        if x.shape[dim] != count:  # it broadcasts before its length is taken
            length = length * count**0.5
        return x / (length + (length.detach().clamp_min(eps) - length.detach()))

    return (direction(x1) * direction(x2)).sum(dim)


# Maxima and minima over the image and where they are, by comparing alone: values are exact, also of equals and NaN.
#
# Of equals, the first in reading order is the one that has a place; where PyTorch shares a gradient among them, it is
# shared among those of all ranks. Which pixels are taken is settled without gradients; from then on, taking them is a
# linear map, whose adjoint hands the gradient of all ranks' copies to them.

NOWHERE = torch.iinfo(torch.int64).max
LOWER = 1 << 31  # places from -LOWER to LOWER - 1 go into half an integer


def worst(x: Tensor, maximum: bool) -> Any:
    """The worst value: every value of x is at least as good."""
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
    keys = communicator.order_keys_of(values.float() + 0.0, op) if values.is_floating_point() else values.int()
    upper = (keys if maximum else ~keys).long()
    packed = comm.all_reduce((upper << 32) | (LOWER - 1 - places.clamp(max=LOWER - 1)), "max")
    found = (packed >> 32).int()
    found = found if maximum else ~found
    best = communicator.values_of_order_keys(found, torch.float32) if values.is_floating_point() else found
    return best.to(values.dtype), LOWER - 1 - (packed & 0xFFFFFFFF)


def take(part: Tensor, chosen: Tensor, hand_out: Callable[..., Tensor], comm: Communicator, *also: Tensor) -> Tensor:
    """`chosen`, which was taken from all ranks' parts; `hand_out` gives its whole gradient to this rank's part.

    It is called with the sum over all ranks of the gradient, and of what is there `also`, of the same shape.
    """

    def adjoint(gradient: Tensor) -> Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = comm.all_reduce(torch.stack([gradient.to(wide), *(each.to(wide) for each in also)]))
        return hand_out(sums[0].to(gradient.dtype), *sums[1:])

    return exchange.linear(part, lambda _: chosen, adjoint)


def left_of(x: SpatialTensor, y: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """y, which has one entry along each of the reduced dims of x, as what is left of x."""
    y = y if keepdim else y.reshape([n for d, n in enumerate(y.shape) if d not in dims])
    return wrap(y, reduced_layout(x.layout, dims, keepdim))


def extremum(x: SpatialTensor, dims: tuple[int, ...], keepdim: bool, maximum: bool, overall: bool = False) -> Tensor:
    """The best over these dims. Its gradient is shared evenly among equals: those that are not numbers give each other
    no share, as in `amax`, unless it is the best of a whole tensor, as in `max`.
    """
    axes = x.layout.axes_at(dims)
    comm, part = x.layout.grid.along(axes), owned_along(x, axes)
    with torch.no_grad():
        if any(part.shape[d] == 0 for d in dims):
            best = part.new_full([1 if d in dims else n for d, n in enumerate(part.shape)], worst(part, maximum))
        else:
            best = (torch.amax if maximum else torch.amin)(part, dims, keepdim=True)
        best = comm.all_reduce(best.clone(memory_format=torch.contiguous_format), "max" if maximum else "min")
    if not part.requires_grad:
        return left_of(x, best, dims, keepdim)
    with torch.no_grad():
        equal = part == best
        if overall:
            equal = torch.where(best.isnan(), part.isnan(), equal)

    def hand_out(gradient: Tensor, count: Tensor) -> Tensor:
        # In this order 0 / 0 makes the gradient of what is not a number one of what is not a number.
        wide = gradient.to(count.dtype)  # in 16 bits many equals would be too many to count
        shares = torch.where(equal, wide / count, 0) if overall else wide * equal / count
        return shares.to(gradient.dtype)

    return left_of(x, take(part, best, hand_out, comm, equal.sum(dims, keepdim=True)), dims, keepdim)


def first_along(x: SpatialTensor, dim: int, keepdim: bool, maximum: bool) -> tuple[Tensor, Tensor]:
    """The best along one dim and its index, of equals the first; the gradient goes to that one."""
    axes = x.layout.axes_at([dim])
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

    y = take(part, best, hand_out, comm)
    return left_of(x, y, [dim], keepdim), left_of(x, first, [dim], keepdim)


def _first_of_all(x: SpatialTensor, maximum: bool) -> Tensor:
    """The index of the best pixel in the flattened whole; of equals the first."""
    part, comm = owned_along(x, x.layout.grid.axes), x.layout.grid.along(x.layout.axes_at(range(x.dim())))
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
        register_beside_flat(function)(_over_dims(function, maximum))
    for function in named(name):
        register_beside_flat(function)(_of_all_along_or_of_two(function, maximum))
    for function in named(f"arg{name}"):
        register_beside_flat(function)(_place(function, maximum))


@register_beside_flat(*named("aminmax"))
def aminmax(input: SpatialTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    check_reduction(torch.aminmax, input, dim=dim, keepdim=keepdim)
    both = partial(extremum, input, normalize_dims(input, dim), keepdim)
    return torch.return_types.aminmax((both(False), both(True)))


# Counts of values, such as the loads of experts: each rank counts its own pixels, and counts are added up.


@register(*named("histc"), flat=True)
def histc(input: SpatialTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    if min == max and input.numel():  # between the extrema of all ranks
        min, max = (float(gather(end)) for end in torch.aminmax(input))
    return total(input, range(input.dim()), False, add=lambda part, *_, **__: torch.histc(part, bins, min, max))


@register(*named("bincount"), flat=True)
def bincount(input: SpatialTensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if input.dim() != 1 or weights is not None or not input.numel():
        return torch.bincount(gather(input), weights if weights is None else gather(weights), minlength)
    length = max(minlength, 1 + int(gather(input.max())))
    return total(input, (0,), False, add=lambda part, *_, **__: torch.bincount(part, minlength=length))
