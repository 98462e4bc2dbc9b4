"""Tensors in a user's lists, mappings and dataclasses: others instead of them, and changes of a copy brought back."""

import copy
import dataclasses
import operator
from collections.abc import Callable, MutableMapping, MutableSequence
from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mpi4dl.parallel.inputs import tensors_within


class EachOnce:
    """A function of tensors that is called once for each: `found` are the tensor, the result, and its writes so far."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self.found: dict[int, tuple[Tensor, Tensor, int]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if id(x) not in self.found:
            y = self._function(x)
            self.found[id(x)] = x, y, y._version if type(y) is Tensor and y.requires_grad else 0
        return self.found[id(x)][1]


def mapped(
    value: Any, of: Callable[[Tensor], Tensor], lenient: bool = False, copies: "list[CopiedNest] | None" = None
) -> Any:
    """`value` with `of(x)` for each tensor in tuples, lists, mappings, dataclasses, and what PyTorch knows as nests;
    itself, if nothing in it changed. `lenient`: other objects pass as they are. `copies` gets those of lists,
    mappings and dataclasses.

    Raises:
        TypeError: some other object has tensors, or may make them, which nobody would see.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        found = [mapped(x, of, lenient, copies) for x in value]
        return value if all(map(operator.is_, found, value)) else kind(*found)
    if kind is tuple:
        found = [mapped(x, of, lenient, copies) for x in value]
        return value if all(map(operator.is_, found, value)) else tuple(found)
    if isinstance(value, MutableMapping | MutableSequence) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        other = _mapped_object(value, of, lenient, copies)
        if copies is not None and other is not value:
            copies.append(CopiedNest(value, other))
        return other
    if kind in pytree.SUPPORTED_NODES:
        leaves, structure = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
        return pytree.tree_unflatten([mapped(x, of, lenient, copies) for x in leaves], structure)
    if not lenient and (isinstance(value, GeneratorType) or next(tensors_within(value), None) is not None):
        raise TypeError(
            f"a {kind.__name__} with tensors goes in or out of a model on tiles, or stays in it: use tensors, tuples, "
            "lists, dicts, dataclasses, or make it known by torch.utils._pytree.register_pytree_node"
        )
    return value


def _mapped_object(value: Any, of: Callable[[Tensor], Tensor], lenient: bool, copies: "list[CopiedNest] | None") -> Any:
    """The same of a mapping, a list, or a dataclass: a copy with its items and attributes."""
    items, attributes = _contents(value)
    new_items, new = ({key: mapped(x, of, lenient, copies) for key, x in each.items()} for each in (items, attributes))
    if all(x is items[key] for key, x in new_items.items()) and all(x is attributes[name] for name, x in new.items()):
        return value
    other = copy.copy(value)
    for key, x in new_items.items():
        other[key] = x
    for name, x in new.items():
        object.__setattr__(other, name, x)
    return other


def _contents(value: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The items and attributes of a mapping, a list, or a dataclass."""
    names = [*getattr(value, "__dict__", {})]
    if dataclasses.is_dataclass(value):
        names += [each.name for each in dataclasses.fields(value) if each.name not in names]
    keys = list(value) if isinstance(value, MutableMapping) else range(len(value)) if hasattr(value, "insert") else ()
    return {key: value[key] for key in keys}, {name: getattr(value, name) for name in names if hasattr(value, name)}


class CopiedNest:
    """A list, mapping or dataclass `value` that a model was given as a `copy`."""

    def __init__(self, value: Any, copy: Any) -> None:
        self._value, self._copy, self._before = value, copy, _contents(copy)

    def change_back(self, of: Callable[[Tensor], Tensor]) -> None:
        """Let `value` be what the model has made of the copy."""
        value, of_value = self._value, _contents(self._value)
        for place, (now, before) in enumerate(zip(_contents(self._copy), self._before, strict=True)):
            if list(now) == list(before) and all(x is before[key] for key, x in now.items()):
                continue
            known = {id(x): of_value[place][key] for key, x in before.items()}
            now = {key: known[id(x)] if id(x) in known else mapped(x, of) for key, x in now.items()}
            if place:
                for name, x in now.items():
                    object.__setattr__(value, name, x)
            elif isinstance(value, MutableMapping):
                for key in before.keys() - now.keys():
                    del value[key]
                value.update(now)
            else:
                value[:] = now.values()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that `mapped` finds."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(value, note, lenient=True)
    return found
