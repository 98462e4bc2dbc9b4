"""Ranks that wait in vain, for one that has ended or failed, or for each other: found by asking them.

A rank may end early, as long as nobody needs it any more; so that alone is no error. It is one when every rank has
ended or waits for a message, and none of them comes further. Rank 0 finds out, however long healthy ranks may take:

    rank r          as it ends, and when it has been in one wait for STUCK_SECONDS:  its standing   ->  rank 0
    rank 0          once all have ended or are stuck:                                "still so?"    ->  who is stuck
    rank r          if it is still in the same wait:                                 its standing   ->  rank 0

Who answers was in the same wait all the time from its first word to its answer. So there was a moment, when rank 0
asked, at which nobody was left who could have sent what the others wait for. Ranks at work send and receive nothing.

A rank that failed where all are to hear of it waits for the others too, and its standing says how it failed. Where none
has ended or failed, all wait for each other, as in different calls. That is looked at for longer, since it is rare, and
a GPU at work may look like it.
"""

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.meeting import Meeting

STUCK_SECONDS = 5.0  # a wait for a small message may take as long on a slow network
DEADLOCK_SECONDS = 300.0
STANDING, ASKING = 3, 4  # tags


class Standing(NamedTuple):
    """Where a rank is: it has ended, or is in the wait that began at `since`, by its own clock, at this `place`.

    `answer` is the number of the question that this answers. `failure`: the message and the exit code of a rank that
    waits for the others to hear how it failed. `limited`: the wait ends by itself.
    """

    ended: bool
    since: float
    place: str
    answer: int = 0
    failure: tuple[str, int] | None = None
    limited: bool = False


class Verdict(NamedTuple):
    """What to tell the user of a job that can never end, and the exit code that it ends with."""

    message: str
    code: int = 1


class Farewell:
    """One rank's part of it, for one thread."""

    def __init__(self, meeting: "Meeting") -> None:
        self.comm, self.rank, self.size = meeting.comm, meeting.rank, meeting.size
        self._said: Standing | None = None
        self._sent: list[MPI.Request] = []
        self._standings: dict[int, Standing] = {}  # of rank 0: those who ended or are stuck
        self._asked: dict[int, float] = {}
        self._asked_since = 0.0
        self._question = 0

    def look(self, standing: Standing | None) -> Verdict | None:
        """Take part, as long as this rank's standing is worth to be told (None: it is at work). Call it now and then.

        Returns a verdict, on rank 0, if the job can never end.
        """
        if standing != self._said:
            self._said = standing
            self._tell(standing)
        if self.rank == 0:
            return None if standing is None else self._judge()
        while standing is not None and self.comm.Iprobe(0, ASKING):
            question = self.comm.recv(source=0, tag=ASKING)
            if not standing.ended:
                self._tell(standing._replace(answer=question))
        return None

    def _tell(self, standing: Standing | None) -> None:
        if self.rank == 0:
            self._note(0, standing)
        else:
            self._send(standing, 0, STANDING)

    def _send(self, value: Standing | int | None, to: int, tag: int) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self.comm.isend(value, to, tag))

    def _note(self, rank: int, standing: Standing | None) -> None:
        if standing is None:
            self._standings.pop(rank, None)
        else:
            self._standings[rank] = standing

    def _judge(self) -> Verdict | None:
        from mpi4py import MPI

        status = MPI.Status()
        while self.comm.Iprobe(tag=STANDING, status=status):
            self._note(status.source, self.comm.recv(source=status.source, tag=STANDING))
        ended = [rank for rank, standing in sorted(self._standings.items()) if standing.ended]
        stuck = [rank for rank, standing in sorted(self._standings.items()) if not standing.ended]
        waits = {rank: self._standings[rank].since for rank in stuck}
        if len(self._standings) < self.size or not stuck:
            self._asked = {}
            return None
        if waits != self._asked:
            self._asked, self._asked_since = waits, time.monotonic()
            self._question += 1
            for rank in stuck:
                if rank != 0:
                    self._send(self._question, rank, ASKING)
            return None
        if any(self._standings[rank].answer != self._question for rank in stuck if rank != 0):
            return None
        failed = [standing.failure for _, standing in sorted(self._standings.items()) if standing.failure is not None]
        if failed:
            return Verdict(*failed[0])
        if ended:
            return Verdict(_of_ended(ended, stuck, self._standings))
        limited = any(standing.limited for standing in self._standings.values())
        if limited or time.monotonic() - self._asked_since < DEADLOCK_SECONDS:
            return None
        return Verdict(_of_all(stuck, self._standings))


def _of_ended(ended: list[int], stuck: list[int], standings: dict[int, Standing]) -> str:
    return (
        f"mpi4dl: {_ranks(ended)} ended, but {_ranks(stuck)} still waited, and so would have for ever: no rank may end "
        f"before the others have all that they need of it\n{_ranks(stuck[:1])} waited here:\n"
        f"{standings[stuck[0]].place}"
    )


def _of_all(stuck: list[int], standings: dict[int, Standing]) -> str:
    places: dict[str, list[int]] = {}
    for rank in stuck:
        places.setdefault(standings[rank].place, []).append(rank)
    found = "\n".join(f"{_ranks(ranks)} waited here:\n{place}" for place, ranks in places.items())
    return (
        "mpi4dl: all ranks waited for each other, and would have for ever: all must make the same collective calls in "
        f"the same order\n{found}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
