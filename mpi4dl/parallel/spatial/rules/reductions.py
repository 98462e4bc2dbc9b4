"""Sums, means, variances and the like: over the image they are all-reduced, over other dims they are local."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import collectives
from mpi4dl.parallel.spatial.flattening import between_copies
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, named, place_of, register, wrap

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

    return layout.moved(moved)


def check_reduction(function: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> None:
    """Raise what PyTorch raises for these arguments, as of an extremum of nothing."""
    function(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args, **kwargs)


def reduced_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, dim in enumerate(layout.dims) if dim in dims)


def total(
    x: SpatialTensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None, add: Any = torch.sum
) -> Tensor:
    """The sum over these dims, by `add`; over axes of the image, the sum over all ranks' owned pixels.

    Where several ranks add up, 16 bits neither overflow nor are rounded in between: PyTorch adds in float32 too.
    """
    axes = reduced_axes(x.layout, dims)
    part = owned_along(x, axes)
    for flat in x.layout.flat:
        if flat.dim in dims and not x.layout.first_along(flat):  # what every rank has is counted by one
            part = between_copies(part, flat)
    if not any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = add(part, tuple(dims), keepdim=keepdim, dtype=dtype)
    else:
        kind = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
        wide = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
        y = add(part, tuple(dims), keepdim=keepdim, dtype=wide)
        y = collectives.all_reduce(y, x.layout.grid.along(axes)).to(kind)
    return wrap(y, reduced_layout(x.layout, dims, keepdim))


def owned_along(x: SpatialTensor, axes: Sequence[int]) -> Tensor:
    """x without held halos along these axes."""
    tiling = x.layout.tiling
    for axis in axes:
        tiling = tiling.replace(axis, tiling.splits[axis].narrow())
    return retile(x, tiling).local


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
    count = 1
    for d in dims:
        count *= input.shape[d]
    return (total(input, dims, keepdim, wider) / count).to(dtype)


@register(Tensor.sum_to_size)
def sum_to_size(input: SpatialTensor, *size: Any) -> Tensor:
    """The sum over the dims along which a tensor of that size broadcasts."""
    wanted = torch.Size(size if len(size) != 1 or isinstance(size[0], int) else size[0])
    check_reduction(Tensor.sum_to_size, input, wanted)
    new = input.dim() - len(wanted)
    summed = [d for d, n in enumerate(input.shape) if d < new or (wanted[d - new] == 1 and n != 1)]
    return total(input, summed, True).squeeze(tuple(range(new))) if summed else input


@register(*named("nansum"))
def nansum(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(input, normalize_dims(input, dim), keepdim, dtype, torch.nansum)


@register(*named("nanmean"))
def nanmean(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return nansum(input, dim, keepdim, dtype=dtype) / sum_(~input.isnan(), dim, keepdim)  # type: ignore[arg-type]


@register(*named("count_nonzero"))
def count_nonzero(input: SpatialTensor, dim: DimsArgument = None) -> Tensor:
    return sum_(input != 0, dim)  # type: ignore[arg-type]


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
        count = 1
        for d in dims:
            count *= input.shape[d]
        centre = mean(input, dims, True)
        deviation = input - centre
        square = total(deviation * deviation, dims, keepdim)  # type: ignore[arg-type]
        spread = square / max(count - lost, 0)
        if name.startswith("std"):
            constant = spread == 0  # where the square root has no derivative, PyTorch says 0
            spread = torch.where(constant, 0, torch.where(constant, 1, spread).sqrt())
        if not name.endswith("mean"):
            return spread.to(dtype)
        return spread.to(dtype), (centre if keepdim else mean(input, dims, False)).to(dtype)

    return rule


for function in named("var", "std", "var_mean", "std_mean"):
    register(function)(_variance(function))


def _truth(function: Any, op: str) -> Callable[..., Any]:
    """`any` and `all`."""

    def rule(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False) -> Tensor:
        dims = normalize_dims(input, dim)
        axes = reduced_axes(input.layout, dims)
        local = function(owned_along(input, axes), dims, keepdim)
        return wrap(input.layout.grid.along(axes).all_reduce(local, op), reduced_layout(input.layout, dims, keepdim))

    return rule


for function in named("any"):
    register(function)(_truth(torch.any, "max"))
for function in named("all"):
    register(function)(_truth(torch.all, "min"))
