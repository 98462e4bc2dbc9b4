"""Indexing, choosing and rearranging: slices, gather and scatter, index_select, roll and flip, triangles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mpi4dl.geometry import BATCH, Interval, Split, Window
from mpi4dl.parallel.spatial.alignment import align, contract
from mpi4dl.parallel.spatial.grid import Flat
from mpi4dl.parallel.spatial.halo import gather as gather_whole
from mpi4dl.parallel.spatial.halo import gather_axes, gather_dim, plan_halo
from mpi4dl.parallel.spatial.redistribution import entries_on_all
from mpi4dl.parallel.spatial.rules.reductions import (
    normalize_dims,
    reduced_layout,
    register_beside_flat,
    whole_along,
)
from mpi4dl.parallel.spatial.tensor import (
    SpatialTensor,
    copied,
    function_name,
    local_part,
    named,
    numbers_on,
    owned,
    place_of,
    refusal,
    register,
    wrap,
)

# Rows in another order: rolled, flipped, repeated, chosen by a list. Each rank fetches what its part shows.
#
# roll by 2 over 3 ranks      x       a b c | d e f | g h i       "b c" and "a" are not one run of rows: around the
#                             y       h i a | b c d | e f g        widest jump a part is fetched as two


def numbers(arguments: Sequence[Any]) -> list[int]:
    """f(1, 2) and f((1, 2)) alike."""
    first = arguments[0] if arguments else ()
    return list(first) if len(arguments) == 1 and not isinstance(first, int) else list(arguments)


def _hull(rows: Sequence[int]) -> Interval:
    return Interval(min(rows), max(rows) + 1) if rows else Interval(0, 0)


def _widest_jump(rows: Sequence[int]) -> int:
    """Where to part a sequence of rows so that both sides have tight hulls; its length where that gains nothing."""
    jumps = [abs(b - a) for a, b in pairwise(rows)]
    if not jumps or max(jumps) == 1:
        return len(rows)
    at = jumps.index(max(jumps)) + 1
    apart = _hull(rows[:at]).length + _hull(rows[at:]).length
    return at if apart < _hull(rows).length else len(rows)


def pick(x: SpatialTensor, dim: int, sources: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """y, whose row i along an axis of the image is row sources[i] of x; `cuts` are those of y."""
    layout, axis = x.layout, x.layout.axis(dim)
    assert axis is not None
    split, output = layout.tiling.splits[axis], Split.at(cuts)
    shown = [sources[slice(*output.owned(i))] for i in range(split.parts)]
    partings = [_widest_jump(rows) for rows in shown]
    sides = [[rows[:at] for rows, at in zip(shown, partings, strict=True)]]
    if any(at < len(rows) for rows, at in zip(shown, partings, strict=True)):
        sides.append([rows[at:] for rows, at in zip(shown, partings, strict=True)])
    mine, pieces = layout.grid.coordinates[axis], []
    for side in sides:
        needed = tuple(_hull(rows) for rows in side)
        tiling = layout.narrow.tiling.replace(axis, Split(split.cuts, needed))
        fetched = layout.exchange_to(tiling)(x.local)
        if list(side[mine]) != list(range(*needed[mine])):
            index = numbers_on(fetched.device, tuple(row - needed[mine].start for row in side[mine]))
            fetched = fetched.index_select(dim, index)
        pieces.append(fetched)
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return wrap(y, replace(layout, tiling=layout.narrow.tiling.replace(axis, output)))


def choose(x: Tensor, dim: int, index: Sequence[int], moved: Callable[[int], int] | None = None) -> Tensor:
    """The rows of x, along any dim, that `index` names, from 0 or, negative, from the end.

    A cut of x comes to `moved(cut)`, or in proportion.
    """
    size = x.shape[dim]
    outside = [row for row in index if not -size <= row < size]
    if outside:
        raise IndexError(f"index {outside[0]} is out of bounds for dimension {dim} with size {size}")
    sources = [row % size for row in index]
    axis = x.layout.axis(dim) if isinstance(x, SpatialTensor) else None
    if not isinstance(x, SpatialTensor) or axis is None:
        local = local_part(x).index_select(dim, numbers_on(x.device, tuple(sources)))
        return x.like(local) if isinstance(x, SpatialTensor) else local
    _, *cuts, _ = x.layout.tiling.splits[axis].cuts
    inner = (cut * len(sources) // max(size, 1) if moved is None else moved(cut) for cut in cuts)
    return pick(x, dim, sources, [0, *inner, len(sources)])


@register(*named("roll"), flat=True)
def roll(input: SpatialTensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    over = [dims] if isinstance(dims, int) else list(dims or ())
    if not over:
        return torch.roll(input.flatten(), shifts, 0).view(input.shape)
    if len(by) != len(over):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(by)}, dims:{len(over)}")
    over = [place_of(d, input.dim()) for d in over]
    x = whole_along(input, over)
    for shift, dim in zip(by, over, strict=True):
        size = x.shape[dim]
        x = choose(x, dim, [(row - shift) % size for row in range(size)])
    return x


@register(*named("flip"), flat=True)
def flip(input: SpatialTensor, *dims: Any, **named_dims: Any) -> Tensor:
    given = numbers(dims or tuple(named_dims.values()))
    over = normalize_dims(input, given) if given else ()
    x = whole_along(input, over)
    for dim in over:
        x = choose(x, dim, range(x.shape[dim])[::-1])
    return x if given else input.clone()


def repeat_by(x: Tensor, times: Sequence[int]) -> Tensor:
    """x beside itself, `times` for each dim, of which there may be more than x has."""
    while x.dim() < len(times):
        x = x.unsqueeze(0)
    if not isinstance(x, SpatialTensor):
        return x.repeat(*times)
    spread = [dim for dim, n in enumerate(times) if n != 1 and x.layout.axis(dim) is not None]
    y = wrap(x.local.repeat([1 if dim in spread else n for dim, n in enumerate(times)]), x.layout)
    for dim in spread:
        y = choose(y, dim, list(range(y.shape[dim])) * times[dim])
    return y


@register(Tensor.repeat)
def repeat(input: SpatialTensor, *sizes: Any, **named_sizes: Any) -> Tensor:
    times = numbers(sizes or tuple(named_sizes.values()))
    if len(times) < input.dim():
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor: "
            f"{times} for shape {tuple(input.shape)}"
        )
    return repeat_by(input, times)


@register(*named("tile"))
def tile(input: SpatialTensor, *dims: Any, **named_dims: Any) -> Tensor:
    times = numbers(dims or tuple(named_dims.values()))
    return repeat_by(input, [1] * (input.dim() - len(times)) + times)


@register(*named("repeat_interleave"))
def repeat_interleave(
    input: Tensor, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if isinstance(repeats, SpatialTensor):
        raise refusal("torch.repeat_interleave", "how often is spread over ranks")
    x = gather_axes(input.flatten(), ()) if dim is None else input
    dim = 0 if dim is None else place_of(dim, x.dim())
    if not isinstance(x, SpatialTensor):
        return torch.repeat_interleave(x, repeats, dim, output_size=output_size)
    times = [repeats] * x.shape[dim] if isinstance(repeats, int) else repeats.expand(x.shape[dim]).tolist()
    ends = [0, *accumulate(times)]
    return choose(x, dim, [row for row, n in enumerate(times) for _ in range(n)], ends.__getitem__)


# Reads and writes by indices: local along dims that are not cut, once both have the same pixels.

SELECTS_PIXELS = "a mask or a tensor of indices selects pixels or samples"


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
    whole = whole_along(x, [dim + i for dim, index in lists.items() for i in range(dims_of(index))])
    if whole is not x:
        return copied(choose_by_lists(whole, lists), x)
    kept = [dim for dim in range(x.dim()) if dim not in chosen]
    side_by_side = max(chosen) - min(chosen) + 1 == len(chosen)
    before = sum(dim < min(chosen) for dim in kept) if side_by_side else 0  # else PyTorch puts new dims in front
    if any(x.layout.axis(dim) is not None for dim in chosen):
        return _choose_apart(x, chosen, kept, before)
    y = x.local[_everywhere(chosen, x.dim())]
    new = y.dim() - len(kept)
    place = {dim: i if i < before else i + new for i, dim in enumerate(kept)}
    return wrap(y, x.layout.moved(place.get))


def _choose_apart(x: SpatialTensor, chosen: Mapping[int, Tensor], kept: Sequence[int], before: int) -> Tensor:
    """x[rows, columns] where each tensor of indices varies along a dim of its own, as masks of attention and `np.ix_`
    have them: each is chosen alone, and ranks that share its dim share that of the result.
    """
    new = max(index.dim() for index in chosen.values())
    varies = {dim: [i - index.dim() for i, n in enumerate(index.shape) if n != 1] for dim, index in chosen.items()}
    places = [place for found in varies.values() for place in found]
    if len(set(places)) < len(places) or any(len(found) > 1 for found in varies.values()):
        raise refusal("Tensor.__getitem__", SELECTS_PIXELS)
    y: Tensor = x
    for dim, index in chosen.items():
        y = choose(y, dim, index.flatten().tolist())
    alone = [dim for dim in chosen if not varies[dim]]
    by_place = {found[0]: dim for dim, found in varies.items() if found}
    y = y.permute(*kept[:before], *alone, *(by_place[place] for place in sorted(by_place)), *kept[before:])
    for _ in alone:
        y = y.select(before, 0)
    for place in range(-new, 0):
        if place not in by_place:
            y = y.unsqueeze(before + new + place)
    return y


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


@register(F.embedding, flat=True)
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
    if scale_grad_by_freq and isinstance(input, SpatialTensor):
        raise refusal(name, "each rank would count the frequencies of its own indices alone")
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

    indices = tuple(f"dim {i}" for i in range(input.dim()))
    return contract(name, of_own_rows, (input, weight), (indices, ("row", "feature")), (*indices, "feature"))


@register(F.one_hot, flat=True)
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


@register(*named("gather"), flat=True)
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Entries from anywhere along a dim, which is gathered if ranks share it; the result is spread as the index is."""
    dim = place_of(dim, input.dim())
    if isinstance(input, SpatialTensor) and input.layout.axis(dim) is not None:
        input = gather_dim(input, dim)
    index = _along_whole(index, dim)
    for other in range(input.dim()):
        if other != dim and index.shape[other] != input.shape[other]:
            input = input.narrow(other, 0, index.shape[other])
    names = range(input.dim())
    sources = tuple("source" if d == dim else d for d in names)

    def take(at: Tensor, own: Tensor) -> Tensor:
        return torch.gather(own, dim, at, sparse_grad=sparse_grad)

    return contract("torch.gather", take, (index, input), (names, sources), names)


