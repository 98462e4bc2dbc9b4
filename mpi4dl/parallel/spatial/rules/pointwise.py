"""Operators that treat every pixel alike, recognised by PyTorch's own tag."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.parallel.spatial.alignment import align
from mpi4dl.parallel.spatial.grid import Dims, Layout
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.tensor import (
    ALIASES,
    Rule,
    SpatialTensor,
    function_name,
    halo_sources_of,
    named,
    refusal,
    register,
    register_fallback,
    with_halo_sources,
    wrap,
    writes,
)

# Pointwise too, but composed of others or not computing anything, so that PyTorch does not tag them; `leaky_relu` not
# in 2.10.
UNTAGGED = (
    "leaky_relu softsign tanhshrink logsigmoid hardswish clone detach contiguous float double half bfloat16 int long "
    "bool type cpu cuda zeros_like ones_like full_like empty_like positive isclose copy_ conj resolve_conj resolve_neg"
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
COMPOUND = (Tensor, *NESTED)
PLAIN = (Tensor, torch.nn.Parameter)


def _tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    tags = [set(getattr(packet, overload).tags) for overload in packet.overloads()]
    random = any(torch.Tag.nondeterministic_seeded in known for known in tags)
    return not random and any(torch.Tag.pointwise in known for known in tags)


def pointwise(function: Any) -> Rule:
    """The rule of a function that computes each pixel of its result from the same pixel of its arguments."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        in_place, alike = writes(function, kwargs), _alike(args, kwargs)
        if alike is not None:  # most calls: nothing needs to be found out
            x, result = args[0], function(*alike, **kwargs)
            if in_place:
                return with_halo_sources(x, halo_sources_of(args))
            if result is alike[0]:
                return x
            if type(result) is Tensor and result.shape == alike[0].shape:
                alone = SpatialTensor(result, x.layout)
                if x.halo_sources:
                    alone.halo_sources = halo_sources_of(args)
                return alone
        leaves, rebuild = _taken_apart(args, kwargs)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0]
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
        halo_sources = halo_sources_of(operands)
        for operand, part in zip(operands, parts, strict=True):
            if result is part and isinstance(operand, SpatialTensor) and operand.layout == layout:
                return with_halo_sources(operand, halo_sources)
        for y in [result] if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if not _has_pixels_of(y, layout):
                raise refusal(function_name(function), "its result is no image")
        if isinstance(result, Tensor):
            return with_halo_sources(wrap(result, layout), halo_sources)
        return pytree.tree_map_only(Tensor, lambda y: with_halo_sources(wrap(y, layout), halo_sources), result)

    return rule


def _alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The arguments with the local parts of tensors, which all have one layout and shape, or are plain and the same for
    all pixels; None for all others.
    """
    first = args[0] if args else None
    if type(first) is not SpatialTensor:
        return None
    found: list[Any] = [first.local]
    for value in args[1:]:
        if type(value) is SpatialTensor:
            if value.layout is not first.layout or value.shape != first.shape:
                return None
            found.append(value.local)
        elif isinstance(value, COMPOUND) and not _is_same_everywhere(value, first):
            return None
        else:
            found.append(value)
    return None if kwargs and any(isinstance(value, COMPOUND) for value in kwargs.values()) else found


def _is_same_everywhere(value: Any, x: SpatialTensor) -> bool:
    """Whether this is a plain tensor that is broadcast along all dims that ranks share of x, as one for channels."""
    if type(value) not in PLAIN or value.dim() > x.dim() or x.layout.flat:
        return False
    shape, more = value.shape, x.dim() - value.dim()
    return all(dim is None or dim < more or shape[dim - more] == 1 for dim in x.layout.dims)


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


for function in (Tensor.__floordiv__, Tensor.__rfloordiv__, *named("floor_divide", "zero_")):
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
    memory_format = kwargs.pop("memory_format", torch.preserve_format)
    moved: Tensor = pointwise(Tensor.to)(input, *args, **kwargs) if args or kwargs else input
    return moved if memory_format is torch.preserve_format else moved.contiguous(memory_format=memory_format)


@register(torch.where, flat=True)
def where(condition: Tensor, *choices: Any, **kwargs: Any) -> Tensor:
    if not choices and not kwargs:
        raise refusal("torch.where(condition)", "how many indices there are depends on the pixels")
    return pointwise(torch.where)(condition, *choices, **kwargs)


def _of_channels(function: Any) -> Rule:
    """The rule of a function of the channels (dim 1) of each pixel, the same for every pixel."""

    def rule(input: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.layout.cut(1):
            raise refusal(function_name(function), "dim 1 is not the channels here")
        x = input.local if input.local.numel() else input.local.to(torch.result_type(input.local, 1.0))
        return with_halo_sources(wrap(function(x, *args, **kwargs), input.layout), input.halo_sources)

    return rule


for name in ("prelu", "channel_shuffle", "local_response_norm"):
    for function in named(name):
        register(function)(_of_channels(function))


def shift(dims: Dims, at: int, by: int) -> Dims:
    """The dims after `by` new ones came in (or, negative, went out) at position `at`."""
    return tuple(dim + by if dim is not None and dim >= at else dim for dim in dims)
