"""Names by patterns such as `layer1.*`: those that there are, and the nearest ones where a pattern has none."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

MOST_NAMED = 3

Names = Mapping[str, Sequence[str]]  # all names of each thing, by the first of them


def split_patterns(text: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns that stand with commas between them, or in a sequence."""
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(part.strip() for part in parts if part.strip())


def select(patterns: str | Sequence[str], names: Names, what: str = "parameter") -> list[str]:
    """The first names of all things of which some name matches one of the patterns, in their order.

    Patterns are as in Python's fnmatch: * is anything, dots too. Raises ValueError for a pattern that matches nothing.
    """
    chosen = split_patterns(patterns)
    for pattern in chosen:
        if not any(_matches(pattern, same) for same in names.values()):
            raise ValueError(f"no {what} has a name like {pattern!r}{_nearest(pattern, names)}")
    return [first for first, same in names.items() if any(_matches(pattern, same) for pattern in chosen)]


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def first_match(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """The first pattern that one of the names of a thing matches."""
    names = list(names)
    return next((pattern for pattern in patterns if _matches(pattern, names)), None)


def _nearest(pattern: str, names: Names) -> str:
    known = [name for same in names.values() for name in same]
    plain = pattern.strip("*.").replace("*", "")
    if any(name.startswith(f"{pattern}.") for name in known):
        return f"; write {pattern}.* for all that is in it"
    begin = [name for name in known if plain and plain in name]
    close = (begin or difflib.get_close_matches(plain, known, n=MOST_NAMED, cutoff=0.4) or known)[:MOST_NAMED]
    return f"; the nearest are {', '.join(close)}" if close else ": there is none at all"
