"""Operands that go together: dims that broadcast, or are multiplied, have one label; each rank takes the same part.

    x + y               (n, c, rows, cols) and (c, rows, 1)     labels are the places of dims, counted from the last
    einsum("nchw,kc")   n, c, h, w and k, c                     what the result lacks is summed

An axis of the image stands under one label alone. Operands that are cut elsewhere than the first are cut anew; plain
ones, which every rank has whole, are cropped.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from mpi4dl.comm.exchange import narrow
from mpi4dl.geometry import Split, Tiling, cut_alike
from mpi4dl.parallel.spatial.flattening import Unlike, between_copies, cut_out, part_along
from mpi4dl.parallel.spatial.grid import Flat, Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes, retile
from mpi4dl.parallel.spatial.redistribution import redistribute
from mpi4dl.parallel.spatial.sums import add_up, share_alike, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part, refusal, wrap

Labels = Sequence[Hashable]  # tuples and ranges, by which results are remembered
OTHER_AXES = "operands have different axes of the image in a dim"


class Axes(NamedTuple):
    """The axes that any operand has: the label and the cuts of each; flat dims by their labels."""

    held: Mapping[int, tuple[Hashable, Split]]
    flats: Mapping[Hashable, Flat]

    def tiling(self, others: Tiling) -> Tiling:
        """The cuts of these axes, and of all others as they are."""
        for axis, (_, split) in self.held.items():
            if split is not others.splits[axis]:
                others = others.replace(axis, split)
        return others

    def layout(self, lead: Layout, result: Labels) -> Layout:
        """The layout of what has the labels `result`; an axis of another label is one of none of its dims."""
        places, tiling = {label: dim for dim, label in enumerate(result)}, self.tiling(lead.tiling)
        dims = tuple(places.get(self.held[axis][0]) if axis in self.held else None for axis in lead.grid.axes)
        for axis, dim in enumerate(dims):
            if dim is None and (axis in self.held or lead.dims[axis] is not None):
                tiling = tiling.drop(axis)
        flats = tuple(sorted(flat._replace(dim=places[label]) for label, flat in self.flats.items() if label in places))
        alike = tiling is lead.tiling and dims == lead.dims and flats == lead.flat
        return lead if alike else Layout(lead.grid, tiling, dims, flats)


def align(operands: Sequence[Tensor], function: str, keep_first: bool = False) -> tuple[list[Tensor], Layout]:
    """The local parts of operands that broadcast against each other, all of one box, and its layout.

    With `keep_first` the first one, which is written in place, is not cut anew, but may come to hold less.
    """
    alike = [x for x in operands if isinstance(x, SpatialTensor)]
    if len(alike) == len(operands) and all(
        x.layout == alike[0].layout and x.shape == alike[0].shape for x in alike[1:]
    ):
        return [x.local for x in alike], alike[0].layout
    grid, ndim = alike[0].layout.grid, max(x.dim() for x in operands)
    operands = share_alike(operands, keep_first)
    labels = [range(ndim - x.dim(), ndim) for x in operands]
    operands = _one_pixel_gathered(operands, labels)
    lead = next((x for x in operands if isinstance(x, SpatialTensor)), None)
    if lead is None:
        return list(operands), Layout.of_copies(grid)
    try:
        axes = _axes_of(operands, labels, range(ndim), function)
    except Unlike as unlike:
        anew = _laid_alike(operands)
        if anew is None:
            anew = [x if keep_first and x is operands[0] else gather_axes(x, ()) for x in operands]
            anew = _under_one_label(anew, labels, range(ndim), _places(anew[0], labels[0]))
        if all(x is y for x, y in zip(anew, operands, strict=True)):
            raise refusal(function, str(unlike)) from None
        if not any(isinstance(x, SpatialTensor) for x in anew):
            return anew, Layout.of_copies(grid)
        return align(anew, function, keep_first)
    layout = axes.layout(lead.layout, range(ndim))
    if keep_first and lead is operands[0] and layout != lead.layout:
        more = [axis for axis, dim in enumerate(lead.layout.dims) if dim is None and layout.dims[axis] is not None]
        if more:  # such as features that the others have in parts
            return align([lead, *(gather_axes(x, more) for x in operands[1:])], function, True)
        if layout.dims != lead.layout.dims or not cut_alike(layout.tiling, lead.layout.tiling):
            raise refusal(function, "its first operand is written in place, but the others hold other pixels")
        lead.hold_less(layout.tiling)
    return [_part(x, names, axes, layout, function) for x, names in zip(operands, labels, strict=True)], layout


def part_of(x: Tensor, layout: Layout, ndim: int, function: str) -> Tensor:
    """The part of an operand that broadcasts against a local tensor of this layout, of `ndim` dims."""
    held = {axis: (dim, layout.tiling.splits[axis]) for axis, dim in enumerate(layout.dims) if dim is not None}
    axes = Axes(held, {flat.dim: flat for flat in layout.flat})
    return _part(x, range(ndim - x.dim(), ndim), axes, layout, function)


def part(x: Tensor, layout: Layout) -> Tensor:
    """This rank's part of x in that layout, whatever x's own is: what x has cut is cut anew, what it has whole cropped.

    x has the dims of `layout`, and its sizes along those that `layout` cuts. Gradients of a plain x are zero outside
    the part, so that over all ranks they add up to that of the whole.
    """
    if layout.flat:
        return cut_out(gather(x), layout)
    if isinstance(x, SpatialTensor):
        elsewhere = [axis for axis in layout.grid.axes if x.layout.dims[axis] not in (None, layout.dims[axis])]
        x = gather_axes(x, elsewhere) if elsewhere else x
    return part_of(x, layout, x.dim(), "a tensor")


def contract(
    name: str, function: Callable[..., Tensor], operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels
) -> Tensor:
    """`function` of the operands, whose dims have these labels; those that `result` has not are summed over.

    Over axes that are summed, all ranks add up.
    """
    first: Layout | None = None
    key: list[Any] = [labels, result]
    for x in operands:
        key.append(x.shape)
        if isinstance(x, SpatialTensor):
            first = x.layout if first is None else first
            key.append(True if x.layout is first else x.layout)
    of_call = tuple(key)
    local: Layout | None = None if first is None else first.known(of_call)
    if local is not None:  # most calls: each rank multiplies what it has
        return wrap(function(*[x.local if isinstance(x, SpatialTensor) else x for x in operands]), local)
    alone = _under_one_label(_one_pixel_gathered(operands, labels), labels, result, {})
    lead = next((x for x in alone if isinstance(x, SpatialTensor)), None)
    if lead is None:
        return function(*alone)
    try:
        axes = _axes_of(alone, labels, result, name)
    except Unlike as unlike:
        opened = [gather_axes(x, ()) for x in operands]
        if all(x is y for x, y in zip(opened, operands, strict=True)):
            raise refusal(name, str(unlike)) from None
        return contract(name, function, opened, labels, result)
    layout = Layout(lead.layout.grid, axes.tiling(lead.layout.tiling), lead.layout.dims)
    once = {label: flat for label, flat in axes.flats.items() if label not in result and not layout.first_along(flat)}
    parts = []
    for x, names in zip(alone, labels, strict=True):
        part = _part(x, names, axes, layout, name)
        for label, flat in once.items():  # another rank speaks for the entries that every rank has
            if label in names and part.shape[names.index(label)] != 1:
                part = between_copies(part, flat, names.index(label))
        parts.append(part)
    summed = tuple(axis for axis, (label, _) in axes.held.items() if label not in result)
    layout = axes.layout(lead.layout, result)
    if first is not None and not summed and all(map(is_, parts, map(local_part, operands))):
        first.cached(of_call, lambda: layout)
    return add_up(function(*parts), layout, summed)


def _one_pixel_gathered(operands: Sequence[Tensor], labels: Sequence[Labels]) -> list[Tensor]:
    """The operands, with an axis of one pixel on all ranks if it broadcasts against more pixels of another one."""

    if not any(1 in x.shape for x in operands if isinstance(x, SpatialTensor)):
        return list(operands)

    def gathered(x: Tensor, names: Labels) -> Tensor:
        single = []
        for axis, dim in enumerate(x.layout.dims if isinstance(x, SpatialTensor) else ()):
            if dim is not None and x.shape[dim] == 1:
                others = ((y, place) for y, place in zip(operands, labels, strict=True) if names[dim] in place)
                if any(y.shape[place.index(names[dim])] != 1 for y, place in others):
                    single.append(axis)
        return gather_axes(x, single) if single else x

    return [gathered(x, names) for x, names in zip(operands, labels, strict=True)]


def _places(x: Tensor, names: Labels) -> dict[int, Hashable]:
    """The label of each axis in one operand."""
    dims = x.layout.dims if isinstance(x, SpatialTensor) else ()
    return {axis: names[dim] for axis, dim in enumerate(dims) if dim is not None}


def _under_one_label(
    operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels, kept: dict[int, Hashable]
) -> list[Tensor]:
    """The operands, where an axis that stands under several labels, as in q @ k.T, is gathered under all but one.

    If `kept` does not tell which, it is kept in the longest of the dims that the result has, or else in the first
    operand. That of features is kept in the last one: of tokens that ranks share they come to have all, rather than all
    of the parameter.
    """
    given = tuple(kept)
    for x, names in zip(operands, labels, strict=True):
        features = x.layout.grid.features if isinstance(x, SpatialTensor) else None
        if features is not None and features not in given and features in (places := _places(x, names)):
            kept[features] = places[features]
    length: dict[int, int] = {}  # of the dim where an axis is kept
    for wanted in (True, False):
        for x, names in zip(operands, labels, strict=True):
            for axis, label in _places(x, names).items():
                size = x.shape[names.index(label)]
                longer = axis not in kept or (wanted and axis in length and size > length[axis])
                if longer and (label in result or not wanted):
                    kept[axis], length[axis] = label, size
    found = []
    for x, names in zip(operands, labels, strict=True):
        axes = [axis for axis, label in _places(x, names).items() if label != kept[axis]]
        if axes and isinstance(x, SpatialTensor) and x.layout.grid.features in axes:
            axes.remove(x.layout.grid.axes[-1])
            x = with_all_features(x)
        found.append(gather_axes(x, axes) if axes else x)
    return found


def _axes_of(operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels, name: str) -> Axes:
    """The axes of all operands. Raises Unlike where one stands under several labels, or a flat dim is not alike.

    Nothing is exchanged where all hold what the first one owns, wherever the others are cut; along what is summed each
    rank has what it owns.
    """
    held: dict[int, tuple[Hashable, Split]] = {}
    flats: dict[Hashable, Flat] = {}
    spread = [(x, names) for x, names in zip(operands, labels, strict=True) if isinstance(x, SpatialTensor)]
    for x, names in spread:
        for axis, dim in enumerate(x.layout.dims):
            if dim is None:
                continue
            split = x.layout.tiling.splits[axis]
            label, known = held.setdefault(axis, (names[dim], split))
            if label != names[dim] or names.count(label) > 1:
                raise Unlike("an axis of the image would be multiplied with another dim")
            if known.size != split.size and any(y.layout.flat for y, _ in spread):
                raise Unlike("operands have an axis of the image in other units")
            if known.size != split.size:
                raise RuntimeError(f"{name}: sizes {known.size} and {split.size} along {label} must match")
            if known != split:
                held[axis] = label, _held_by_both(known, split)
        for flat in x.layout.flat:
            if flats.setdefault(names[flat.dim], flat)[1:] != flat[1:]:
                raise Unlike(OTHER_AXES)
    for x, names in spread:
        for label in flats:
            dim = names.index(label) if label in names else None
            if dim is not None and x.shape[dim] != 1 and x.layout.cut(dim) and x.layout.flat_at(dim) is None:
                raise Unlike(OTHER_AXES)
    parts = spread[0][0].layout.grid.shape
    cut = [label for axis, (label, _) in held.items() if label not in flats and parts[axis] > 1]
    if len(set(cut)) < len(cut):
        raise Unlike("two axes of the image are multiplied with each other")
    for axis, (label, split) in list(held.items()):
        if label not in result:
            held[axis] = label, split.narrow()
        elif parts[axis] == 1 and label in cut:  # an ordinary dim, beside another axis
            del held[axis]
    return Axes(held, flats)


@lru_cache(maxsize=1024)
def _held_by_both(first: Split, other: Split) -> Split:
    """The first's cuts, and what parts hold by both; what they own, if another one is cut so that they lack of that."""
    both = tuple(a.intersect(b) for a, b in zip(first.held, other.held, strict=True))
    enough = all(held.covers(first.owned(part)) for part, held in enumerate(both))
    return Split(first.cuts, both) if enough else first.narrow()


