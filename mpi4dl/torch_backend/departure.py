"""A rank that leaves tells the others, so that nobody waits for it: not for the time-out, not for ever.

Leaving is the end of the program, `sys.exit(0)`, or `os._exit(0)`, after which MPI's launcher would end the other ranks
and report success. A rank that leaves still drives forward what it has begun, until all whom it shares a group with
leave too. It has two things to say, and no time decides what follows from them:

    it leaves    with how many collectives of each group it has begun, and how many messages it has written to whom it
                 tells: who waits for a later one, and has read all of these, waits in vain
    it rests     all that it has begun is complete: it will read no message any more
"""

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from mpi4dl.comm import Mismatch
from mpi4dl.comm.communicator import Communicator, world
from mpi4dl.comm.shutdown import meeting

if TYPE_CHECKING:
    from mpi4py import MPI

LEAVING = 2  # the tag of the news, on the communicator that the guard uses too
LOOK_SECONDS = 0.05  # between two looks for news
IDLE_SECONDS = 2e-3


class Notice(NamedTuple):
    """The operations that a leaving rank has begun, by group, and its messages to this rank, by channel."""

    begun: dict[str, int]
    wrote: dict[str, int]


class Departures:
    """The notices of ranks that have left, and the notice of this rank when it leaves."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._meeting: MPI.Comm = meeting().comm
        self._begun: dict[str, int] = {}
        self._wrote: Counter[tuple[int, str]] = Counter()
        self._read: Counter[tuple[int, str]] = Counter()
        self._peers: set[int] = set()
        self._groups: list[Any] = []  # each with the operations that are under way
        self._unfinished: list[Any] = []
        self._gone: dict[int, Notice] = {}
        self._resting: set[int] = set()
        self._looked = 0.0
        self._lock = threading.Lock()

    def join(self, group: Any, ranks: Iterable[int]) -> None:
        """This rank is in a group, with these."""
        self._groups.append(group)
        self._peers |= set(ranks) - {self._comm.rank}

    @property
    def num_groups(self) -> int:
        """How many groups this rank is in."""
        return len(self._groups)

    def part(self, group: Any) -> None:
        """The group is no more; what is under way in it stays so."""
        self._groups = [other for other in self._groups if other is not group]
        self._unfinished += group.under_way

    def count(self, group: str, num_begun: int) -> None:
        """This rank has begun so many collectives of a group."""
        self._begun[group] = num_begun

    def gone(self) -> dict[int, Notice]:
        """The notices of ranks that have left, by rank."""
        from mpi4py import MPI

        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS and self._lock.acquire(blocking=False):
            self._looked = now
            status = MPI.Status()
            while self._meeting.Iprobe(MPI.ANY_SOURCE, LEAVING, status):
                news = bytearray(status.Get_count())
                self._meeting.Recv(news, status.source, LEAVING)
                if news:
                    self._gone[status.source] = pickle.loads(news)
                else:
                    self._resting.add(status.source)
            self._lock.release()
        return self._gone

    def will_not_come(self, ranks: Iterable[int], group: str, number: int) -> list[int]:
        """Those of `ranks` that have left without beginning collective `number` of the group."""
        gone = self.gone()
        return [rank for rank in ranks if rank in gone and gone[rank].begun.get(group, 0) < number]

    def will_not_read(self, rank: int) -> bool:
        """Whether a rank has left, and takes no more messages."""
        self.gone()
        return rank in self._resting

    def leave(self) -> None:
        """Tell the others, and come back when all whom this rank shares a group with leave too."""
        from mpi4py import MPI

        if MPI.Is_finalized() or not self._peers:
            return
        peers, self._peers, told = self._peers, set(), []
        for peer in sorted(peers):
            wrote = {channel: number for (reader, channel), number in self._wrote.items() if reader == peer}
            told.append(self._meeting.Isend(pickle.dumps(Notice(self._begun, wrote)), peer, LEAVING))
        unfinished = self._unfinished + [work for group in self._groups for work in group.under_way]
        rests = False
        while not peers <= self.gone().keys():
            unfinished = [work for work in unfinished if not work.poke()]
            if not unfinished and not rests:
                rests = True
                told += [self._meeting.Isend(b"", rank, LEAVING) for rank in sorted(peers)]
            time.sleep(IDLE_SECONDS)
        MPI.Request.Waitall(told)


class Channel:
    """The messages of one kind between some ranks, counted where they are written and where they are read.

    They are called by their numbers among `ranks`, and the channel by the name that it has with all of them.
    """

    def __init__(self, known: Departures, ranks: Sequence[int], name: Callable[[], str]) -> None:
        self._known, self._ranks, self._name = known, ranks, name

    def wrote(self, to: int) -> None:
        self._known._wrote[self._ranks[to], self._name()] += 1

    def read(self, source: int) -> None:
        self._known._read[self._ranks[source], self._name()] += 1

    def is_closed(self, source: int) -> bool:
        """Whether `source` has left, and all that it has written was read."""
        rank, name = self._ranks[source], self._name()
        news = self._known.gone().get(rank)
        return news is not None and news.wrote.get(name, 0) == self._known._read[rank, name]


@cache
def departures() -> Departures:
    """Those of this job. From the first call on, this rank tells the others when it leaves."""
    known = Departures(world())
    meeting().exit_notifications.append(known.leave)
    return known


# Failures between ranks. PyTorch's programs expect a RuntimeError of all of it; each is also what it is.

__all__ = ["Departed", "Mismatch", "TimedOut"]


class TimedOut(TimeoutError, dist.DistBackendError):
    """Other ranks did not come to a call in time. Their later messages still arrive: another wait is possible."""


class Departed(ConnectionError, dist.DistBackendError):
    """A rank has left the job without coming to a call, so that the others would wait for it for ever."""


# Waits that end: with a limit of time, and with an eye on ranks that leave.


def within(limit: timedelta, complaint: Callable[[], str], alarm: Callable[[], None]) -> Callable[[float], None]:
    """The regular check of `Node.wait`: its time, and `alarm`, which raises if the wait is pointless.

    Raises:
        TimedOut: it took longer than `limit`.
    """

    def look(seconds: float) -> None:
        if seconds > limit.total_seconds():
            raise TimedOut(complaint())
        alarm()

    return look
