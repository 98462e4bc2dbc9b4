"""What ranks send each other, as one of them sees it: rounds that are alike, how many there were, and their bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Round(NamedTuple):
    """Communication of ranks of a grid that differ along `axes` alone, `times` times; None: those that share experts.

    `kind` is "exchange", "reduce" or "gather". `parts` are how far along each axis, and how many bytes all times
    together: of an exchange to each receiver, of a collective of the buffer of each rank, which goes nowhere in
    particular, (). Many ranks gather what they merge in `blocks`, which is one round here.
    """

    kind: str
    axes: tuple[int, ...] | None
    times: int
    parts: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def alike(self) -> tuple[Any, ...]:
        """What rounds have in common that are added up."""
        return self.kind, self.axes, tuple(offset for offset, _ in self.parts)


Traffic = tuple[Round, ...]


def traffic_of(plain: Sequence[Sequence[Any]]) -> Traffic:
    """Traffic that came back from JSON."""
    return tuple(
        Round(kind, None if axes is None else tuple(axes), times, tuple((tuple(at), size) for at, size in parts))
        for kind, axes, times, parts in plain
    )


class Recorder:
    """The rounds that a rank takes part in, those that are alike added up."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[Any, ...], Round] = {}

    def add(self, kind: str, axes: tuple[int, ...] | None, parts: dict[tuple[int, ...], int]) -> None:
        new = Round(kind, axes, 1, tuple(sorted(parts.items())))
        known = self._rounds.get(new.alike)
        if known is not None:
            sizes = zip(known.parts, new.parts, strict=True)
            summed = tuple((offset, before + more) for (offset, before), (_, more) in sizes)
            new = known._replace(times=known.times + 1, parts=summed)
        self._rounds[new.alike] = new

    def take(self) -> Traffic:
        """What came since the last time."""
        found, self._rounds = tuple(self._rounds.values()), {}
        return found
