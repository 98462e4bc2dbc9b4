"""Operators that treat every pixel alike, recognised by PyTorch's own tag; and dropout."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from mpi4dl.comm.exchange import narrow, shape_of
from mpi4dl.geometry import Box, Interval, Split, Tiling, cut_alike
from mpi4dl.parallel.spatial.flattening import Unlike, between_copies, copies_in, cut_out, part_along
from mpi4dl.parallel.spatial.grid import Dims, Layout
from mpi4dl.parallel.spatial.halo import gather, gather_axes, retile, without_flat_dims
from mpi4dl.parallel.spatial.redistribution import redistribute
from mpi4dl.parallel.spatial.sums import share_alike
from mpi4dl.parallel.spatial.tensor import (
    ALIASES,
    Rule,
    SpatialTensor,
    function_name,
    named,
    provided_by,
    providers_of,
    refusal,
    register,
    register_fallback,
    wrap,
    writes,
)

# Pointwise too, but composed of others or not computing anything, so that PyTorch does not tag them.
UNTAGGED = (
    "softsign tanhshrink logsigmoid hardswish clone detach contiguous float double half bfloat16 int long bool type "
    "cpu cuda zeros_like ones_like full_like empty_like positive isclose copy_ conj resolve_conj resolve_neg"
).split()
SPELLED = {
    "truediv": "div",
    "rdiv": "div",
    "rtruediv": "div",
    "itruediv": "div",
    "floordiv": "floor_divide",
    "rfloordiv": "floor_divide",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
}


def is_pointwise(function: Any) -> bool:
    """Whether PyTorch tags the operator of this name as pointwise: `x + y`, `Tensor.add_`, `F.silu`, `x >= 0`."""
    name = getattr(function, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        names = [name, name[1:] if name[0] in "ir" else name, SPELLED.get(name, name)]
    else:
        name = name.strip("_").removeprefix("special_")
        names = [name, ALIASES.get(name, name)]
    return any(_tagged(known) for known in names if known.isidentifier())


NESTED = (list, tuple, dict)


def _tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    tags = [set(getattr(packet, overload).tags) for overload in packet.overloads()]
    random = any(torch.Tag.nondeterministic_seeded in known for known in tags)
    return not random and any(torch.Tag.pointwise in known for known in tags)


def align(operands: Sequence[Tensor], function: str, keep_first: bool = False) -> tuple[list[Tensor], Layout]:
    """The local parts of operands that broadcast against each other, all of one box, and its layout.

    SpatialTensors that are cut elsewhere than the first are cut anew; plain tensors, which every rank has whole, are
    cropped. With `keep_first` the first one, which is written in place, is not cut anew, but may come to hold less.
    """
    try:
        return _align(operands, function, keep_first)
    except Unlike as unlike:
        anew = _laid_alike(operands)
        if anew is not None:
            return align(anew, function, keep_first)
        opened = [x if keep_first and x is operands[0] else without_flat_dims(x) for x in operands]
        opened = _in_one_dim(opened)
        if all(x is y for x, y in zip(opened, operands, strict=True)):
            raise refusal(function, str(unlike)) from None
    if any(isinstance(x, SpatialTensor) for x in opened):
        return align(opened, function, keep_first)
    grid = next(x.layout.grid for x in operands if isinstance(x, SpatialTensor))
    return opened, Layout.of_copies(grid)


def _laid_alike(operands: Sequence[Tensor]) -> list[Tensor] | None:
    """The operands, where one of them has another layout than the first of the same shape, in that; None if none has.

    Those that broadcast stay as they are.
    """
    spread = [x for x in operands if isinstance(x, SpatialTensor)]
    lead, found, changed = spread[0], list(operands), False
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


def _in_one_dim(operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands; an axis that is several dims of them, as in x[:, None] == x, is gathered in all but the first."""
    place: dict[int, int] = {}
    found = []
    for x in operands:
        if isinstance(x, SpatialTensor):
            at = {axis: dim - x.dim() for axis, dim in enumerate(x.layout.dims) if dim is not None}
            elsewhere = [axis for axis, dim in at.items() if place.setdefault(axis, dim) != dim]
            x = gather_axes(x, elsewhere) if elsewhere else x
        found.append(x)
    return found


