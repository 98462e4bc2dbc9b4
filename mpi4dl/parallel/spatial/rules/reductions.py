"""Sums, means, extrema and variances: over the image they are all-reduced, over other dims they are local."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import collectives
from mpi4dl.geometry import AXES, BATCH, COLS, ROWS
from mpi4dl.parallel.spatial.grid import Dims, Layout
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
    part = _owned_along(x, axes)
    y = part.sum(tuple(dims), keepdim=keepdim, dtype=dtype)
    if any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = collectives.all_reduce(y, x.layout.grid.along(axes))
    return wrap(y, reduced_layout(x.layout, dims, keepdim))


def _owned_along(x: SpatialTensor, axes: Sequence[int]) -> Tensor:
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
        count = 1
        for d in dims:
            count *= input.shape[d]
        centre = mean(input, dims, True)
        deviation = input - centre
        square = total(deviation * deviation, dims, keepdim)  # type: ignore[arg-type]
        lost = int(unbiased) if correction is None else correction
        spread = square / max(count - lost, 0)
        if name.startswith("std"):
            spread = spread.sqrt()
        if not name.endswith("mean"):
            return spread
        return spread, centre if keepdim else mean(input, dims, False)

    return rule


for function in named("var", "std", "var_mean", "std_mean"):
    register(function)(_variance(function))


def _extremum(function: Any, maximum: bool) -> Callable[..., Any]:
    op = "max" if maximum else "min"
    select = torch.amax if maximum else torch.amin

    def over(x: SpatialTensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
        """The extremum; its gradient is shared evenly among equals, as PyTorch's amax does."""
        axes = reduced_axes(x.layout, dims)
        if not axes:
            return wrap(select(x.local, dims, keepdim), reduced_layout(x.layout, dims, keepdim))
        comm = x.layout.grid.along(axes)
        part = _owned_along(x, axes)
        with torch.no_grad():
            worst = torch.finfo(part.dtype).min if part.is_floating_point() else torch.iinfo(part.dtype).min
            shape = [1 if d in dims else n for d, n in enumerate(part.shape)]
            empty = any(part.shape[d] == 0 for d in dims)
            best = part.new_full(shape, worst if maximum else -worst) if empty else select(part, dims, keepdim=True)
            best = comm.all_reduce(best.contiguous(), op)
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
        short = name.rsplit(".", 1)[-1]
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
    kthvalue prod any all vector_norm
"""
for function in named(*ALONG_ONE_DIM.split()):
    register(function)(along_dim(function))


@register(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: SpatialTensor, output_size: Any) -> Tensor:
    """Means over bins of rows and columns; the result is small, and every rank has all of its rows and columns."""
    size = _output_size(input, output_size)
    if size == (1, 1):
        return mean(input, (-2, -1), True)
    return _over_bins(input, _bins(input, size))


def _output_size(x: Tensor, asked: Any) -> tuple[int, int]:
    rows, cols = (asked, asked) if isinstance(asked, int) or asked is None else asked
    return x.shape[-2] if rows is None else rows, x.shape[-1] if cols is None else cols


def _bins(x: SpatialTensor, size: tuple[int, int]) -> list[Tensor]:
    """For rows and for columns, the weight (bins, owned) of each owned one in each bin's mean."""
    weights = []
    for axis, dim, count in ((ROWS, -2, size[0]), (COLS, -1, size[1])):
        pixels = x.shape[dim]
        mine = x.layout.owned[axis] if x.layout.dims[axis] is not None else (0, pixels)
        weight = torch.zeros(count, pixels, dtype=x.dtype, device=x.device)
        for i in range(count):
            start, stop = i * pixels // count, -(-(i + 1) * pixels // count)
            weight[i, start:stop] = 1 / (stop - start)
        weights.append(weight[:, mine[0] : mine[1]])
    return weights


def _over_bins(x: SpatialTensor, weights: list[Tensor]) -> Tensor:
    axes = tuple(axis for axis in (ROWS, COLS) if x.layout.dims[axis] is not None)
    y = weights[0] @ _owned_along(x, axes) @ weights[1].mT
    if any(x.layout.grid.shape[axis] > 1 for axis in axes):
        y = collectives.all_reduce(y, x.layout.grid.along(axes))
    dims: Dims = (x.layout.dims[BATCH], None, None)
    return wrap(y, x.layout.with_dims(dims))


@register(*named("adaptive_max_pool2d"))
def adaptive_max_pool2d(input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Tensor:
    """Maxima over bins. Of equal pixels the first in reading order gets the gradient, as in PyTorch."""
    if return_indices:
        raise refusal(
            "torch.nn.functional.adaptive_max_pool2d(return_indices=True)", "indices would count within a tile"
        )
    x = input
    rows, cols = _output_size(x, output_size)
    axes = tuple(axis for axis in (ROWS, COLS) if x.layout.dims[axis] is not None)
    part = _owned_along(x, axes)
    comm = x.layout.grid.along(axes)
    height, width = x.shape[-2], x.shape[-1]
    mine = [
        x.layout.owned[axis] if x.layout.dims[axis] is not None else (0, x.shape[axis - 3]) for axis in (ROWS, COLS)
    ]
    top, left = mine[0][0], mine[1][0]
    results = []
    for i in range(rows):
        for j in range(cols):
            r0, r1 = max(i * height // rows, top), min(-(-(i + 1) * height // rows), mine[0][1])
            c0, c1 = max(j * width // cols, left), min(-(-(j + 1) * width // cols), mine[1][1])
            block = part[..., max(r0 - top, 0) : max(r1 - top, 0), max(c0 - left, 0) : max(c1 - left, 0)]
            results.append(_first_maximum(block, (r0, c0), width, comm))
    y = torch.stack(results, -1).reshape(*x.local.shape[:-2], rows, cols)
    return wrap(y, x.layout.with_dims((x.layout.dims[BATCH], None, None)))


def _first_maximum(block: Tensor, corner: tuple[int, int], width: int, comm: Any) -> Tensor:
    """The maximum over the last two dims of all ranks' blocks, taken from the first pixel that has it."""
    flat = block.flatten(-2)
    none = torch.iinfo(torch.int64).max
    with torch.no_grad():
        if flat.shape[-1]:
            value, at = flat.max(-1)
            row, col = at // block.shape[-1] + corner[0], at % block.shape[-1] + corner[1]
            position = row * width + col
        else:
            value = flat.new_full(flat.shape[:-1], float("-inf"))
            position = torch.full(flat.shape[:-1], none, dtype=torch.int64, device=flat.device)
        best = comm.all_reduce(value.clone(), "max")
        position = torch.where(value == best, position, none)
        winner = comm.all_reduce(position.clone(), "min") == position
    if not flat.shape[-1]:
        return collectives.all_reduce(flat.sum(-1), comm)
    mine = flat.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    return collectives.all_reduce(torch.where(winner, mine, 0), comm)