@register(*named("take_along_dim"), flat=True)
def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return torch.take_along_dim(gather_whole(input), gather_whole(indices))
    dim = place_of(dim, input.dim())
    pairs = list(zip(input.shape, indices.shape, strict=True))
    sizes = [-1 if d == dim else max(pair) for d, pair in enumerate(pairs)]
    return torch.gather(input.expand(sizes), dim, indices.expand(sizes))


def _writing(function: Any) -> Any:
    """Writing along a dim that is not spread: entries by indices of their own, or whole slices by a list of them."""
    name = function_name(function)
    in_place, by_entries = name.endswith("_"), "scatter" in name

    def rule(input: Tensor, dim: int, index: Tensor, source: Any = None, *rest: Any, **options: Any) -> Any:
        written = options.pop("value", options.pop("src", source))
        if in_place and not isinstance(input, SpatialTensor):
            return function(input, dim, gather_whole(index), gather_whole(written), *rest, **options)
        dim = place_of(dim, input.dim())
        if by_entries and not in_place:
            input, index = _along_whole(input, dim), _along_whole(index, dim)
            written = _along_whole(written, dim) if isinstance(written, Tensor) and written.dim() else written
        if not by_entries and isinstance(index, SpatialTensor):
            raise refusal(name, "its index is spread over ranks")
        operands = [input, *[index] * by_entries, *[written] * (isinstance(written, Tensor) and written.dim() > 0)]
        spread = [x for x in operands if isinstance(x, SpatialTensor)]
        if any(x.layout.axis(dim) is not None for x in spread):
            raise refusal(name, f"dim {dim} is spread over ranks")
        dims = {d for x in spread for d in x.layout.dims if d is not None}
        if any(x.shape[d] != input.shape[d] for x in operands for d in dims):
            raise refusal(name, "its tensors differ in size along dims that are spread over ranks")
        if not spread:
            return function(input, dim, index, written, *rest, **options)
        parts, layout = align(operands, name, in_place)
        own, index = parts[0], parts[1] if by_entries else index
        written = parts[-1] if len(operands) > 1 + by_entries else written
        y = function(own, dim, index, written, *rest, **options)
        return input if in_place else wrap(y, layout)

    return rule


