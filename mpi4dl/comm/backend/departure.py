"""A rank that leaves tells the others, so that nobody waits for it: not for the time-out, not for ever.

Leaving is the end of the program, `sys.exit(0)`, or `os._exit(0)`, after which MPI's launcher would end the other ranks
and report success. A rank that leaves still drives forward what it has begun, until all whom it shares a group with
leave too. With the news comes how many collectives of each group it has begun: whoever waits for a later one learns
that at once.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, NoReturn, Protocol

from mpi4dl.comm import ending
from mpi4dl.comm.communicator import Communicator, world
from mpi4dl.comm.meeting import meeting

if TYPE_CHECKING:
    from mpi4py import MPI

LEAVING = 2  # the tag of the news, on the communicator that the guard uses too
LOOK_SECONDS = 0.05  # between two looks for news
MESSAGE_SECONDS = 5.0  # for messages of a rank that has left, of which nobody has counted which are to come
IDLE_SECONDS = 2e-3


class Unfinished(Protocol):
    """An operation under way."""

    def poke(self) -> bool: ...


class Departures:
    """What this rank knows of those that have left, and what it tells when it leaves itself."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._meeting: MPI.Comm = meeting().comm
        self._begun: dict[str, int] = {}
        self._peers: set[int] = set()
        self._gone: dict[int, tuple[float, dict[str, int]]] = {}
        self._looked = 0.0
        self._lock = threading.Lock()
        self.unfinished: list[Unfinished] = []

    def join(self, ranks: Iterable[int]) -> None:
        """This rank shares a group with these."""
        self._peers |= set(ranks) - {self._comm.rank}

    def count(self, group: str, num_begun: int) -> None:
        """This rank has begun so many collectives of a group."""
        self._begun[group] = num_begun

    def gone(self) -> dict[int, tuple[float, dict[str, int]]]:
        """By rank: when its news came, and what it had begun."""
        from mpi4py import MPI

        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS and self._lock.acquire(blocking=False):
            self._looked = now
            status = MPI.Status()
            while self._meeting.Iprobe(MPI.ANY_SOURCE, LEAVING, status):
                news = bytearray(status.Get_count())
                self._meeting.Recv(news, status.source, LEAVING)
                self._gone[status.source] = (now, pickle.loads(news))
            self._lock.release()
        return self._gone

    def will_not_come(self, ranks: Iterable[int], group: str, number: int) -> list[int]:
        """Those of `ranks` that have left without beginning collective `number` of the group."""
        gone = self.gone()
        return [rank for rank in ranks if rank in gone and gone[rank][1].get(group, 0) < number]

    def will_not_write(self, ranks: Iterable[int]) -> bool:
        """Whether all of `ranks` have left, so long ago that a message of theirs would be here."""
        gone, now = self.gone(), time.monotonic()
        return all(rank in gone and now - gone[rank][0] > MESSAGE_SECONDS for rank in ranks)

    def leave(self) -> None:
        """Tell the others, and come back when all whom this rank shares a group with leave too."""
        from mpi4py import MPI

        if MPI.Is_finalized() or not self._peers:
            return
        news = pickle.dumps(self._begun)
        told = [self._meeting.Isend(news, rank, LEAVING) for rank in sorted(self._peers)]
        peers, self._peers = self._peers, set()
        while not peers <= self.gone().keys():
            self.unfinished = [work for work in self.unfinished if not work.poke()]
            time.sleep(IDLE_SECONDS)
        MPI.Request.Waitall(told)


@cache
def departures() -> Departures:
    """Those of this job. From the first call on, this rank tells the others when it leaves."""
    comm = world()
    known = Departures(comm)
    comm.farewells.append(known.leave)
    _tell_also_before_leaving_at_once(known.leave)
    return known


def _tell_also_before_leaving_at_once(leave: Callable[[], None]) -> None:
    process, leave_at_once = os.getpid(), os._exit

    def tell_and_leave_at_once(status: int) -> NoReturn:
        # Other codes end the job by themselves; and children of this process are none of its ranks.
        if status == 0 and os.getpid() == process:
            leave()
            meeting().gathers()  # where all who end as Python does wait for the others
            ending.leave(status)
        leave_at_once(status)

    os._exit = tell_and_leave_at_once
