"""Values of flags for argparse: numbers, grids and words, and lists of them with commas between."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def whole(least: int = 1) -> Callable[[str], int]:
    """A whole number of at least `least`."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ArgumentTypeError(f"{text} is no whole number of at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """A finite number greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is no number greater than 0")
    return number


class Sides(tuple[int, ...]):
    """A number for each axis, with the text 2x2."""

    def __str__(self) -> str:
        return "x".join(map(str, self))


def grid(text: str) -> Sides:
    """A number for each axis, such as 2x2."""
    try:
        return Sides(map(whole(), text.split("x")))
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text} is no grid such as 1x2: each side is at least 1") from None


def one_of(*known: Any) -> Callable[[str], str]:
    """One of these words."""

    def read(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text}: choose of {', '.join(known)}")
        return text

    return read


def listed(kind: Callable[[str], T], sign: str = ",") -> Callable[[str], tuple[T, ...]]:
    """Several of a kind, each once."""
    return lambda text: tuple(dict.fromkeys(map(kind, text.split(sign))))
