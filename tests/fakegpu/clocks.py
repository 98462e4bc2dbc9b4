"""Who may touch which memory: an access is right if it comes, by some chain of waits, after those that it disturbs.

Every stream, the host, and every call of MPI under way is a timeline that counts its own accesses. A vector clock says
of each timeline how much of the others has happened before it (Lamport 1978; Fidge 1988; Mattern 1989): an event is a
copy of the clock of the stream that recorded it, and who waits for it takes over what it knows. Two accesses to the
same bytes, one of which writes, are a race unless the first happened before the second, whatever the times of a run.
"""

from dataclasses import dataclass, field


class Race(AssertionError):
    """Memory is touched without a wait for who touched it before."""


class Timeline:
    """A stream, the host, or a call of MPI."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.knows: dict[Timeline, int] = {self: 0}
        self.ended: tuple[Timeline, int] | None = None

    def learn(self, known: "dict[Timeline, int]") -> None:
        knows = self.knows
        for timeline, count in known.items():
            if count > knows.get(timeline, -1):
                knows[timeline] = count

    def snapshot(self) -> "dict[Timeline, int]":
        return dict(self.knows)

    def end(self, by: "Timeline") -> None:
        """All that it did comes before what `by` does from now on; so nobody need know more of it."""
        by.knows[by] += 1
        self.ended = by, by.knows[by]


@dataclass
class Access:
    """Bytes from `start` to `stop`, read or written, as the `count`th access of `timeline`."""

    start: int
    stop: int
    writes: bool
    timeline: Timeline
    count: int
    what: str

    def before(self, timeline: Timeline) -> bool:
        known, count = self.timeline.ended or (self.timeline, self.count)
        return timeline.knows.get(known, 0) >= count


@dataclass
class Memory:
    """One storage: where it is ("device" or "pinned"), and who has touched it."""

    place: str
    accesses: list[Access] = field(default_factory=list)

    def touch(self, timeline: Timeline, start: int, stop: int, writes: bool, what: str) -> None:
        kept = []
        for old in self.accesses:
            apart = old.stop <= start or stop <= old.start
            if not apart and (old.writes or writes) and not old.before(timeline):
                raise Race(
                    f"{_told(writes, what, timeline)} memory without a wait for {old.timeline.name}, where "
                    f"{old.what} {'writes' if old.writes else 'reads'} it"
                )
            if not (start <= old.start and old.stop <= stop and old.before(timeline) and (writes or not old.writes)):
                kept.append(old)
        timeline.knows[timeline] += 1
        kept.append(Access(start, stop, writes, timeline, timeline.knows[timeline], what))
        self.accesses = kept

    def released(self, *by: Timeline) -> list[Access]:
        """Accesses under way when the memory goes back to the allocator, which gives it to who knows what `by` know."""
        return [old for old in self.accesses if not any(map(old.before, by))]


def _told(writes: bool, what: str, timeline: Timeline) -> str:
    return f"{what} {'writes' if writes else 'reads'} on {timeline.name}"
