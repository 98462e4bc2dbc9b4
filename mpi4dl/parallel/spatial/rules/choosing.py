"""What indices choose, or where they write: local along dims that are not cut, once both have the same pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Interval
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather as gather_whole
from mpi4dl.parallel.spatial.halo import gather_axes, part
from mpi4dl.parallel.spatial.rules.contraction import contract
from mpi4dl.parallel.spatial.rules.pointwise import align
from mpi4dl.parallel.spatial.rules.rearranging import choose
from mpi4dl.parallel.spatial.rules.reductions import reduced_layout
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    copied,
    function_name,
    named,
    owned,
    place_of,
    refusal,
    register,
    wrap,
)

SELECTS_PIXELS = "a mask or a tensor of indices selects pixels"


def dims_of(index: Any) -> int:
    """How many dims of a tensor this part of an index stands for."""
    if index is None or index is Ellipsis:
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _indices(x: Tensor, lists: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The lists by the dim that they stand at, with the places of what a mask chooses in its stead."""
    chosen: dict[int, Tensor] = {}
    for dim, index in lists.items():
        spread = isinstance(x, SpatialTensor) and any(x.layout.axis(dim + i) is not None for i in range(index.dim()))
        if index.dtype not in (torch.bool, torch.uint8):
            chosen[dim] = index
        elif index.dim() == 0 or (index.dim() > 1 and spread):
            raise refusal("Tensor.__getitem__", SELECTS_PIXELS)
        elif tuple(index.shape) != tuple(x.shape[dim : dim + index.dim()]):
            raise IndexError(f"the shape of the mask {list(index.shape)} at dim {dim} does not match {list(x.shape)}")
        else:
            chosen |= {dim + i: found for i, found in enumerate(index.nonzero(as_tuple=True))}
    return chosen


def _everywhere(chosen: Mapping[int, Tensor], dims: int) -> tuple[Any, ...]:
    return tuple(chosen.get(dim, slice(None)) for dim in range(dims))


def choose_by_lists(x: Tensor, lists: Mapping[int, Tensor]) -> Tensor:
    """x[..., index, ...] with tensors of indices, or masks, by the dim that they stand at."""
    chosen = _indices(x, lists)
    if not isinstance(x, SpatialTensor):
        return x[_everywhere(chosen, x.dim())]
    if x.layout.flat:
        return copied(choose_by_lists(gather_axes(x, ()), lists), x)
    if any(x.layout.axis(dim) is not None for dim in chosen):
        (dim, index), *others = chosen.items()
        if others or index.dim() != 1:
            raise refusal("Tensor.__getitem__", SELECTS_PIXELS)
        return choose(x, dim, index.tolist())
    y = x.local[_everywhere(chosen, x.dim())]
    kept = [dim for dim in range(x.dim()) if dim not in chosen]
    new = y.dim() - len(kept)
    side_by_side = max(chosen) - min(chosen) + 1 == len(chosen)
    before = sum(dim < min(chosen) for dim in kept) if side_by_side else 0  # else PyTorch puts them in front
    place = {dim: i if i < before else i + new for i, dim in enumerate(kept)}
    return wrap(y, replace(x.layout, dims=tuple(None if dim is None else place[dim] for dim in x.layout.dims)))


def write_by_lists(x: SpatialTensor, lists: Mapping[int, Tensor], value: Any) -> None:
    """x[..., index, ...] = value, where the lists stand at dims that are not of the image."""
    chosen = _indices(x, lists)
    if any(x.layout.axis(dim) is not None for dim in chosen):
        raise refusal("Tensor.__setitem__", SELECTS_PIXELS)
    if isinstance(value, Tensor) and value.dim():
        (_, value), _ = align([choose_by_lists(x.detach(), chosen), value], "Tensor.__setitem__", keep_first=True)
    x.local[_everywhere(chosen, x.dim())] = value


def look_up(table: Tensor, indices: Sequence[Any]) -> Tensor:
    """table[labels], where every rank has the table and the labels are spread."""
    labels = indices[0]
    if isinstance(table, SpatialTensor) or len(indices) > 1 or labels.dtype in (torch.bool, torch.uint8):
        raise refusal("Tensor.__getitem__", SELECTS_PIXELS)
    return wrap(table[labels.local], labels.layout)


