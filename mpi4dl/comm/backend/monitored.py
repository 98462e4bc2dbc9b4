"""A barrier that says who did not come, in gloo's words: rank 0 hears of all other ranks, and then lets them go on."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from mpi4dl.comm.backend.errors import TimedOut
from mpi4dl.comm.backend.patience import within
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.backend.departure import Channel
    from mpi4dl.comm.backend.wire import Wire

ARRIVAL_TAG, LEAVE_TAG = 32762, 32763
NUMBER_BYTES = 8
GONE = 1 << 63  # beside a number: who came has given up since


class Numbers(Pending):
    """A number from each of some ranks: any that was not taken back, or `expected`, beside which old ones may come."""

    def __init__(
        self, wire: "Wire", channel: "Channel", sources: Sequence[int], tag: int, expected: int | None = None
    ) -> None:
        super().__init__(wire.node)
        self._wire, self._channel, self._tag, self._expected = wire, channel, tag, expected
        self.heard: dict[int, int] = {}
        self.open: dict[int, tuple[MPI.Request, bytearray]] = {source: self._next(source) for source in sources}

    def _next(self, source: int) -> "tuple[MPI.Request, bytearray]":
        page = bytearray(NUMBER_BYTES)
        return self._wire.mpi.Irecv(page, source, self._tag), page

    def test(self) -> bool:
        for source, (request, page) in list(self.open.items()):
            if not request.Test():
                continue
            self._channel.read(source)
            number = int.from_bytes(page, "little")
            wanted = number == self._expected if self._expected is not None else number < GONE
            if wanted and not self._wire.mpi.Iprobe(source, self._tag):
                self.heard[source] = number
                del self.open[source]
            else:
                self.open[source] = self._next(source)
        return not self.open

    def give_up(self) -> None:
        for request, _ in self.open.values():
            request.Cancel()
            request.Wait()


def pass_monitored_barrier(
    wire: "Wire",
    channel: "Channel",
    number: int,
    timeout: timedelta,
    all_ranks: bool,
    alarm: Callable[[Iterable[int]], None],
) -> None:
    """Return when all ranks have come to a barrier. `number` is this rank's own: another one each time.

    `channel` counts its messages.

    `alarm` is called now and then with the ranks that are waited for.

    Raises:
        TimedOut: on rank 0, some rank did not come within `timeout`, with the lowest such, or with `all_ranks` all of
            them; on others, rank 0 did not let them go on.
    """
    if wire.rank == 0 and timeout <= timedelta(0):
        raise TimedOut(f"Rank 0 timed out in monitoredBarrier after {timeout}: pass a time in which others can come")
    others = list(range(1, wire.size))

    def tell(rank: int, what: int, tag: int) -> "MPI.Request":
        channel.wrote(rank)
        return wire.mpi.Isend(what.to_bytes(NUMBER_BYTES, "little"), rank, tag)

    def complaint() -> str:
        missing = sorted(waiting.open)
        if wire.rank:
            return (
                f"Rank {wire.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0 for {timeout}: the message of rank 0 says who did not come"
            )
        who = f"Ranks {', '.join(map(str, missing))}" if all_ranks and len(missing) > 1 else f"Rank {missing[0]}"
        return f"{who} failed to pass monitoredBarrier within {timeout}"

    if wire.rank == 0:
        waiting = Numbers(wire, channel, others, ARRIVAL_TAG)
    else:
        waiting = Numbers(wire, channel, [0], LEAVE_TAG, number)
        tell(0, number, ARRIVAL_TAG)
    try:
        wire.node.wait(waiting, within(timeout, complaint, lambda: alarm(waiting.open)))
    except BaseException:
        waiting.give_up()
        if wire.rank:
            tell(0, number + GONE, ARRIVAL_TAG)
        raise
    if wire.rank == 0:
        wire.node.wait(Calls([tell(rank, waiting.heard[rank], LEAVE_TAG) for rank in others]))
