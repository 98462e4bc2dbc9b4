"""Communication under way: what a call that does not wait returns, and communication of several phases.

MPI moves messages by itself, but it cannot start the second phase of an algorithm of ours when the first is complete:
a rank has to do that. Whatever a rank waits for, `Node.wait` drives all phases under way forward in the meantime, so
ranks may wait for them in any order, as for the collectives of MPI.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.autograd.profiler
from torch import Tensor

from mpi4dl.comm.node import Node
from mpi4dl.comm.requests import Receives, Request
from mpi4dl.comm.streams import NOWHERE, here

# The work of a rank as events of torch.profiler, and as ranges of NVTX under its `emit_nvtx`.
#
# mpi4dl:forward of stage 0, microbatch 1      an action of the plan's table, as its drawing has it
# mpi4dl:wait                                  this rank waits for others
# mpi4dl:all_reduce, mpi4dl:wait(all_reduce)   an operation of torch.distributed starts; somebody waits for it


def as_event(name: object, tensors: Sequence[Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
    """A context that is an event while a profiler runs, with the shapes of these tensors, and else costs nothing."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch._C._profiler._RecordFunctionFast(f"mpi4dl:{name}", list(tensors), {})


class Pending:
    """Communication under way: `wait()` returns when it is complete and the buffers may be used again.

    It holds what MPI reads and writes, `buffers`; what nobody waits for is held until it is complete all the same.
    `deliveries` are made then, once, on the stream of a GPU that was current at the start.
    """

    def __init__(
        self,
        node: Node,
        requests: Sequence[Request] = (),
        buffers: Sequence[Any] = (),
        deliveries: Sequence[Callable[[], Any]] = (),
    ) -> None:
        self.node = node
        self._requests = list(requests)
        self._buffers = list(buffers)
        self._deliveries = list(deliveries)
        self._stream = here() if torch.cuda.is_initialized() else NOWHERE
        self._parts: Sequence[Pending] = ()

    @classmethod
    def of_phases(cls, node: Node, phases: "Iterator[Pending]") -> "Pending":
        """A request that is complete when the last of `phases` is. Each phase starts when the iterator yields it."""
        driven = Phases(node, phases)
        return cls(node, [driven], deliveries=[driven.stream.join])

    @classmethod
    def all(cls, node: Node, parts: "Sequence[Pending]") -> "Pending":
        """A request that is complete when all parts are."""
        if len(parts) == 1:
            return parts[0]
        joined = cls(node, parts)
        joined._parts = parts
        return joined

    def then(self, deliver: Callable[[], Any]) -> "Pending":
        """The same, with one thing more to do in the end."""
        self._deliveries.append(deliver)
        return self

    def wait(self) -> None:
        if self._requests:
            if torch.autograd.profiler._is_profiler_enabled:
                with as_event("wait"):
                    self.node.wait(self)
            else:
                self.node.wait(self)
        self.conclude()
        if self._stream is not NOWHERE:
            self._stream.join()

    def test(self) -> bool:
        """Let MPI and the phases make progress, without waiting; whether all is complete."""
        done = True
        for request in self._requests:
            done = request.test() and done
        return done

    def num_bytes(self) -> int:
        """How much of it is under way, as far as that is known."""
        own = sum(getattr(buffer, "nbytes", 0) for buffer in self._buffers)
        return own + sum(each.num_bytes() for each in self._requests if isinstance(each, Pending | Phases))

    def cancel(self) -> None:
        """Receive no more of what has not begun to arrive; sends go on."""
        for each in self._requests:
            if isinstance(each, Pending | Phases | Receives):
                each.cancel()

    def conclude(self) -> None:
        """Deliver what has arrived. Only for what is complete."""
        if self._parts or self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            with self._stream.current():
                for part in self._parts:
                    part.conclude()
                    part.join()
                for deliver in deliveries:
                    deliver()
            self._stream.mark()
        self._requests, self._buffers, self._parts = [], [], ()

    def join(self) -> None:
        """Let what is computed from now on, on the stream of a GPU that is current, come after what was delivered."""
        self._stream.join()

    def __del__(self) -> None:
        if self._requests and not self._parts:  # parts look after themselves
            self.node.underway.append(_Dropped(self.node, self._requests, self._buffers))


class _Dropped:
    """Buffers without an owner that MPI still reads or writes."""

    def __init__(self, node: Node, requests: Sequence[Request], buffers: Sequence[Any]) -> None:
        self._node, self._requests, self._buffers = node, requests, buffers

    def advance(self) -> None:
        try:
            over = all([request.test() for request in self._requests])
        except (RuntimeError, ValueError):
            over = True
        if over and self in self._node.underway:
            self._node.underway.remove(self)


class Phases:
    """Communication in phases, each of which starts when this rank has completed the one before it."""

    def __init__(self, node: Node, phases: Iterator[Pending]) -> None:
        self._node = node
        self._phases = phases
        self._driving = threading.Lock()
        self._error: Exception | None = None
        self.stream = here()
        self._now = next(phases, None)
        if self._now is not None:
            node.underway.append(self)

    def test(self) -> bool:
        """Start the phases whose time has come, without waiting; whether all are complete."""
        self.advance()
        if self._error is not None:
            raise self._error
        return self._now is None

    def num_bytes(self) -> int:
        """How much is under way in the present phase."""
        now = self._now
        return 0 if now is None else now.num_bytes()

    def cancel(self) -> None:
        """Receive no more, and start no further phase."""
        with self._driving:
            if self._now is not None:
                self._now.cancel()
            self._now = None
            if self in self._node.underway:
                self._node.underway.remove(self)
        close = getattr(self._phases, "close", None)
        if close is not None:
            close()

    def advance(self) -> None:
        if not self._driving.acquire(blocking=False):
            return  # another thread of this rank is at it, as in a backward pass on CPU and GPU
        try:
            while self._now is not None and self._error is None and self._now.test():
                with self.stream.current():
                    self._now.conclude()
                    following = next(self._phases, None)
                    if following is None:
                        self.stream.mark()
                self._now = following
        except Exception as error:
            self._error = error
        finally:
            if (self._now is None or self._error is not None) and self in self._node.underway:
                self._node.underway.remove(self)
            self._driving.release()