@register(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table. Of one whose rows are cut each rank looks up its own, and zeros for others: they add up."""
    name = "torch.nn.functional.embedding"
    if max_norm is not None:
        raise refusal(name, "its table is changed by max_norm")
    if not isinstance(weight, SpatialTensor):
        assert isinstance(input, SpatialTensor)
        found = F.embedding(input.local, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
        return wrap(found, input.layout)
    axis = weight.layout.axis(0)
    if weight.layout.flat or (axis is not None and (scale_grad_by_freq or sparse)):
        raise refusal(name, "gradients of a table that is cut are neither sparse nor scaled by frequencies")
    rows = Interval(0, weight.shape[0]) if axis is None else weight.layout.owned[axis]
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + weight.shape[0]
    known = input.device.type == "cpu" and not isinstance(input, SpatialTensor) and input.numel() > 0
    if known and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")

    def of_own_rows(indices: Tensor, table: Tensor) -> Tensor:
        if axis is None:
            return F.embedding(indices, table, padding)
        if not len(table):
            return table.new_zeros(*indices.shape, table.shape[1])
        inside = (indices >= rows.start) & (indices < rows.stop)
        own = None if padding is None or not rows.start <= padding < rows.stop else padding - rows.start
        found = F.embedding(torch.where(inside, indices - rows.start, 0), table, own)
        return found * inside.unsqueeze(-1)

    indices = [f"dim {i}" for i in range(input.dim())]
    return contract(name, of_own_rows, (input, weight), [indices, ["row", "feature"]], [*indices, "feature"])


@register(F.one_hot)
def one_hot(input: SpatialTensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1 and input.numel():
        num_classes = int(torch.amax(input)) + 1
    if input.local.numel() == 0:
        return wrap(input.local.new_empty((*input.local.shape, num_classes)), input.layout)
    return wrap(F.one_hot(input.local, num_classes), input.layout)


def _along_whole(x: Tensor, dim: int) -> Tensor:
    """x, with `dim` as an ordinary dim if it is an axis of the image that no ranks share."""
    if not isinstance(x, SpatialTensor) or x.layout.axis(dim) is None or x.layout.cut(dim) or x.layout.flat:
        return x
    return wrap(owned(x), reduced_layout(x.layout.narrow, [dim], True))


def _common(function: str, dim: int, *tensors: Tensor) -> Layout:
    """The layout in which the others come to the first one that is spread; none may be cut along `dim`."""
    spread = [x for x in tensors if isinstance(x, SpatialTensor)]
    if any(x.layout.axis(dim) is not None for x in spread):
        raise refusal(function, f"dim {dim} is spread over ranks")
    return spread[0].layout.narrow


@register(*named("gather"))
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Entries from anywhere along a dim, which is gathered if ranks share it; the result is spread as the index is."""
    dim = place_of(dim, input.dim())
    axis = input.layout.axis(dim) if isinstance(input, SpatialTensor) else None
    if isinstance(input, SpatialTensor) and axis is not None:
        input = gather_axes(input, [axis])
    index = _along_whole(index, dim)
    for other in range(input.dim()):
        if other != dim and index.shape[other] != input.shape[other]:
            input = input.narrow(other, 0, index.shape[other])
    lead = index if isinstance(index, SpatialTensor) else input
    if not isinstance(lead, SpatialTensor):
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    layout = lead.layout.narrow
    own = part(input, reduced_layout(layout, [dim], True))
    return wrap(torch.gather(own, dim, part(index, layout), sparse_grad=sparse_grad), layout)


@register(*named("take_along_dim"))
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return torch.take_along_dim(gather_whole(input), gather_whole(indices))
    dim = place_of(dim, input.dim())
    pairs = list(zip(input.shape, indices.shape, strict=True))
    sizes = [-1 if d == dim else max(pair) for d, pair in enumerate(pairs)]
    return torch.gather(input.expand(sizes), dim, indices.expand(sizes))


def _scatter(function: Any) -> Any:
    name = function_name(function)
    in_place = name.endswith("_")

    def rule(input: Tensor, dim: int, index: Tensor, src: Any = None, *rest: Any, **more: Any) -> Any:
        written = more.pop("value", src)
        dim = place_of(dim, input.dim())
        tensors = [x for x in (input, index, written) if isinstance(x, Tensor) and x.dim()]
        if in_place and not isinstance(input, SpatialTensor):
            return function(input, dim, gather_whole(index), _whole(written), *rest, **more)
        if not in_place:
            input, index = _along_whole(input, dim), _along_whole(index, dim)
            written = _along_whole(written, dim) if isinstance(written, Tensor) and written.dim() else written
            tensors = [x for x in (input, index, written) if isinstance(x, Tensor) and x.dim()]
            if not any(isinstance(x, SpatialTensor) for x in tensors):
                return function(input, dim, index, written, *rest, **more)
        layout = _common(name, dim, *tensors)
        for other, size in enumerate(input.shape):
            if other in layout.dims and any(x.shape[other] != size for x in tensors):
                raise refusal(name, f"its tensors differ in size along dim {other}, which is spread over ranks")
        if isinstance(input, SpatialTensor) and in_place:
            layout = input.layout
        local, at = part(input, layout), part(index, layout)
        if isinstance(written, Tensor) and written.dim():
            written = part(written, layout)
        y = function(local, dim, at, written, *rest, **more)
        return input if in_place else wrap(y, layout)

    return rule


def _by_index(function: Any) -> Any:
    """Writing whole slices along a dim: index_fill, index_add, index_copy, and these in place."""
    name = function_name(function)

    def rule(input: Tensor, dim: int, index: Tensor, source: Any = None, **options: Any) -> Any:
        written = options.pop("value", source)
        if name.endswith("_") and not isinstance(input, SpatialTensor):
            return function(input, dim, gather_whole(index), _whole(written), **options)
        dim = place_of(dim, input.dim())
        if isinstance(index, SpatialTensor):
            raise refusal(name, "its index is spread over ranks")
        tensors = [x for x in (input, written) if isinstance(x, Tensor) and x.dim()]
        layout = _common(name, dim, *tensors)
        layout = input.layout if isinstance(input, SpatialTensor) else layout
        if isinstance(written, Tensor) and written.dim():
            sizes = [(input.shape[d], written.shape[d]) for d in layout.dims if d is not None]
            if any(a != b for a, b in sizes):
                raise refusal(name, f"sizes {sizes} along dims that are spread over ranks differ")
            written = part(written, layout)
        y = function(part(input, layout), dim, index, written, **options)
        return input if name.endswith("_") else wrap(y, layout)

    return rule


for function in named("index_fill", "index_fill_", "index_add", "index_add_", "index_copy", "index_copy_"):
    register(function)(_by_index(function))


def _whole(value: Any) -> Any:
    return gather_whole(value) if isinstance(value, Tensor) else value


for function in named("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"):
    register(function)(_scatter(function))