for name in ("index_fill", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"):
    for function in named(name, f"{name}_"):
        register(function)(_writing(function))


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
    halo_plan = plan_halo(x, {axis: Window(1, step, -start, last + 1 - x.shape[dim])})
    local = halo_plan.fetch(x.local)
    result = wrap(local[(slice(None),) * dim + (slice(None, None, step),)], halo_plan.output)
    return result if halo_plan.exchange is None else copied(result, x)


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


def _parts(index: Any) -> list[Any]:
    """What an index has for each dim. PyTorch takes some lists for tuples: x[[slice(2), None]], x[[[0, 1], [1, 2]]]."""
    each = Tensor | slice | EllipsisType | Sequence | None
    listed = isinstance(index, list) and len(index) < 32 and any(isinstance(i, each) for i in index)
    return list(index) if isinstance(index, tuple) or listed else [index]


@register(Tensor.__getitem__, flat=True)
def getitem(input: Tensor, index: Any) -> Tensor:
    """Integers, slices, None and `...`, then what lists and tensors of indices choose."""
    indices = _parts(index)
    if not isinstance(input, SpatialTensor) or any(isinstance(i, SpatialTensor) for i in indices):
        return look_up(input, indices)
    indices, lists = _parted(input, indices)
    dim, alone = 0, sum(i != slice(None) for i in indices) == 1
    x: Tensor = input
    for i in indices:
        if i is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif isinstance(i, int):
            x = x.select(dim, i)
        else:
            if i != slice(None):  # of several, each is a call of its own, so that views and copies know their source
                x = crop(x, dim, i) if alone and isinstance(x, SpatialTensor) else x[(slice(None),) * dim + (i,)]
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
    size = input.shape[dim]
    start = start + size if start < 0 else start
    if start < 0 or length < 0 or start + length > size:
        raise RuntimeError(f"narrow takes rows within {size}, but got start {start} and length {length}")
    return crop(input, dim % input.dim(), slice(start, start + length))


@register(*named("select"), flat=True)
def select(input: SpatialTensor, dim: int, index: int) -> Tensor:
    """A row without its dim: on every rank, where ranks share that."""
    dim %= input.dim()
    layout, size, axis = input.layout, input.shape[dim], input.layout.axis(dim)
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {size}")
    row = Interval(index % size, index % size + 1)
    if flat := layout.flat_at(dim):
        return _of_flat(input, flat, *row, 1).squeeze(dim)
    left = reduced_layout(layout, [dim], False)
    if axis is None or not layout.cut(dim):
        return wrap(input.local.select(dim, index), left)
    split = layout.tiling.splits[axis]
    tiling = layout.tiling.replace(axis, Split(split.cuts, (row,) * split.parts))
    return copied(wrap(layout.exchange_to(tiling)(input.local).select(dim, 0), left), input)


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


@register_beside_flat(*named("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    if not isinstance(input, SpatialTensor) or isinstance(index, SpatialTensor):
        raise refusal("torch.index_select", "the index is spread over ranks")
    return choose(input, dim % input.dim(), index.reshape(-1).tolist())


@register(Tensor.__setitem__)
def setitem(input: Tensor, index: Any, value: Any) -> None:
    """Writing to what the same index reads, if that is a view; and a number, where a mask says so. A plain tensor gets
    the spread values gathered.
    """
    if not isinstance(input, SpatialTensor):
        whole, value = pytree.tree_map_only(Tensor, gather_whole, (index, value))
        input[whole] = value
        return
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if isinstance(value, Tensor) and value.dim():
            raise refusal("Tensor.__setitem__", "which pixel gets which value depends on the mask")
        input.masked_fill_(index[(...,) + (None,) * (input.dim() - index.dim())], value)
        return
    indices = _parts(index)
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


# Triangles of matrices: what each rank keeps follows from which rows and columns it has.


def _rule(outside: Callable[[Tensor, int], Tensor], in_place: bool) -> Callable[..., Tensor]:
    """The rule that sets to zero what is `outside`, given how far columns are to the right of rows, and a diagonal."""

    def rule(input: SpatialTensor, diagonal: int = 0) -> Tensor:
        rows, cols = (_places(input, dim) for dim in (-2, -1))
        gone = outside(cols - rows.unsqueeze(-1), diagonal)
        if in_place:
            input.local.masked_fill_(gone, 0)
            return input
        return input.like(input.local.masked_fill(gone, 0))

    return rule


def _places(x: SpatialTensor, dim: int) -> Tensor:
    """Which rows or columns of the whole this rank holds."""
    axis = x.layout.axis(x.dim() + dim)
    start = 0 if axis is None else x.layout.held[axis].start
    return torch.arange(start, start + x.local.shape[dim], device=x.local.device)


for name, outside in (("tril", torch.gt), ("triu", torch.lt)):
    register(*named(name))(_rule(outside, False))
    register(*named(f"{name}_"))(_rule(outside, True))
