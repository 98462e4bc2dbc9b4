"""Kinds of value that go by patterns of names: which ones, numbers for some, and from which epoch on."""

import math
from collections.abc import Mapping
from typing import Any

from mpi4dl._patterns import split_patterns
from mpi4dl.options.kinds import Kind


def _patterns(value: Any) -> tuple[str, ...]:
    if type(value) not in (str, list, tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError
    found = split_patterns(value)
    "".join(found).encode()
    return found


def _pairs(value: Any, sign: str) -> list[tuple[str, str]]:
    """What stands on both sides of the last sign of each piece."""
    pieces = [piece.rpartition(sign) for piece in _patterns(value)]
    if not all(left.strip() and right.strip() for left, _, right in pieces):
        raise ValueError
    return [(left.strip(), right.strip()) for left, _, right in pieces]


def _numbers(value: Any) -> dict[str, float]:
    pairs = list(value.items()) if isinstance(value, Mapping) else _pairs(value, "=")
    found: dict[str, float] = {}
    for pattern, number in pairs:
        if not isinstance(pattern, str) or isinstance(number, bool) or pattern in found:
            raise ValueError
        found[pattern] = float(number)
        if not math.isfinite(found[pattern]) or found[pattern] < 0:
            raise ValueError
    return found


def _epochs(value: Any) -> tuple[tuple[int, str], ...]:
    if isinstance(value, Mapping):
        pairs = [(epoch, pattern) for epoch, some in value.items() for pattern in _patterns(some)]
    elif type(value) in (list, tuple) and all(type(each) in (list, tuple) and len(each) == 2 for each in value):
        pairs = [(epoch, pattern) for epoch, pattern in value]
    else:
        split = [piece.partition(":") for piece in _patterns(value)]
        pairs = [(int(epoch), pattern.strip()) for epoch, _, pattern in split]
    for epoch, pattern in pairs:
        if type(epoch) is not int or epoch < 1 or not isinstance(pattern, str) or not pattern:
            raise ValueError
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


PATTERNS = Kind(
    "patterns of names with commas between them, such as layer1.*,bn*",
    "PATTERN,...",
    _patterns,
    raw=",".join,
)
NUMBERS = Kind(
    "numbers of at least 0 by patterns of names, such as head.*=0.01,*.bias=0",
    "PATTERN=X,...",
    _numbers,
    raw=lambda numbers: ",".join(f"{pattern}={number!r}" for pattern, number in numbers.items()),
)
EPOCHS = Kind(
    "patterns of names behind the number of an epoch from 1 on, such as 3:layer4.*,5:layer3.*",
    "N:PATTERN,...",
    _epochs,
    raw=lambda pairs: ",".join(f"{epoch}:{pattern}" for epoch, pattern in pairs),
)