def _align(operands: Sequence[Tensor], function: str, keep_first: bool) -> tuple[list[Tensor], Layout]:
    alike = [x for x in operands if isinstance(x, SpatialTensor)]
    if len(alike) == len(operands) and all(
        x.layout == alike[0].layout and x.shape == alike[0].shape for x in alike[1:]
    ):
        return [x.local for x in alike], alike[0].layout
    operands = share_alike(operands, keep_first)
    ndim = max(x.dim() for x in operands)
    first = next(x for x in operands if isinstance(x, SpatialTensor))
    operands = [_broadcastable(x, operands) if isinstance(x, SpatialTensor) else x for x in operands]
    spread = [x for x in operands if isinstance(x, SpatialTensor)]
    if not spread:
        return list(operands), first.layout.with_dims(None for _ in first.layout.dims)

    def dims(x: SpatialTensor) -> Dims:
        return shift(x.layout.dims, 0, ndim - x.dim())

    lead = spread[0]
    splits = list(lead.layout.tiling.splits)
    place: list[int | None] = list(dims(lead))
    for x in spread[1:]:
        for axis, dim in enumerate(dims(x)):
            split = x.layout.tiling.splits[axis]
            if dim is None:
                continue
            if place[axis] is None:
                place[axis], splits[axis] = dim, split
            elif place[axis] != dim:
                raise Unlike(f"operands have an axis of the image in dims {place[axis]} and {dim}")
            elif splits[axis].size != split.size and (x.layout.flat or lead.layout.flat):
                raise Unlike(f"operands have an axis of the image in other units in dim {dim}")
            elif splits[axis].size != split.size:
                raise RuntimeError(f"{function}: sizes {splits[axis].size} and {split.size} of dim {dim} must match")
            else:
                # Nothing is exchanged where all hold what the first one owns, wherever the others are cut.
                splits[axis] = _held_by_both(splits[axis], split)
    flats = {flat.dim + ndim - x.dim(): flat for x in spread for flat in x.layout.flat}
    for dim, flat in flats.items():
        for x in spread:
            at = dim - ndim + x.dim()
            if at >= 0 and x.shape[at] != 1 and _made_of(x, at) != flat[1:] and x.layout.cut(at):
                raise Unlike(f"operands have different axes of the image in dim {dim}")
    together = tuple(flat._replace(dim=dim) for dim, flat in sorted(flats.items()))
    layout = Layout(lead.layout.grid, Tiling(tuple(splits)), tuple(place), together)
    if keep_first and lead is operands[0] and layout != lead.layout:
        if layout.dims != lead.layout.dims or not cut_alike(layout.tiling, lead.layout.tiling):
            raise refusal(function, "its first operand is written in place, but the others hold other pixels")
        lead.hold_less(layout.tiling)
    return [part_of(x, layout, ndim, function) for x in operands], layout


@lru_cache(maxsize=1024)
def _held_by_both(first: Split, other: Split) -> Split:
    """The first's cuts, and what parts hold by both; what they own, if another one is cut so that they lack of that."""
    both = tuple(a.intersect(b) for a, b in zip(first.held, other.held, strict=True))
    enough = all(held.covers(first.owned(part)) for part, held in enumerate(both))
    return Split(first.cuts, both) if enough else first.narrow()


def _made_of(x: SpatialTensor, dim: int) -> Any:
    flat = x.layout.flat_at(dim)
    return flat and flat[1:]


def _broadcastable(x: SpatialTensor, operands: Sequence[Tensor]) -> Tensor:
    """x, with an axis of one pixel gathered to all ranks if it broadcasts against more pixels of another operand."""
    single = []
    for axis, dim in enumerate(x.layout.dims):
        if dim is not None and x.layout.tiling.splits[axis].size == 1:
            places = [(other, dim + other.dim() - x.dim()) for other in operands]
            if any(place >= 0 and other.shape[place] != 1 for other, place in places):
                single.append(axis)
    return gather_axes(x, single) if single else x


def part_of(x: Tensor, layout: Layout, ndim: int, function: str) -> Tensor:
    """The part of an operand that broadcasts against a local tensor of this layout."""
    offset = ndim - x.dim()
    if isinstance(x, SpatialTensor):
        tiling = x.layout.tiling
        for axis, dim in enumerate(x.layout.dims):
            if dim is not None:
                wanted = layout.tiling.splits[axis]
                if wanted.size != tiling.splits[axis].size:
                    raise refusal(function, f"an operand of shape {tuple(x.shape)} has an axis in other units")
                tiling = tiling.replace(axis, wanted)
        present = x.layout.dims
        part = retile(x, tiling).local
    else:
        present = (None,) * len(layout.dims)
        part = x
    crop: list[int | None] = [None] * len(layout.dims)
    for flat in layout.flat:
        dim = flat.dim - offset
        if (
            dim >= 0
            and part.shape[dim] != 1
            and all(present[factor.axis] is None for factor in flat.factors if factor.axis is not None)
        ):
            part = part_along(part, dim, layout, flat)
    for axis, dim in enumerate(layout.dims):
        size = layout.tiling.splits[axis].size
        if dim is not None and layout.flat_at(dim):
            continue
        if dim is None or present[axis] is not None or dim < offset or (part.shape[dim - offset] == 1 and size != 1):
            continue
        if part.shape[dim - offset] != size:
            raise refusal(
                function, f"a plain operand has shape {tuple(x.shape)} where the image is {layout.tiling.size}"
            )
        crop[axis] = dim - offset
    whole = Box(*(Interval(0, split.size) for split in layout.tiling.splits))
    return narrow(part, crop, whole, layout.held)


