"""Waiting that ends: as `Node.wait` does it, but with a limit, and with an eye on ranks that leave."""

import os
import time
from collections.abc import Callable

from mpi4dl.comm.backend.errors import TimedOut
from mpi4dl.comm.node import Node, nap
from mpi4dl.comm.pending import Pending

LOOKS_BEFORE_SLEEP = 200
SPIN_SECONDS = 200e-6  # a wait that took this long may take a little longer, and leave the core to others
ALARM_SECONDS = 0.02


def wait_until_ready(
    pending: Pending,
    node: Node,
    seconds: float = float("inf"),
    complaint: Callable[[], str] = str,
    alarm: Callable[[], None] | None = None,
) -> None:
    """Return when `pending` is ready, which leaves to its `wait()` only what needs no other rank.

    `alarm` is called now and then by who waits long: it may raise what makes waiting pointless.

    Raises:
        TimedOut: it took longer than `seconds`.
    """
    begin = time.perf_counter()
    next_alarm = ALARM_SECONDS
    looks = 0
    with node.waits:
        while not pending.ready():
            looks += 1
            for phases in list(node.underway):  # others may wait for what this rank has to drive forward
                phases.advance()
            if looks > LOOKS_BEFORE_SLEEP:
                waited = time.perf_counter() - begin
                if waited > seconds:
                    raise TimedOut(complaint())
                if alarm is not None and waited > next_alarm:
                    alarm()
                    next_alarm = waited + ALARM_SECONDS
                if node.oversubscribed or waited > SPIN_SECONDS:
                    nap(waited)
                    continue
            if node.oversubscribed:
                os.sched_yield()
    node.wait_seconds += time.perf_counter() - begin
