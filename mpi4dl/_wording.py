"""How numbers and commands are written for people: counts with their nouns, runs of ranks, bytes, tables, advice."""

import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

Tell = Callable[[str, int, int], None]  # what is done, and how much of how much, 0 of 0 where nobody can know


def quietly(doing: str, done: int = 0, total: int = 0) -> None:
    """Tell nobody."""


def to_install(*packages: str) -> str:
    """The command that installs packages for the Python that runs, as a shell takes it."""
    found = shutil.which("python")
    at_hand = found is not None and Path(found).parent == Path(sys.executable).parent
    return shlex.join(["python" if at_hand else sys.executable, "-m", "pip", "install", *packages])


def runs(numbers: Sequence[int]) -> str:
    """Numbers in short: `0-3,8` for 0, 1, 2, 3, 8, and `3-0` for those of a mirrored copy."""
    found: list[list[int]] = []
    for number in numbers:
        run = found[-1] if found else []
        steps = (run[1] - run[0],) if len(run) > 1 else (1, -1)
        if run and number - run[-1] in steps:
            run.append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 rank`, `4 ranks`; `many` is the plural where that is not `one` with an s."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def some(names: Sequence[str], most: int = 20) -> str:
    """Names with commas between them, and how many more there are."""
    more = [f"... and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def quoted(value: object, most: int = 40) -> str:
    """A value as Python writes it, for messages; of a long one, so many characters and its length."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r} ... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def aligned(rows: Sequence[Sequence[str]], left: Collection[str] | None = None) -> Iterator[str]:
    """A table whose first row is its head; numbers to the right, columns named in `left`, or all, to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if left is None or head in left else cell.rjust(width)
            for cell, width, head in zip(row, widths, rows[0], strict=True)
        )
        yield "  ".join(cells).rstrip()


def duration(seconds: float) -> str:
    """Of two units at most: `40 s`, `2 min`, `3 h 20 min`, `2 d 5 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"


def printable(text: str) -> str:
    """The text with what would steer a terminal, or cannot be written to it, spelled out: an escape becomes \\x1b.

    Anyone may give a file any name: with colours, with new lines, turned right to left, or in no encoding at all.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def literal(text: str) -> str:
    """Text that matplotlib shows as it is: without a formula between dollars, and in a legend also from a _ on."""
    text = printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