def _part(x: Tensor, names: Labels, axes: Axes, layout: Layout, function: str) -> Tensor:
    """This rank's part of an operand: of what it has whole, those entries that belong to the axes of the others."""
    present: tuple[int | None, ...] = (None,) * len(layout.dims)
    local, shape = x, x.shape
    if isinstance(x, SpatialTensor):
        present, tiling = x.layout.dims, x.layout.tiling
        for axis, (_, split) in axes.held.items():
            if present[axis] is not None:
                if split.size != tiling.splits[axis].size:
                    raise refusal(function, f"an operand of shape {tuple(shape)} has an axis in other units")
                if split is not tiling.splits[axis]:
                    tiling = tiling.replace(axis, split)
        local = x.local if tiling is x.layout.tiling else retile(x, tiling).local
    for label, flat in axes.flats.items():
        whole = all(factor.axis is None or present[factor.axis] is None for factor in flat.factors)
        if whole and label in names and shape[names.index(label)] != 1:
            local = part_along(local, names.index(label), layout, flat)
    crop: list[int | None] = [None] * len(layout.dims)
    for axis, (label, split) in axes.held.items():
        if present[axis] is None and label in names and label not in axes.flats:
            size = shape[names.index(label)]
            if size not in (1, split.size):
                raise refusal(
                    function, f"a plain operand has shape {tuple(shape)} where the image is {layout.tiling.size}"
                )
            crop[axis] = names.index(label) if size == split.size else None
    if all(dim is None for dim in crop):
        return local
    return narrow(local, crop, layout.tiling.whole, layout.held)


def _laid_alike(operands: Sequence[Tensor]) -> list[Tensor] | None:
    """The operands, where one of them has another layout than the first of the same shape, in that; None if none has.

    Those that broadcast stay as they are.
    """
    lead = next(x for x in operands if isinstance(x, SpatialTensor))
    found, changed = list(operands), False
    if lead.layout.grid.arrangement.shares_tokens or len(lead.shape) < max(x.dim() for x in operands):
        return None
    layout = lead.layout.narrow
    for i, x in enumerate(operands):
        if isinstance(x, SpatialTensor) and x.shape == lead.shape and x.layout != layout and x is not lead:
            anew = redistribute(x, layout)
            if anew is None:
                return None
            found[i], changed = anew, True
    return found if changed else None
