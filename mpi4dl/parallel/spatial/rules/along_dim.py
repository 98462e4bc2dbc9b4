"""Functions that work along one dim and treat all others alike: local, where ranks do not share that dim.

Where they do, softmax and its like are made of sums and maxima over ranks, products of the ranks' products. An order of
pixels (sort, topk, median) cannot be had by parts: for it the dim is gathered, and what keeps the dim is cut again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import exchange
from mpi4dl.parallel.spatial.alignment import part
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes, gather_dim
from mpi4dl.parallel.spatial.rules.pointwise import shift
from mpi4dl.parallel.spatial.rules.reductions import (
    DimsArgument,
    check_reduction,
    extremum,
    left_of,
    normalize_dims,
    of_all_parts,
    owned_along,
    reduced_layout,
    register_beside_flat,
    total,
)
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    function_name,
    local_part,
    named,
    place_of,
    refusal,
    register,
    wrap,
)

Shared = Callable[..., Any]

# Where `dim` stands among the arguments behind the input, and what it is if it is not given.
DIM_POSITION = {"topk": 1, "kthvalue": 1}
DEFAULT_DIM = {**dict.fromkeys(("glu", "topk", "sort", "argsort", "mode", "kthvalue"), -1), "msort": 0}


def along_dim(function: Any, shared: Shared | None = None, of_flat: bool = False) -> Callable[..., Any]:
    """The rule of a function along one dim. Where ranks share that dim, or it works along all dims at once, `shared` is
    called with the dim (or None) and the function's own arguments; without it that is refused.

    With `of_flat` that may be a dim that several axes became; without it such a dim is gathered.
    """
    name = function_name(function)
    short = name.rsplit(".", 1)[-1].removeprefix("linalg_")

    def rule(input: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
        position = DIM_POSITION.get(short, 0)
        dim = kwargs.get("dim", args[position] if len(args) > position else DEFAULT_DIM.get(short))
        found = [f for f in input.layout.flat if not isinstance(dim, int) or place_of(dim, input.dim()) == f.dim]
        if found and not (of_flat and isinstance(dim, int)):
            return function(gather_axes(input, ()), *args, **kwargs)
        if isinstance(dim, list | tuple) and len(dim) == 1:
            dim = dim[0]
        if isinstance(dim, bool) or not isinstance(dim, int):
            if shared is not None:
                return shared(input, dim, *args, **kwargs)
            raise refusal(name, "it works along all dims at once")
        dim = place_of(dim, input.dim())
        if input.layout.cut(dim):
            if shared is not None:
                return shared(input, dim, *args, **kwargs)
            raise refusal(name, f"dim {dim} is spread over ranks")
        return _apply(function, input, dim, *args, **kwargs)

    return rule


def _apply(function: Any, x: Tensor, dim: int, /, *args: Any, **kwargs: Any) -> Any:
    """The function of this rank's part, along a dim that it has whole, in its place in the whole."""
    if not isinstance(x, SpatialTensor):
        return function(x, *args, **kwargs)
    result = function(_with_pixels(x), *args, **kwargs)

    def place(y: Tensor) -> Tensor:
        removed = y.dim() < x.dim()
        layout = reduced_layout(x.layout, [dim], False) if removed else x.layout
        if not removed and dim in x.layout.dims and y.shape[dim] != x.shape[dim]:
            layout = reduced_layout(x.layout, [dim], True)
        return wrap_some(y, layout)

    return place(result) if isinstance(result, Tensor) else type(result)([place(y) for y in result])


def _with_pixels(x: SpatialTensor) -> Tensor:
    """This rank's part, with a pixel where it has none: many functions refuse what is empty. See `wrap_some`."""
    local = x.local
    for axis, dim in enumerate(x.layout.dims):
        if dim is not None and x.layout.held[axis].empty and x.shape[dim] and x.layout.flat_at(dim) is None:
            local = torch.cat([local, local.new_ones([1 if d == dim else n for d, n in enumerate(local.shape)])], dim)
    return local


def wrap_some(y: Tensor, layout: Layout) -> Tensor:
    """y as this rank's part, without the pixels that are not there."""
    for axis, dim in enumerate(layout.dims):
        if dim is not None and layout.held[axis].empty and layout.flat_at(dim) is None:
            y = y.narrow(dim, 0, 0)
    return wrap(y, layout)


