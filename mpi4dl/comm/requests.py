"""Requests: objects that report whether they are complete, and advance when they are tested.

A message of MPI, a copy that a GPU makes, a work of NCCL, and several of them in a row all are such requests. `Waits`
marks where a rank waits for one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpi4dl.comm import Mismatch

if TYPE_CHECKING:
    from mpi4py import MPI


class Request(Protocol):
    """Something under way."""

    def test(self) -> bool:
        """Let it make progress, without waiting; whether it is complete."""


class Driven(Protocol):
    """Something that a rank has to move forward, whatever it waits for. Errors are raised in the wait."""

    def advance(self) -> None: ...


class Waits:
    """Marks where this rank waits for others: `with waits: ...`. `since`: when, by time.perf_counter; 0 at work.

    `request`: what it waits for, where that is known; `limited`: the wait has a limit of its own.
    """

    since = 0.0
    request: object = None
    limited = False
    thread = 0  # which waits: autograd's, in the backward pass of a GPU

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.since = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.since, self.request, self.limited = 0.0, None, False


class Calls:
    """Requests of MPI, as one: sends and collectives."""

    def __init__(self, requests: "Sequence[MPI.Request]") -> None:
        self._requests = requests

    def test(self) -> bool:
        return not self._requests or self._requests[0].Testall(self._requests)


class Posted(NamedTuple):
    """A receive: how many bytes it is for, and from which rank; None: from any."""

    request: "MPI.Request"
    num_bytes: int
    source: int | None


class Receives:
    """Messages to this rank, in turn, whose lengths are checked; `heard(rank)` is called with the source of each.

    MPI says nothing of a message that is shorter than the buffer, the rest of which would be old values.
    """

    def __init__(
        self, rank: int, posted: Sequence[Posted], status: "MPI.Status", heard: Callable[[int], None] | None = None
    ) -> None:
        self._rank = rank
        self._open = list(posted)
        self._status = status
        self._heard = heard

    def test(self) -> bool:
        while self._open:
            posted = self._open[0]
            try:
                if not posted.request.Test(self._status):
                    return False
            except RuntimeError as error:
                from mpi4py import MPI

                if not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                del self._open[0]
                raise Mismatch(self._complaint(posted.num_bytes, posted.source, "more")) from None
            del self._open[0]
            source, count = self._status.source, self._status.Get_count()
            if self._heard is not None:
                self._heard(source)
            if count != posted.num_bytes:
                raise Mismatch(self._complaint(posted.num_bytes, source, f"{count}"))
        return True

    def cancel(self) -> None:
        """Receive no more of what has not begun to arrive. MPI writes to no buffer any longer."""
        while self._open:
            posted = self._open.pop(0)
            posted.request.Cancel()
            posted.request.Wait(self._status)
            if not self._status.Is_cancelled() and self._heard is not None:
                self._heard(self._status.source)

    def _complaint(self, expected: int, source: int | None, arrived: str) -> str:
        name = "any rank" if source is None else f"rank {source}"
        return (
            f"rank {self._rank} receives {expected} bytes from {name}, which sent {arrived}: the tensors must have "
            "the same size and dtype at both ends"
        )


class Works:
    """Works of a process group of torch.distributed, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def test(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def join(self) -> None:
        """Let what is put on the current stream come after them; raises what became of them, if they failed."""
        for work in self._works:
            work.wait()


class Condition:
    """Complete once `holds()`."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self.test = holds
