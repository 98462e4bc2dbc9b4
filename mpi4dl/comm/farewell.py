"""A rank that has ended, while all others wait in vain: found by asking them, however long healthy ranks may take.

A rank may end early, as long as nobody needs it any more; so that alone is no error. It is one when every rank has
ended or waits for a message, and none of them comes further. Rank 0 finds out:

    rank r          as it ends, and when it has been in one wait for STUCK_SECONDS:  its standing   ->  rank 0
    rank 0          once all have ended or are stuck:                                "still so?"    ->  who is stuck
    rank r          if it is still in the same wait:                                 its standing   ->  rank 0

Who answers was in the same wait all the time from its first word to its answer. So there was a moment, when rank 0
asked, at which nobody was left who could have sent what the others wait for. Ranks at work send and receive nothing.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.meeting import Meeting

STUCK_SECONDS = 20.0  # a wait for one message may take as long on a slow network
STANDING, ASKING = 3, 4  # tags


class Standing(NamedTuple):
    """Where a rank is: it has ended, or is in the wait that began at `since`, by its own clock, at this `place`.

    `answer` is the number of the question that this answers.
    """

    ended: bool
    since: float
    place: str
    answer: int = 0


class Farewell:
    """One rank's part of it, for one thread."""

    def __init__(self, meeting: "Meeting") -> None:
        self.comm, self.rank, self.size = meeting.comm, meeting.rank, meeting.size
        self._said: Standing | None = None
        self._sent: list[MPI.Request] = []
        self._standings: dict[int, Standing] = {}  # of rank 0: those who ended or are stuck
        self._asked: dict[int, float] = {}
        self._question = 0

    def look(self, standing: Standing | None) -> str | None:
        """Take part, as long as this rank's standing is worth to be told (None: it is at work). Call it now and then.

        Returns what to tell the user, on rank 0, if the job can never end.
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

    def _judge(self) -> str | None:
        from mpi4py import MPI

        status = MPI.Status()
        while self.comm.Iprobe(tag=STANDING, status=status):
            self._note(status.source, self.comm.recv(source=status.source, tag=STANDING))
        ended = [rank for rank, standing in sorted(self._standings.items()) if standing.ended]
        stuck = [rank for rank, standing in sorted(self._standings.items()) if not standing.ended]
        waits = {rank: self._standings[rank].since for rank in stuck}
        if len(self._standings) < self.size or not ended or not stuck:
            self._asked = {}
            return None
        if waits != self._asked:
            self._asked = waits
            self._question += 1
            for rank in stuck:
                if rank != 0:
                    self._send(self._question, rank, ASKING)
            return None
        if any(self._standings[rank].answer != self._question for rank in stuck if rank != 0):
            return None
        return _complaint(ended, stuck, self._standings)


def _complaint(ended: list[int], stuck: list[int], standings: dict[int, Standing]) -> str:
    return (
        f"mpi4dl: {_ranks(ended)} ended, but {_ranks(stuck)} still waited, and so would have for ever: no rank may end "
        f"before the others have all that they need of it\n{_ranks(stuck[:1])} waited here:\n"
        f"{standings[stuck[0]].place}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
