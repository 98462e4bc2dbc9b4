"""Communication under way: what a call that does not wait returns, and what the caller waits for."""

from collections.abc import Callable, Sequence
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

    def wait(self) -> None:
        if self._requests:
            self._node.wait(self._requests)
        for finish in self._finish:
            finish()
        self._requests, self._buffers, self._finish = [], [], []

    def ready(self) -> bool:
        """Let MPI make progress, without waiting; whether all is complete."""
        return all([request.Test() for request in self._requests])

    @classmethod
    def all(cls, node: Node, parts: "Sequence[Pending]") -> "Pending":
        joined = cls(node)
        for part in parts:
            joined._requests += part._requests
            joined._buffers += part._buffers
            joined._finish += part._finish
        return joined