def pointwise(function: Any) -> Rule:
    """The rule of a function that computes each pixel of its result from the same pixel of its arguments."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        leaves, rebuild = _taken_apart(args, kwargs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        in_place = writes(function, kwargs)
        operands = [leaves[i] for i in places]
        if in_place and not isinstance(operands[0], SpatialTensor):
            args, kwargs = rebuild([gather(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            return function(*args, **kwargs)
        if len(operands) == 1 and isinstance(operands[0], SpatialTensor):
            parts, layout = [operands[0].local], operands[0].layout
        else:
            parts, layout = align(operands, function_name(function), in_place)
        for i, part in zip(places, parts, strict=True):
            leaves[i] = part
        args, kwargs = rebuild(leaves)
        result = function(*args, **kwargs)
        providers = providers_of(operands)
        for operand, part in zip(operands, parts, strict=True):
            if result is part and isinstance(operand, SpatialTensor) and operand.layout == layout:
                return provided_by(operand, providers)
        for y in [result] if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if not _has_pixels_of(y, layout):
                raise refusal(function_name(function), "its result is no image")
        if isinstance(result, Tensor):
            return provided_by(wrap(result, layout), providers)
        return pytree.tree_map_only(Tensor, lambda y: provided_by(wrap(y, layout), providers), result)

    return rule


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """All values in the arguments, however nested, and what makes arguments of such values again."""
    if any(isinstance(value, NESTED) for value in args) or any(isinstance(value, NESTED) for value in kwargs.values()):
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return leaves, lambda leaves: pytree.tree_unflatten(leaves, structure)
    count, names = len(args), tuple(kwargs)  # a tree of them takes half of a small operator's time
    return [*args, *kwargs.values()], lambda leaves: (leaves[:count], dict(zip(names, leaves[count:], strict=True)))


def _has_pixels_of(y: Any, layout: Layout) -> bool:
    """Whether a result has the local part's pixels: some functions share their name with a pointwise operator."""
    if not isinstance(y, Tensor):
        return isinstance(y, str)  # what Tensor.type() returns
    return all(dim is None or dim < y.dim() for dim in layout.dims) and tuple(y.shape) == layout.local_shape(y.shape)


@register_fallback
def choose(function: Any) -> Rule | None:
    return pointwise(function) if is_pointwise(function) else None


for function in named(*UNTAGGED):
    register(function, flat=True)(pointwise(function))


for function in (Tensor.__floordiv__, Tensor.__rfloordiv__, *named("floor_divide")):
    register(function, flat=True)(pointwise(function))


@register(Tensor.to, Tensor.type_as, flat=True)
def to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In the type and on the device of another tensor, whose shape does not matter; or as the arguments say."""
    given = [*args, *kwargs.values()]
    other = next((x for x in given if isinstance(x, Tensor)), None)
    if other is not None:
        rest = [x for x in args if x is not other]
        named_rest = {name: x for name, x in kwargs.items() if x is not other}
        return input.to(other.device, other.dtype, *rest, **named_rest)
    moved: Tensor = pointwise(Tensor.to)(input, *args, **kwargs)
    return moved


@register(torch.where, flat=True)
def where(condition: Tensor, *choices: Any, **kwargs: Any) -> Tensor:
    if not choices and not kwargs:
        raise refusal("torch.where(condition)", "how many indices there are depends on the pixels")
    return pointwise(torch.where)(condition, *choices, **kwargs)


@register(F.prelu, torch.prelu)
def prelu(input: SpatialTensor, weight: Tensor) -> Tensor:
    """One slope for all channels, or one for each entry of dim 1."""
    if input.layout.cut(1):
        raise refusal("torch.nn.functional.prelu", "dim 1 is not the channels here")
    return provided_by(wrap(F.prelu(input.local, weight), input.layout), input.providers)


def shift(dims: Dims, at: int, by: int) -> Dims:
    """The dims after `by` new ones came in (or, negative, went out) at position `at`."""
    return tuple(dim + by if dim is not None and dim >= at else dim for dim in dims)


# Dropout: by the mask that plain PyTorch would draw, of which each rank has its part; of what is large, another one.
#
# Ranks that share an image draw from generators in the same state, so that whatever is drawn for a replicated tensor is
# the same on all, and so is a mask for a whole that is small. A mask for tiles of what is too large to be drawn whole
# by each rank is drawn from another generator, seeded by one such draw and the tile's place: independent on every tile.

DRAWN_WHOLE = 1 << 24  # so many numbers at most: 64 MiB in float32, for a moment


def _generator(layout: Layout, rank: int, seed: int, device: torch.device) -> torch.Generator:
    """The generator of a rank's tile, the same for ranks that hold copies."""
    place = 0
    for axis, (dim, coordinate) in enumerate(zip(layout.dims, layout.grid.shape.coordinates(rank), strict=True)):
        place = place * layout.grid.shape[axis] + (coordinate if dim is not None else 0)
    return torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)


