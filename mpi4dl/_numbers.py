"""Numbers and text in files from elsewhere: JSON with numbers of any size, text that a spreadsheet would compute."""

import json
import math
import re
from typing import Any

LARGEST = 1e100  # whose square is a number too
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


def as_cell(value: Any) -> Any:
    """A value for a table that people open in a spreadsheet: a text that begins a formula has a ' before it."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) and number_in(value) is None else value


def of_cell(text: str) -> str:
    """The text that `as_cell` made such a cell of."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text
