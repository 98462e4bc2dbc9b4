"""Values in files from elsewhere: JSON with numbers of any size, or of declared types; text as a spreadsheet has it."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

LARGEST = 1e100  # whose square is a number too
MOST = 2**63 - 1  # of what PyTorch, and the system, count
FORMULA = re.compile(r"'*[=+\-@\t\r]")


def parse_json(content: str | bytes) -> Any:
    """The value of JSON, in which numbers beyond any that mean something are infinite, or 0. Raises ValueError."""
    return json.loads(content, parse_int=_whole, parse_float=_bounded)


def _whole(text: str) -> int | float:
    return int(text) if len(text) < 20 else _bounded(text)


def _bounded(text: Any) -> float:
    number = float(text)
    if 1 / LARGEST < abs(number) < LARGEST or math.isnan(number):
        return number
    return math.copysign(math.inf, number) if abs(number) >= LARGEST else 0.0


def number_in(value: Any) -> float | None:
    """A finite number of a file, or text that is one; None for anything else."""
    try:
        number = _bounded(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class Damaged(ValueError):
    """A file does not hold what was written to it; the message says what is wrong."""


SCALARS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: True, "text"),
    bool: (lambda value: True, "true or false"),
    int: (lambda value: 0 <= value <= MOST, f"a whole number from 0 to {MOST}"),
    float: (lambda value: True, "a number"),
}


def typed(kind: Any, plain: Any, where: str) -> Any:
    """A value of JSON as an annotation says it. Raises Damaged, which says where it stands, and what it must be.

    `Annotated[int, accepts, wanted]` is a number that `accepts` takes. A class with annotated fields is made of an
    object that has them, perhaps among others, or of a list of their values; keys have no _ at their end.
    """

    def require(fits: bool, wanted: str) -> None:
        if not fits:
            raise Damaged(f"{where} is {reprlib.repr(plain)}, but must be {wanted}")

    origin, of = get_origin(kind), get_args(kind)
    if kind is Any or (plain is None and type(None) in of):
        return plain
    if type(None) in of:
        return typed(of[0], plain, where)
    if origin is Literal:
        require(plain in of, f"one of {', '.join(map(str, of))}")
        return plain
    if origin is Annotated or kind in SCALARS:
        base, accepts, wanted = of[:1] + kind.__metadata__ if origin is Annotated else (kind, *SCALARS[kind])
        require(type(plain) in ((int, float) if base is float else (base,)) and accepts(plain), wanted)
        return base(plain)
    if origin in (dict, Mapping):
        require(isinstance(plain, dict), "an object")
        return {key: typed(of[1], item, f"{where}: {reprlib.repr(key)}") for key, item in plain.items()}
    if origin in (list, Sequence) or of[-1:] == (...,):
        require(isinstance(plain, list), "a list")
        found = [typed(of[0], item, f"{where}[{number}]") for number, item in enumerate(plain)]
        return tuple(found) if origin is tuple else found
    fields = {} if origin is tuple else get_type_hints(kind, include_extras=True)
    kinds = of or tuple(fields.values())
    if isinstance(plain, list) or origin is tuple:
        require(
            isinstance(plain, list) and len(plain) == len(kinds),
            f"{'an object, or ' * bool(fields)}a list of {len(kinds)}",
        )
        each = enumerate(zip(kinds, plain, strict=True))
        found = [typed(of_item, item, f"{where}[{number}]") for number, (of_item, item) in each]
        return tuple(found) if origin is tuple else kind(*found)
    require(isinstance(plain, dict), "an object")
    values = {}
    for name, parameter in signature(kind).parameters.items():
        key = name.rstrip("_")
        if key in plain:
            values[name] = typed(fields[name], plain[key], f"{where}: {key!r}")
        elif parameter.default is parameter.empty:
            raise Damaged(f"{where} has no {key!r}")
    return kind(**values)


def as_cell(value: Any) -> Any:
    """A value for a table that people open in a spreadsheet: a text that begins a formula has a ' before it."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) and number_in(value) is None else value


def of_cell(text: str) -> str:
    """The text that `as_cell` made such a cell of."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text