for function in named("glu"):
    register(function, flat=True)(along_dim(function))


def _by_order(function: Any) -> Shared:
    """An order of pixels: the dim is gathered; a result of as many pixels is cut again."""

    def shared(x: SpatialTensor, dim: int | None, /, *args: Any, **kwargs: Any) -> Any:
        if dim is None:
            return function(gather(x), *args, **kwargs)
        whole = gather_dim(x, dim)
        results = _apply(function, whole, dim, *args, **kwargs)
        if isinstance(results, Tensor):
            return _cut_again(results, x, dim)
        if x.is_cuda:
            results = type(results)(_agreed(whole, dim, results[1], x.layout))
        return type(results)([_cut_again(y, x, dim) for y in results])

    return shared


def _agreed(whole: Tensor, dim: int, places: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Values along `dim` and their places, by one of the ranks that have all of them.

    Which of equal values CUDA's kernels name is chance, and differs from rank to rank.
    """
    chosen = places.local if isinstance(places, SpatialTensor) else places
    chosen.copy_(layout.grid.along(layout.axes_at([dim])).broadcast(chosen.contiguous(), 0))
    if places.dim() < whole.dim():
        found = whole.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    else:
        found = whole.gather(dim, places)
    return found, places


def _cut_again(y: Tensor, x: SpatialTensor, dim: int) -> Tensor:
    """This rank's part of y, if it has all the pixels of x along a dim that is cut there and not here."""
    if y.shape != x.shape:
        return y
    layout = y.layout if isinstance(y, SpatialTensor) else Layout.of_copies(x.layout.grid)
    axis = x.layout.axis(dim)
    dims = tuple(dim if known == axis else other for known, other in enumerate(layout.dims))
    assert axis is not None
    place = Layout(layout.grid, layout.tiling.replace(axis, x.layout.tiling.splits[axis]), dims)
    return wrap(part(y, place), place)


for function in named(*"topk kthvalue sort argsort msort median nanmedian mode".split()):
    register(function, flat=True)(along_dim(function, _by_order(function)))


def _quantile(function: Any) -> Callable[..., Any]:
    def rule(input: SpatialTensor, q: Any, dim: int | None = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        if dim is None:
            return function(gather(input), q, None, keepdim, **kwargs)
        dim = place_of(dim, input.dim())
        lines = gather_axes(input, [axis for axis in input.layout.axes_at([dim]) if input.layout.cut(dim)])
        if not isinstance(lines, SpatialTensor):
            return function(lines, q, dim, keepdim, **kwargs)
        layout = reduced_layout(lines.layout, [dim], keepdim)
        if isinstance(q, Tensor) and q.dim():
            layout = replace(layout, dims=shift(layout.dims, 0, 1))  # the quantiles come first
        return wrap_some(function(_with_pixels(lines), q, dim, keepdim, **kwargs), layout)

    return rule


for function in named("quantile", "nanquantile"):
    register(function)(_quantile(function))


def _softmax(function: Any, sign: int, logarithm: bool) -> Shared:
    """exp(x) over its sum, or the logarithm of it, with the maximum taken off first."""

    def shared(x: SpatialTensor, dim: int | None, /, *args: Any, dtype: Any = None, **_: Any) -> Tensor:
        if dim is None:
            raise refusal(function_name(function), "name the dim")
        dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        x = x if dtype else in_plain_dtype(x, lambda image: function(image, -1))
        kind = dtype or x.dtype
        y = x.to(torch.float32 if kind in (torch.float16, torch.bfloat16) else kind) * sign
        y = y - extremum(y.detach(), (dim,), True, maximum=True)  # type: ignore[arg-type]
        powers = y.exp()
        sums = total(powers, [dim], True)  # type: ignore[arg-type]
        return (y - sums.log() if logarithm else powers / sums).to(kind)

    return shared


for name, sign, logarithm in (("softmax", 1, False), ("softmin", -1, False), ("log_softmax", 1, True)):
    for function in named(name):
        register(function, flat=True)(along_dim(function, _softmax(function, sign, logarithm), of_flat=True))


@register_beside_flat(*named("logsumexp"))
def logsumexp(input: SpatialTensor, dim: DimsArgument, keepdim: bool = False) -> Tensor:
    """Over any dims. Backward gives each pixel its share exp(x - y) of the gradient, as PyTorch does."""
    check_reduction(torch.logsumexp, input, dim, keepdim)
    dims = normalize_dims(input, dim)
    if not any(input.layout.cut(d) for d in dims):
        return wrap(torch.logsumexp(input.local, dims, keepdim), reduced_layout(input.layout, dims, keepdim))
    input = in_plain_dtype(input, lambda image: torch.logsumexp(image, -1))
    axes = input.layout.axes_at(dims)
    comm, part = input.layout.grid.along(axes), owned_along(input, axes)
    part = part.to(torch.result_type(part, 1.0))  # of integers PyTorch makes numbers
    part, kind = part.float() if part.itemsize < 4 else part, part.dtype
    with torch.no_grad():
        most = local_part(extremum(input, dims, True, maximum=True)).to(part.dtype)
        most = most.masked_fill(most.isinf(), 0)
        y = comm.all_reduce((part - most).exp().sum(dims, keepdim=True)).log() + most

    def hand_out(gradient: Tensor) -> Tensor:
        return comm.all_reduce(gradient.contiguous().clone()) * (part - y).exp()

    result = exchange.linear(part, lambda _: y.clone(), hand_out)  # y itself would be kept by its own graph
    return left_of(input, result.to(kind), dims, keepdim)


@register_beside_flat(*named("prod"))
def prod(input: SpatialTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The product of the products of all ranks' parts, which are gathered."""
    dims = normalize_dims(input, dim)
    y: Tensor = input.to(dtype) if dtype is not None else input
    for d in dims:
        if isinstance(y, SpatialTensor) and y.layout.cut(d):
            y = of_all_parts(y, [d], owned_along(y, y.layout.axes_at([d])).prod(d, True))
        y = _apply(torch.prod, y, d, d, True)
    if not keepdim:
        for d in reversed(dims):
            y = y.squeeze(d)
    return y


# Cumulative sums, products and extrema along an axis of the image: what the parts before come to stands in front.
#
# x        a b c | d e | f g      each part's last prefix, which every rank gathers, then takes those before its own:
# totals     s       t     u      the last rank computes the prefixes of (s, t, f, g) and keeps the last two


def _prefix(function: Any, indexed: bool) -> Callable[..., Any]:
    local = along_dim(function)

    def rule(input: SpatialTensor, dim: int, **options: Any) -> Any:
        dim = place_of(dim, input.dim())
        axis = input.layout.axis(dim)
        if axis is None or not input.layout.cut(dim):
            return local(input, dim, **options)
        part, layout = owned_along(input, (axis,)), input.layout
        layout = replace(layout, tiling=layout.tiling.replace(axis, layout.tiling.splits[axis].narrow()))
        split, place = layout.tiling.splits[axis], layout.grid.coordinates[axis]
        earlier = sum(not split.owned(i).empty for i in range(place))

        def before(last: Tensor) -> Tensor:
            """The result of the parts before this one, of those that have any pixels."""
            return local_part(of_all_parts(input, [dim], last)).narrow(dim, 0, earlier)

        def last_of(y: Tensor) -> Tensor:
            return y.narrow(dim, y.shape[dim] - 1, 1) if y.shape[dim] else y.sum(dim, keepdim=True).to(y.dtype)

        found = function(part, dim, **options)
        size = part.shape[dim]
        if not indexed:
            joined = torch.cat([before(last_of(found)), part], dim)
            return wrap(function(joined, dim, **options).narrow(dim, earlier, size), layout)
        values, indices = found
        start = split.owned(place).start
        numbers = torch.arange(start, start + size, device=part.device)
        shape = [size if d == dim else 1 for d in range(part.dim())]
        positions = torch.cat([before(last_of(indices + start)), numbers.view(shape).expand(part.shape)], dim)
        result = function(torch.cat([before(last_of(values)), part], dim), dim, **options)
        index = positions.gather(dim, result.indices).narrow(dim, earlier, size)
        return type(result)((wrap(result.values.narrow(dim, earlier, size), layout), wrap(index, layout)))

    return rule


for function in named("cumsum", "cumprod", "logcumsumexp"):
    register_beside_flat(function)(_prefix(function, indexed=False))
for function in named("cummax", "cummin"):
    register_beside_flat(function)(_prefix(function, indexed=True))
