"""Which visits to make where memory is limited: as few as fit, in as many segments as make the least work of it.

Fewer visits read less of margins, and more segments repeat less for the rounds of their norms, but keep more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mpi4dl.parallel.streaming.needs import StreamNeeds
from mpi4dl.parallel.streaming.opening import StreamOptions
from mpi4dl.parallel.streaming.rehearsal import CannotStream

SEGMENTS = (1, 3, 6)
SMALLEST_TILE = 64  # px; of smaller ones visits would read nothing but margins
A_FEW = 8  # up to so many tiles along an axis all numbers are tried, and four of each octave beyond


@dataclass(frozen=True)
class Wanted:
    """What is fixed of streaming: see `StreamOptions`. `segments`: None for any number."""

    until: str | None = None
    norms: str = "exact"
    segments: int | None = None


class Visiting(NamedTuple):
    """How a first stage is streamed, what that takes, and the bytes of the rank that needs most."""

    options: StreamOptions
    needs: StreamNeeds
    num_bytes: int


def finer(sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Into how many tiles a part with these sides is cut: more and more, as square as can be."""
    longest, number = max(sides), 1
    while number == 1 or longest >= number * SMALLEST_TILE:
        yield tuple(max(1, round(number * side / longest)) for side in sides)
        number += max(1, 1 << (number.bit_length() - 3)) if number >= A_FEW else 1


def choose_visits(
    sides: Sequence[int],
    wanted: Wanted,
    needs_for: Callable[[StreamOptions], StreamNeeds],
    bytes_of: Callable[[StreamNeeds], int],
    most_bytes: float,
) -> Visiting:
    """The visits of a rank's part of the images, which has these sides.

    `needs_for(options)` is what streaming takes, which may raise CannotStream, and `bytes_of` that what the rank has
    which needs most.

    Raises:
        CannotStream: nothing fits; it says what the least is that would.
    """
    counts = list(finer(sides))
    tried: list[Visiting] = []
    fitting: list[Visiting] = []
    problem: CannotStream | None = None
    numbers = (wanted.segments,) if wanted.segments else SEGMENTS if wanted.norms == "exact" else SEGMENTS[:1]
    for segments in numbers:

        def visiting(i: int, segments: int = segments) -> Visiting | None:
            nonlocal problem
            options = StreamOptions(counts[i], wanted.until, wanted.norms, segments)
            try:
                needs = needs_for(options)
            except CannotStream as error:
                problem = error
                return None
            tried.append(Visiting(options, needs, bytes_of(needs)))
            return tried[-1]

        def hopeless(found: Visiting, bytes_of: Callable[[StreamNeeds], int] = bytes_of) -> bool:
            return bytes_of(found.needs.without_visits()) > most_bytes

        found = _first(visiting, counts, most_bytes, hopeless)
        if found is not None:
            fitting.append(found)
    if fitting:
        return min(fitting, key=lambda each: each.needs.work())
    if problem is not None and not tried:
        raise problem
    least = min(tried, key=lambda each: each.num_bytes)
    raise CannotStream(
        f"no visits keep a rank within {mebibytes(most_bytes)}: the least would be {mebibytes(least.num_bytes)}, with "
        f"{words(least)}; allow for that, or use more `tiles`, `zero` or a smaller `batch_size`"
    )


def words(found: Visiting) -> str:
    """How many visits, in how many segments, and how far they read beyond their tiles."""
    tiles, segments = "x".join(map(str, found.options.counts)), len(found.needs.segments)
    many = f"{segments} segment{'s' * (segments > 1)}"
    return f"{tiles} visits of each rank in {many}, a margin of {found.needs.margin} px"


def mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _first(
    visiting: Callable[[int], Visiting | None],
    counts: Sequence[tuple[int, ...]],
    most_bytes: float,
    hopeless: Callable[[Visiting], bool],
) -> Visiting | None:
    """The first of these that fits, if all behind one that fits do.

    What takes too much by some factor needs at least as many times more visits: leaps are that long, and then halved.
    """
    low, high, found = -1, 0, None
    while found is None:
        last = visiting(high)
        if last is not None and last.num_bytes <= most_bytes:
            found = last
        elif high == len(counts) - 1 or (last is not None and hopeless(last)):
            return None
        else:
            more = prod(counts[high]) * (1.0 if last is None else last.num_bytes / most_bytes)
            farther = (i for i in range(high + 1, len(counts)) if prod(counts[i]) >= more)
            low, high = high, next(farther, len(counts) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        nearer = visiting(middle)
        if nearer is None or nearer.num_bytes > most_bytes:
            low = middle
        else:
            high, found = middle, nearer
    return found
