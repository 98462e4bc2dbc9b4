"""Settings as JSON, exactly: what optimizers and schedulers remember beside tensors of parameters.

JSON has no tuples, no keys but text, no infinity and no tensors: these become objects with one key that says what it
was, such as {"tuple": [0.9, 0.999]}.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpi4dl.checkpoints.node import LARGEST, MOST_LEVELS, Machine

TAGS = ("tuple", "pairs", "counter", "float", "tensor")
DEEPEST = MOST_LEVELS // 4  # each level of a dict without text keys takes three, and a tensor has levels of its own


def encode(value: Any, levels: int = DEEPEST) -> Any:
    """What `json.dumps` takes. Raises ValueError for what has no such form, such as a function."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"a number of {value.bit_length()} bits cannot be kept in a checkpoint: 64 are the most")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not levels:
        raise ValueError(f"values that are nested more than {DEEPEST} deep cannot be kept in a checkpoint")
    levels -= 1
    if isinstance(value, list):
        return [encode(item, levels) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, levels) for item in value]}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) and key not in TAGS for key in value):
            return {key: encode(item, levels) for key, item in value.items()}
        tag = "counter" if isinstance(value, Counter) else "pairs"
        return {tag: [[encode(key, levels), encode(item, levels)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        values = encode(value.tolist(), max(levels, value.dim() + 1))
        return {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "values": values}}
    if hasattr(value, "item"):  # a number of numpy
        return encode(value.item())
    raise ValueError(f"{value!r} cannot be kept in a checkpoint: only numbers, text, tensors and nests of them can")


def decode(node: Machine) -> Any:
    """What was encoded. Raises Damaged for what cannot have been."""
    if isinstance(node.plain, list):
        return [decode(item) for item in node.items()]
    if not isinstance(node.plain, dict):
        return node.plain
    entries = node.entries()
    tag = next(iter(entries)) if len(entries) == 1 else ""
    if tag not in TAGS:
        return {key: decode(item) for key, item in entries.items()}
    inner = entries[tag]
    if tag == "tuple":
        return tuple(decode(item) for item in inner.items())
    if tag == "float":
        if inner.text() not in ("nan", "inf", "-inf"):
            raise inner.wrong("nan, inf or -inf")
        return float(inner.plain)
    if tag == "tensor":
        return _tensor(inner)
    return _pairs(inner, counts=tag == "counter")


def _tensor(node: Machine) -> Tensor:
    dtype, values = getattr(torch, node.at("dtype").text(), None), node.at("values")
    if not isinstance(dtype, torch.dtype):
        raise node.at("dtype").wrong("a dtype of PyTorch")
    try:
        return torch.tensor(decode(values), dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise values.wrong(f"the values of a tensor of {dtype}") from None


def _pairs(node: Machine, counts: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = Counter() if counts else {}
    for pair in node.items():
        key, value = pair.items(2)
        try:
            found[decode(key)] = value.integer() if counts else decode(value)
        except TypeError:
            raise key.wrong("the key of a dict") from None
    return found
