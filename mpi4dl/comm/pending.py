"""Communication under way: what a call that does not wait returns, and communication of several phases.

MPI moves messages by itself, but it cannot start the second phase of an algorithm of ours when the first is complete:
a rank has to do that. Whatever a rank waits for, `Node.wait` drives all phases under way forward in the meantime, so
ranks may wait for them in any order, as for the collectives of MPI.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpi4dl.comm.node import Node

if TYPE_CHECKING:
    from mpi4py import MPI


class Pending:
    """Communication under way: `wait()` returns when it is complete and the buffers may be used again."""

    def __init__(self, node: Node, requests: Sequence["MPI.Request"] = ()) -> None:
        self._node = node
        self._requests = list(requests)
        self._buffers: list[Tensor] = []
        self._finish: list[Callable[[], Any]] = []
        self._phases: list[Phases] = []

    @classmethod
    def of_phases(cls, node: Node, phases: "Iterator[Pending]") -> "Pending":
        """What is complete when the last of `phases` is; each starts when the iterator is asked for it."""
        pending = cls(node)
        pending._phases = [Phases(node, phases)]
        return pending

    def wait(self) -> None:
        if self._requests or self._phases:
            self._node.wait(self._requests, self._phases)
        self.conclude()

    def conclude(self) -> None:
        """Deliver what has arrived. Only for what is `ready`."""
        for finish in self._finish:
            finish()
        self._requests, self._buffers, self._finish, self._phases = [], [], [], []

    def ready(self) -> bool:
        """Let MPI and the phases make progress, without waiting; whether all is complete."""
        return all([request.Test() for request in self._requests] + [phases.advance() for phases in self._phases])

    @classmethod
    def all(cls, node: Node, parts: "Sequence[Pending]") -> "Pending":
        joined = cls(node)
        for part in parts:
            joined._requests += part._requests
            joined._buffers += part._buffers
            joined._finish += part._finish
            joined._phases += part._phases
        return joined


class Phases:
    """Communication in phases, each of which starts when this rank has completed the one before it."""

    def __init__(self, node: Node, phases: Iterator[Pending]) -> None:
        self._node = node
        self._phases = phases
        self._driving = threading.Lock()
        self._now = next(phases, None)
        if self._now is not None:
            node.underway.append(self)

    def advance(self) -> bool:
        """Start the phases whose time has come, without waiting; whether all are complete."""
        if not self._driving.acquire(blocking=False):
            return False  # another thread of this rank is at it, as in a backward pass on CPU and GPU
        try:
            while self._now is not None and self._now.ready():
                self._now.conclude()
                self._now = next(self._phases, None)
                if self._now is None:
                    self._node.underway.remove(self)
            return self._now is None
        finally:
            self._driving.release()
