"""Waits that end: with a limit of time, and with an eye on ranks that leave."""

from collections.abc import Callable
from datetime import timedelta

from mpi4dl.comm.backend.errors import TimedOut


def within(limit: timedelta, complaint: Callable[[], str], alarm: Callable[[], None]) -> Callable[[float], None]:
    """What a wait of `Node.wait` is to look at now and then: its time, and `alarm`, which raises if it is pointless.

    Raises:
        TimedOut: it took longer than `limit`.
    """

    def look(seconds: float) -> None:
        if seconds > limit.total_seconds():
            raise TimedOut(complaint())
        alarm()

    return look
