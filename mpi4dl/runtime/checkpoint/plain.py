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

TAGS = ("tuple", "pairs", "counter", "float", "tensor")


def encode(value: Any) -> Any:
    """What `json.dumps` takes. Raises ValueError for what has no such form, such as a function."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and all(isinstance(key, str) and key not in TAGS for key in value):
            return {key: encode(item) for key, item in value.items()}
        tag = "counter" if isinstance(value, Counter) else "pairs"
        return {tag: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        return {"tensor": {"dtype": str(value.dtype).removeprefix("torch."), "values": encode(value.tolist())}}
    if hasattr(value, "item"):  # a number of numpy
        return encode(value.item())
    raise ValueError(f"{value!r} cannot be kept in a checkpoint: only numbers, text, tensors and nests of them can")


def decode(plain: Any) -> Any:
    """What was encoded."""
    if isinstance(plain, list):
        return [decode(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain)) if len(plain) == 1 else ""
    inner: Any = plain.get(tag)
    if tag == "float":
        return float(inner)
    if tag == "tuple":
        return tuple(decode(item) for item in inner)
    if tag == "tensor":
        return torch.tensor(decode(inner["values"]), dtype=getattr(torch, inner["dtype"]))
    if tag in ("pairs", "counter"):
        pairs = {decode(key): decode(item) for key, item in inner}
        return Counter(pairs) if tag == "counter" else pairs
    return {key: decode(item) for key, item in plain.items()}
