"""Sums, means, extrema and variances: over the image they are all-reduced, over other dims they are local."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Communicator, collectives
from mpi4dl.geometry import AXES
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.rules.pointwise import pointwise
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, named, refusal, register, wrap

DimsArgument = int | Sequence[int] | None


def normalize_dims(x: Tensor, dim: DimsArgument) -> tuple[int, ...]:
    """The dims that a reduction is over, as positive numbers; None and () mean all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    return tuple(sorted(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)))


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool) -> Layout:
    """The layout of what is left: an axis that was reduced is gone from the tensor."""

    def moved(dim: int | None) -> int | None:
        if dim is None or dim in dims:
            return None
        return dim if keepdim else dim - sum(d < dim for d in dims)

    batch, rows, cols = (moved(dim) for dim in layout.dims)
    return layout.with_dims((batch, rows, cols))


def reduced_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in AXES if layout.dims[axis] in dims)


def total(x: SpatialTensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over these dims; over axes of the image, the sum over all ranks' owned pixels."""
    axes = reduced_axes(x.layout, dims)
    part = owned_along(x, axes)
    y = part.sum(tuple(dims), keepdim=keepdim, dtype=dtype)
    if any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = collectives.all_reduce(y, x.layout.grid.along(axes))
    return wrap(y, reduced_layout(x.layout, dims, keepdim))


def owned_along(x: SpatialTensor, axes: Sequence[int]) -> Tensor:
    """x without held halos along these axes."""
    tiling = x.layout.tiling
    for axis in axes:
        tiling = tiling.replace(axis, tiling.splits[axis].narrow())
    return retile(x, tiling).local


@register(*named("sum"))
def sum_(input: SpatialTensor, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(input, normalize_dims(input, dim), keepdim, dtype)


@register(*named("mean"))
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


def _worst(x: Tensor, maximum: bool) -> Any:
    """What every value of x is at least as good as."""
    if x.is_floating_point():
        return float("-inf") if maximum else float("inf")
    if x.dtype == torch.bool:
        return not maximum
    return torch.iinfo(x.dtype).min if maximum else torch.iinfo(x.dtype).max


def agree_on_extremum(best: Tensor, comm: Communicator, op: str) -> Tensor:
    """The best of all ranks; one that is not a number wins, which MPI does not promise."""
    total = comm.all_reduce(best.clone(memory_format=torch.contiguous_format), op)
    if not best.is_floating_point():
        return total
    strange = comm.all_reduce(best.isnan(), "max")
    return torch.where(strange, float("nan"), total)


def _extremum(function: Any, maximum: bool) -> Callable[..., Any]:
    op = "max" if maximum else "min"
    select = torch.amax if maximum else torch.amin

    def over(x: SpatialTensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
        """The extremum; its gradient is shared evenly among equals, as PyTorch's amax does."""
        axes = reduced_axes(x.layout, dims)
        if not axes:
            return wrap(select(x.local, dims, keepdim), reduced_layout(x.layout, dims, keepdim))
        comm = x.layout.grid.along(axes)
        part = owned_along(x, axes)
        with torch.no_grad():
            shape = [1 if d in dims else n for d, n in enumerate(part.shape)]
            empty = any(part.shape[d] == 0 for d in dims)
            best = part.new_full(shape, _worst(part, maximum)) if empty else select(part, dims, keepdim=True)
            best = agree_on_extremum(best, comm, op)
            if not part.is_floating_point():
                y = best if keepdim else best.reshape([n for d, n in enumerate(best.shape) if d not in dims])
                return wrap(y, reduced_layout(x.layout, dims, keepdim))
            chosen = part == best
            ties = comm.all_reduce(chosen.sum(dims, keepdim=True))
        share = torch.where(chosen, part, 0).sum(dims, keepdim=True) / ties
        y = collectives.all_reduce(share, comm).to(part.dtype)
        if not keepdim:
            y = y.reshape([n for d, n in enumerate(y.shape) if d not in dims])
        return wrap(y, reduced_layout(x.layout, dims, keepdim))

    name = function_name(function).rsplit(".", 1)[-1]
    if name.startswith("a"):
        return lambda input, dim=None, keepdim=False: over(input, normalize_dims(input, dim), keepdim)

    def rule(input: SpatialTensor, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return pointwise(function)(input, dim if other is None else other)
        if dim is None:
            return over(input, normalize_dims(input, None), False)
        return along_dim(function)(input, dim, keepdim=keepdim)

    return rule


for function in named("amax", "max"):
    register(function)(_extremum(function, maximum=True))
for function in named("amin", "min"):
    register(function)(_extremum(function, maximum=False))


def along_dim(function: Any) -> Callable[..., Any]:
    """The rule of a function that works along one dim and treats all others alike: local, if that dim is not cut."""
    name = function_name(function)

    def rule(input: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
        short = name.rsplit(".", 1)[-1].removeprefix("linalg_")
        position = DIM_POSITION.get(short, 0)
        dim = kwargs.get("dim", args[position] if len(args) > position else DEFAULT_DIM.get(short))
        if isinstance(dim, list | tuple) and len(dim) == 1:
            dim = dim[0]
        if not isinstance(dim, int):
            dim = None
        if dim is None:
            raise refusal(name, "it works along all dims at once")
        dim %= input.dim()
        if input.layout.cut(dim):
            raise refusal(name, f"dim {dim} is spread over ranks")
        result = function(input.local, *args, **kwargs)

        def place(y: Tensor) -> Tensor:
            removed = y.dim() < input.dim()
            layout = reduced_layout(input.layout, [dim], False) if removed else input.layout
            if not removed and dim in input.layout.dims and y.shape[dim] != input.shape[dim]:
                layout = reduced_layout(input.layout, [dim], True)
            return wrap(y, layout)

        if isinstance(result, Tensor):
            return place(result)
        return type(result)(place(y) for y in result) if type(result) is tuple else type(result)(map(place, result))

    return rule


DIM_POSITION = {"norm": 1, "normalize": 1, "renorm": 1, "topk": 1, "kthvalue": 1, "quantile": 1, "vector_norm": 1}
DEFAULT_DIM = {"normalize": 1, "glu": -1, "topk": -1, "sort": -1, "argsort": -1}
ALONG_ONE_DIM = """
    softmax log_softmax softmin logsumexp argmax argmin cumsum cumprod norm normalize glu topk sort argsort median mode
    kthvalue prod vector_norm
"""
for function in named(*ALONG_ONE_DIM.split()):
    register(function)(along_dim(function))


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
