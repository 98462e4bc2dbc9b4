"""Communicators are given back to MPI, which has some two thousand: those that nobody holds, when one is needed next.

To free a communicator is a collective call, though no MPI that is known sends anything for it. All ranks of an SPMD
program let go of their communicators alike, and all of them come to make the next one; so there they are freed. What
only the garbage collector finds, as in an engine that a hook refers to, is looked for when many are alive.
"""

import gc
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

MANY = 256


class Family:
    """All communicators that were made of one."""

    def __init__(self) -> None:
        self._alive: dict[int, MPI.Comm] = {}
        self._dropped: list[int] = []
        self._made = 0
        self._look_at = MANY

    def __len__(self) -> int:
        """How many are alive, whether or not somebody holds them."""
        return len(self._alive)

    def adopt(self, holder: object, mpi: "MPI.Comm") -> None:
        """`mpi` is free once `holder` is gone."""
        self._made += 1
        self._alive[self._made] = mpi
        weakref.finalize(holder, self._dropped.append, self._made).atexit = False

    def make_room(self) -> None:
        """Free what nobody holds. Collective."""
        if len(self._alive) - len(self._dropped) >= self._look_at:
            gc.collect()
            self._look_at = max(MANY, 2 * (len(self._alive) - len(self._dropped)))
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        for number in sorted(dropped):
            self._alive.pop(number).Free()

    def free(self) -> None:
        """Free all, whoever holds them. Collective."""
        self._dropped[:] = []
        while self._alive:
            self._alive.popitem()[1].Free()
