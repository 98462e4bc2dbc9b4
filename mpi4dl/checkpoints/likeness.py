"""Whether a setting that was read could stand where another stands: 0.5 for 1, a tuple of numbers for such a tuple."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor


def unlike(found: Mapping[Any, Any], expected: Mapping[Any, Any], optional: Collection[Any] = ()) -> str | None:
    """What is wrong with settings that are to replace others; None if nothing is.

    All of the others must be there but the `optional` ones, and each must be of its kind. There may be more: a schedule
    notes things in an optimizer's options, for instance.
    """
    for name, value in expected.items():
        if name not in found:
            if name in optional:
                continue
            return f"{name!r} is missing"
        if not _is_like(found[name], value):
            return f"{name!r} is {reprlib.repr(found[name])}, which cannot stand for {reprlib.repr(value)}"
    reserved = next((name for name in found if name in RESERVED and name not in expected), None)
    return None if reserved is None else f"{reserved!r} is no option"


RESERVED = ("params", "param_names")


def _is_like(found: Any, expected: Any) -> bool:
    kind = _kind(expected)
    if kind in ("list", "tuple"):
        return _kind(found) == kind and len(found) == len(expected) and all(map(_is_like, found, expected))
    allowed = {None: (None, "flag", "number"), "flag": (None, "flag")}.get(kind, (kind,))
    return _kind(found) in allowed


def _kind(value: Any) -> str | None:
    """What of values may take each other's place."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 else f"tensor of {tuple(value.shape)}"
    kinds = {"flag": bool, "number": int | float, "text": str, "list": list, "tuple": tuple, "mapping": Mapping}
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), type(value).__name__)
