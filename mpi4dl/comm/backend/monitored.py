"""A barrier that says who did not come: rank 0 hears of every other rank, and then lets all go on."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from mpi4dl.comm.backend.patience import wait_until_ready
from mpi4dl.comm.pending import Pending

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.backend.wire import Wire

ARRIVAL_TAG, LEAVE_TAG = 32762, 32763
NUMBER_BYTES = 8


class Numbered(Pending):
    """A number from each of some ranks, of which lower ones are left from barriers that this rank gave up."""

    def __init__(self, wire: "Wire", sources: Sequence[int], tag: int, number: int) -> None:
        super().__init__(wire.node)
        self._wire, self._tag, self._number = wire, tag, number
        self.open: dict[int, tuple[MPI.Request, bytearray]] = {source: self._next(source) for source in sources}

    def _next(self, source: int) -> "tuple[MPI.Request, bytearray]":
        page = bytearray(NUMBER_BYTES)
        return self._wire.mpi.Irecv(page, source, self._tag), page

    def ready(self) -> bool:
        for source, (request, page) in list(self.open.items()):
            if request.Test():
                if int.from_bytes(page, "little") >= self._number:
                    del self.open[source]
                else:
                    self.open[source] = self._next(source)
        return not self.open

    def give_up(self) -> None:
        for request, _ in self.open.values():
            request.Cancel()
            request.Wait()


def pass_monitored_barrier(
    wire: "Wire", number: int, timeout: timedelta, all_ranks: bool, alarm: Callable[[], None]
) -> None:
    """Return when all ranks have come to barrier `number`.

    Raises:
        TimedOut: on rank 0, some rank did not come within `timeout`, with the lowest such, or with `all_ranks` all of
            them; on others, rank 0 did not let them go on.
    """
    others, seconds = range(1, wire.size), timeout.total_seconds()
    page = number.to_bytes(NUMBER_BYTES, "little")
    waiting = Numbered(wire, others if wire.rank == 0 else [0], ARRIVAL_TAG if wire.rank == 0 else LEAVE_TAG, number)

    def complaint() -> str:
        missing = sorted(waiting.open)
        if wire.rank:
            return (
                f"rank {wire.rank} came to monitored_barrier, but was not let on by rank 0 within {timeout}: see the "
                "message of rank 0 for who did not come"
            )
        who = f"ranks {', '.join(map(str, missing))}" if all_ranks and len(missing) > 1 else f"rank {missing[0]}"
        return f"{who} did not come to monitored_barrier within {timeout}"

    told = [wire.mpi.Isend(page, 0, ARRIVAL_TAG)] if wire.rank else []
    try:
        wait_until_ready(waiting, wire.node, seconds, complaint, alarm)
    except BaseException:
        waiting.give_up()
        raise
    if wire.rank == 0:
        told = [wire.mpi.Isend(page, rank, LEAVE_TAG) for rank in others]
    wire.node.wait(told)
