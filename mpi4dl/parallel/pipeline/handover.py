"""What one stage hands to the next: nested values as a list of tensors and a small header that says how they nest.

A live value need not be a tensor: AmoebaNet's cells pass on pairs, DenseNet's layers lists, FCN the size of its image.
Numbers and sizes travel in the header, as they are. To work them out again in a later stage would mean to send it the
whole tensor whose size is asked for, which is what a pipeline on huge images can least afford.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CONSTANTS = (bool, int, float, complex, str, type(None), type(...), torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class Slot:
    """Where a tensor was: its place in the list of tensors."""

    index: int


@dataclass(frozen=True)
class TensorSpec:
    """What a receiver must know of a tensor. `shape` is that of the whole image, on a SpatialTensor too.

    Nothing requires a gradient where none are recorded; PyTorch says so even there of a view of a parameter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Header:
    """How values nest, with a `Slot` for each tensor and the numbers between them; picklable, compared by `==`.

    It is the same for every microbatch of the same shapes in the same mode (train or eval, with or without gradients),
    unless the model computes Python numbers from the data (`x.max().item()`).
    """

    template: Any
    tensors: tuple[TensorSpec, ...]


def pack(values: Sequence[Any], names: Sequence[str] = ()) -> tuple[list[Tensor], Header]:
    """Take values apart: each tensor once, however often it occurs, in order of its first occurrence, and the header.

    `names` are what an error calls the values.

    Raises:
        ValueError: a value holds something that is no tensor, number, text, size, or nest of these.
    """
    tensors: dict[int, Tensor] = {}
    slots: dict[int, Slot] = {}
    template = []
    for i, value in enumerate(values):

        def part(leaf: Any, name: str = names[i] if names else f"number {i}") -> Any:
            if isinstance(leaf, Tensor):
                tensors.setdefault(id(leaf), leaf)
                return slots.setdefault(id(leaf), Slot(len(slots)))
            if isinstance(leaf, CONSTANTS):
                return leaf
            raise ValueError(
                f"value {name} holds a {type(leaf).__name__}, which no stage can hand to the next: tensors, numbers, "
                "text, sizes, and tuples, lists and dicts of them can be; cut the model where it is not alive"
            )

        template.append(map_leaves(part, value))
    recorded = torch.is_grad_enabled()
    specs = (TensorSpec(tuple(t.shape), t.dtype, t.requires_grad and recorded) for t in tensors.values())
    return list(tensors.values()), Header(tuple(template), tuple(specs))


def unpack(tensors: Sequence[Tensor], header: Header) -> tuple[Any, ...]:
    """Put together what `pack` took apart. A device in the header becomes that of the tensors received."""
    if len(tensors) != len(header.tensors):
        raise ValueError(f"{len(tensors)} tensors do not fit a header of {len(header.tensors)}")

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return tensors[leaf.index]
        return tensors[0].device if isinstance(leaf, torch.device) and tensors else leaf

    return map_leaves(part, header.template)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with the function's result for everything in it that is no tuple, list, dict or slice.

    Nor a nest that its library has made known to PyTorch, such as the outputs of Hugging Face's models.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if type(value) is tuple:
        return tuple(map_leaves(function, item) for item in value)
    if type(value) is list:
        return [map_leaves(function, item) for item in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, map_leaves(function, item)) for key, item in value.items())
    if isinstance(value, slice):
        return slice(*(map_leaves(function, item) for item in (value.start, value.stop, value.step)))
    if type(value) in pytree.SUPPORTED_NODES and type(value).__module__.partition(".")[0] != "torch":
        kind = pytree.SUPPORTED_NODES[type(value)]
        items, context = kind.flatten_fn(value)
        return kind.unflatten_fn([map_leaves(function, item) for item in items], context)
    return function(value)
