"""Indexing: slices of rows and columns are windows of one pixel, other dims are local."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.geometry import BATCH, Window
from mpi4dl.parallel.spatial.grid import Flat
from mpi4dl.parallel.spatial.halo import gather, gather_axes, reach
from mpi4dl.parallel.spatial.redistribution import entries_on_all
from mpi4dl.parallel.spatial.rules.choosing import choose_by_lists, dims_of, look_up, write_by_lists
from mpi4dl.parallel.spatial.rules.rearranging import choose, one_row
from mpi4dl.parallel.spatial.rules.reductions import reduced_layout
from mpi4dl.parallel.spatial.tensor import SpatialTensor, copied, named, refusal, register, wrap


def crop(x: SpatialTensor, dim: int, index: slice) -> Tensor:
    """A slice along one dim, of the whole."""
    axis = x.layout.axis(dim)
    if axis is None:
        return wrap(x.local[(slice(None),) * dim + (index,)], x.layout)
    start, stop, step = index.indices(x.shape[dim])
    length = len(range(start, stop, step))
    if length == x.shape[dim]:
        return x
    flat = x.layout.flat_at(dim)
    if flat is not None:
        return _of_flat(x, flat, start, stop, step)
    if length == 0:  # every rank has it
        return wrap(x.local.narrow(dim, 0, 0), reduced_layout(x.layout, [dim], True))
    if axis == BATCH or step < 1:
        raise refusal("Tensor.__getitem__", f"a slice of {length} of {x.shape[dim]} along dim {dim}, which is spread")
    last = start + (length - 1) * step
    reached = reach(x, {axis: Window(1, step, -start, last + 1 - x.shape[dim])})
    local = reached.fetch(x.local)
    result = wrap(local[(slice(None),) * dim + (slice(None, None, step),)], reached.output)
    return result if reached.exchange is None else copied(result, x)


def _of_flat(x: SpatialTensor, flat: Flat, start: int, stop: int, step: int) -> Tensor:
    """A slice of a flat dim: all that is spread stays so; other entries come to every rank, if it lacks them."""
    dim, end = flat.dim, x.shape[flat.dim]
    first_behind = end - flat.suffix  # of the entries of every rank behind those that are spread
    if step == 1 and start <= flat.prefix and stop >= first_behind and start < stop:
        rest = x.local.narrow(dim, start, x.local.shape[dim] - start - (end - stop))
        others = tuple(each for each in x.layout.flat if each != flat)
        left = flat._replace(prefix=flat.prefix - start, suffix=stop - first_behind)
        kept = (left,) if len(left.factors) > 1 or left.copies else ()
        return wrap(rest, replace(x.layout, flat=tuple(sorted((*others, *kept)))))
    if step > 0 and (stop <= flat.prefix or start >= first_behind):
        shift = 0 if stop <= flat.prefix else x.local.shape[dim] - end
        index = (slice(None),) * dim + (slice(start + shift, stop + shift, step),)
        return wrap(x.local[index], reduced_layout(x.layout, [dim], True))
    if step < 1:
        return copied(gather_axes(x, ())[(slice(None),) * dim + (slice(start, stop, step),)], x)
    return copied(entries_on_all(x, dim, start, stop, step), x)


@register(Tensor.__getitem__, flat=True)
def getitem(input: Tensor, index: Any) -> Tensor:
    """Integers, slices, None and `...`, then what lists and tensors of indices choose."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(input, SpatialTensor) or any(isinstance(i, SpatialTensor) for i in indices):
        return look_up(input, indices)
    indices, lists = _parted(input, indices)
    dim = 0
    x: Tensor = input
    for i in indices:
        if i is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif isinstance(i, int):
            x = x.select(dim, i)
        else:
            x = crop(x, dim, i) if isinstance(x, SpatialTensor) else x[(slice(None),) * dim + (i,)]
            dim += 1
    return choose_by_lists(x, lists) if lists else x


