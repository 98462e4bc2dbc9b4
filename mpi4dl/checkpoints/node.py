"""JSON that anybody may have edited: parsed, and read field by field; whatever is wrong with it is one error."""

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

MOST_LEVELS = 100
LARGEST = 2**64 - 1  # as seeds of PyTorch are; other numbers are far smaller
MOST = 2**63 - 1  # of what PyTorch, and the system, count

T = TypeVar("T")


class Damaged(ValueError):
    """A file does not hold what was written to it; the message says what is wrong."""


class Unreadable(ValueError):
    """A file may be whole, but cannot be read here and now: a disk that fails, no permission, another format."""


@dataclass(frozen=True)
class Machine:
    """A value of a parsed file, and where it stands. Its methods raise Damaged unless it is what they want."""

    plain: Any
    where: str

    def wrong(self, wanted: str) -> Damaged:
        return Damaged(f"{self.where} is {reprlib.repr(self.plain)}, but must be {wanted}")

    def integer(self, least: int = 0, most: int = MOST) -> int:
        if not isinstance(self.plain, int) or isinstance(self.plain, bool) or not least <= self.plain <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.plain

    def number(self) -> float:
        if not isinstance(self.plain, int | float) or isinstance(self.plain, bool):
            raise self.wrong("a number")
        return float(self.plain)

    def flag(self) -> bool:
        if not isinstance(self.plain, bool):
            raise self.wrong("true or false")
        return self.plain

    def text(self) -> str:
        if not isinstance(self.plain, str):
            raise self.wrong("text")
        return self.plain

    def items(self, count: int | None = None) -> "list[Machine]":
        """The values of a list, of this length if one is named."""
        if not isinstance(self.plain, list) or len(self.plain) != (len(self.plain) if count is None else count):
            raise self.wrong("a list" if count is None else f"a list of {count}")
        return [Machine(item, f"{self.where}[{number}]") for number, item in enumerate(self.plain)]

    def entries(self) -> "dict[str, Machine]":
        """The values of an object by their keys."""
        if not isinstance(self.plain, dict):
            raise self.wrong("an object")
        return {key: Machine(item, f"{self.where}: {reprlib.repr(key)}") for key, item in self.plain.items()}

    def at(self, key: str) -> "Machine":
        found = self.entries()
        if key not in found:
            raise Damaged(f"{self.where} has no {key!r}")
        return found[key]

    def optional(self, read: "Callable[[Machine], T]") -> T | None:
        """What `read` makes of it; None if it is null."""
        return None if self.plain is None else read(self)


def parse(data: bytes, file: str) -> Machine:
    """What a file of JSON holds. Raises Damaged for what is no JSON, and for nests and numbers beyond all use."""
    try:
        plain = json.loads(
            data, parse_constant=_no_number, parse_int=_integer, parse_float=_finite, object_pairs_hook=_unique
        )
        if _is_deeper(plain, MOST_LEVELS):
            raise ValueError(f"it is nested more than {MOST_LEVELS} deep")
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from None
    return Machine(plain, file)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > len(str(LARGEST)) + 1 or abs(int(text)) > LARGEST:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return float(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _is_deeper(plain: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than so many levels deep."""
    some = [plain]
    for _ in range(levels + 1):
        some = [inner for one in some for inner in _inner(one)]
    return bool(some)


def _inner(plain: Any) -> list[Any]:
    return plain if isinstance(plain, list) else list(plain.values()) if isinstance(plain, dict) else []
