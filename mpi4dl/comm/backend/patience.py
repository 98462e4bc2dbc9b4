"""Waiting that ends: as `Node.wait` does it, but with a limit."""

import os
import time
from collections.abc import Callable

from mpi4dl.comm.node import SLEEP_SECONDS, Node
from mpi4dl.comm.pending import Pending

YIELDS_BEFORE_SLEEP = 200


def wait_until_ready(
    pending: Pending, node: Node, seconds: float = float("inf"), complaint: Callable[[], str] = str
) -> None:
    """Return when `pending` is ready, which leaves to its `wait()` only what needs no other rank.

    Raises:
        TimeoutError: it took longer than `seconds`.
    """
    begin = time.perf_counter()
    tries = 0
    while not pending.ready():
        tries += 1
        for phases in list(node.underway):  # others may wait for what this rank has to drive forward
            phases.advance()
        if node.oversubscribed and tries <= YIELDS_BEFORE_SLEEP:
            os.sched_yield()
        elif tries > YIELDS_BEFORE_SLEEP:
            if node.oversubscribed:
                time.sleep(SLEEP_SECONDS)
            if time.perf_counter() - begin > seconds:
                raise TimeoutError(complaint())
    node.wait_seconds += time.perf_counter() - begin