def _parted(x: Tensor, indices: Sequence[Any], rows: bool = False) -> tuple[list[Any], dict[int, Tensor]]:
    """The integers, slices and None of an index, and the lists that choose along the dims that those leave.

    With `rows` an integer stands for a dim that is spread over ranks as a slice of one.
    """
    indices = [int(i) if isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool else i for i in indices]
    if any(i is Ellipsis for i in indices):
        at = next(n for n, i in enumerate(indices) if i is Ellipsis)
        missing = x.dim() - sum(dims_of(i) for i in indices)
        indices[at : at + 1] = [slice(None)] * missing
    parted: list[Any] = []
    lists: dict[int, Tensor] = {}
    source = dim = 0  # of x, and of what is left
    for i in indices:
        if isinstance(i, int) and not isinstance(i, bool):
            row = rows and isinstance(x, SpatialTensor) and x.layout.cut(source)
            parted.append(slice(i, i + 1 or None) if row else i)
            source, dim = source + 1, dim + row
        elif i is None or isinstance(i, slice):
            parted.append(i)
            source, dim = source + dims_of(i), dim + 1
        else:
            lists[dim] = torch.as_tensor(i, device=x.device)
            parted += [slice(None)] * dims_of(lists[dim])
            source, dim = source + dims_of(lists[dim]), dim + dims_of(lists[dim])
    return parted, lists


@register(*named("narrow"), flat=True)
def narrow(input: SpatialTensor, dim: int, start: int, length: int) -> Tensor:
    start = start + input.shape[dim] if start < 0 else start
    if start + length > input.shape[dim]:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({input.shape[dim]})")
    return crop(input, dim % input.dim(), slice(start, start + length))


@register(*named("select"), flat=True)
def select(input: SpatialTensor, dim: int, index: int) -> Tensor:
    dim %= input.dim()
    flat = input.layout.flat_at(dim)
    if flat is not None:
        size = input.shape[dim]
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for dimension {dim} with size {size}")
        return _of_flat(input, flat, index % size, index % size + 1, 1).squeeze(dim)
    if flat is None and input.layout.cut(dim):
        return one_row(input, dim, index)
    return wrap(input.local.select(dim, index), reduced_layout(input.layout, [dim], False))


@register(*named("unbind"), flat=True)
def unbind(input: SpatialTensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(select(input, dim, i) for i in range(input.shape[dim]))


def _pieces(function: Any) -> Any:
    def rule(input: SpatialTensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        dim = kwargs.pop("dim", args[1] if len(args) > 1 else 0) % input.dim()
        how = args[0] if args else next(iter(kwargs.values()))
        if input.layout.axis(dim) is None:
            return tuple(wrap(piece, input.layout) for piece in function(input.local, how, dim))
        sizes = [piece.shape[0] for piece in function(torch.empty(input.shape[dim], device="meta"), how, 0)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(narrow(input, dim, start, size) for start, size in zip(starts, sizes, strict=True))

    return rule


for function in named("split", "chunk", "tensor_split", "split_with_sizes"):
    register(function, flat=True)(_pieces(function))


@register(*named("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    if not isinstance(input, SpatialTensor) or isinstance(index, SpatialTensor):
        raise refusal("torch.index_select", "the index is spread over ranks")
    return choose(input, dim % input.dim(), index.reshape(-1).tolist())


@register(Tensor.__setitem__)
def setitem(input: Tensor, index: Any, value: Any) -> None:
    """Writing to what the same index reads, if that is a view; and a number, where a mask says so. What is spread is
    gathered into a plain tensor.
    """
    if not isinstance(input, SpatialTensor):
        whole, value = pytree.tree_map_only(Tensor, gather, (index, value))
        input[whole] = value
        return
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if isinstance(value, Tensor) and value.dim():
            raise refusal("Tensor.__setitem__", "which pixel gets which value depends on the mask")
        input.masked_fill_(index[(...,) + (None,) * (input.dim() - index.dim())], value)
        return
    indices = list(index) if isinstance(index, tuple) else [index]
    lists: dict[int, Tensor] = {}
    if not any(isinstance(i, SpatialTensor) for i in indices):
        number = not isinstance(value, Tensor) or value.dim() == 0
        indices, lists = _parted(input, indices, rows=number)
    target = input[tuple(indices)]
    if not isinstance(target, SpatialTensor) or target.memory is not input.memory:
        raise refusal("Tensor.__setitem__", "what it would write to is a copy")
    if lists:
        write_by_lists(target, lists, value)
        return
    target.copy_(value if isinstance(value, Tensor) else torch.tensor(value, dtype=input.dtype, device=input.device))