def _draw(x: SpatialTensor, keep: Tensor, share: float) -> None:
    """Fill `keep`, of the size of x's local part, with ones for this share of the pixels, as their owners draw them."""
    if x.is_meta:
        return
    layout, seed = x.layout, int(torch.randint(2**62, ()))
    if not layout.wide:
        keep.bernoulli_(share, generator=_generator(layout, layout.grid.rank, seed, keep.device))
        return
    for rank in layout.grid.ranks_along(tuple(axis for axis, dim in enumerate(layout.dims) if dim is not None)):
        theirs = layout.tiling.owned(rank)
        both = theirs.intersect(layout.held)
        if not both.empty:
            drawn = keep.new_empty(shape_of(theirs, layout.dims, keep.shape))
            drawn.bernoulli_(share, generator=_generator(layout, rank, seed, keep.device))
            narrow(keep, layout.dims, layout.held, both).copy_(narrow(drawn, layout.dims, theirs, both))


@register(F.dropout, torch.dropout, flat=True)
def dropout(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The halo that is held is dropped as its owner drops it."""
    if not training or p == 0:
        return input
    keep = _part_of_whole(input, 1 - p) if input.shape.numel() <= DRAWN_WHOLE else _of_tiles(input, 1 - p)
    scaled = keep.div_(1 - p) if p < 1 else keep
    return wrap(input.local.mul_(scaled) if inplace else input.local * scaled, input.layout)


def _part_of_whole(input: SpatialTensor, share: float) -> Tensor:
    """This rank's part of the mask of the whole, drawn in the order in which the input lies in memory."""
    local = input.local
    strides = local.stride()
    order = sorted(range(input.dim()), key=lambda dim: (-strides[dim], dim))
    whole = torch.empty_permuted(input.shape, order, dtype=local.dtype, device=local.device)
    keep = torch.empty_like(local)
    return keep.copy_(cut_out(whole.bernoulli_(share), input.layout))


def _of_tiles(input: SpatialTensor, share: float) -> Tensor:
    keep = torch.empty_like(input.local)
    for flat in input.layout.flat:  # what every rank has is dropped alike
        for start, length in copies_in(keep.shape[flat.dim], flat):
            keep.narrow(flat.dim, start, length).bernoulli_(share)
    rest = keep
    for flat in input.layout.flat:
        rest = between_copies(rest, flat)
    _draw(input, rest, share)
    return keep


def _whole_channels(function: Any, without_batch: int | None) -> Callable[..., Tensor]:
    """Channels are dropped in the whole image, by the mask that PyTorch would draw: for each entry of dims 0 and 1, or
    of dim 0 in a tensor of `without_batch` dims.
    """

    def rule(input: SpatialTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = 1 if input.dim() == without_batch else 2
        mask = function(input.local.new_ones([n if d < kept else 1 for d, n in enumerate(input.shape)]), p, training)
        if not training or p == 0:
            return input
        return input.mul_(mask) if inplace else input * mask

    return rule


for function, without_batch in ((F.dropout1d, 2), (F.dropout2d, None), (F.dropout3d, 4)):
    register(function)(_whole_channels(function, without_batch))


@register(*named("rand_like", "randn_like", "bernoulli", "rrelu", "alpha_dropout", "feature_alpha_dropout"))
def random_pixels(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    raise refusal("random pixels", "every rank would have to draw the random numbers of the whole image")
