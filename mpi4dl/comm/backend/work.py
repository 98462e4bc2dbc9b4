"""What an operation of torch.distributed returns: something to wait for, or a future for those who want one.

Nobody but the ranks' own calls makes MPI progress: there is no thread, which would cost far more than it hides. So
whoever waits for a future must make MPI progress too:

    within backward, in a hook     the future stays open; autograd completes it when the backward ends, before DDP waits
    anywhere else                  it is complete when `get_future` returns
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from mpi4dl.comm.backend.patience import wait_until_ready
from mpi4dl.comm.backend.wire import Arrival
from mpi4dl.comm.node import Node
from mpi4dl.comm.pending import Pending


class MpiWork(dist.Work):
    """An operation under way. `results` are the tensors that it fills."""

    def __init__(self, name: str, pending: Pending, node: Node, results: list[Any], timeout: timedelta) -> None:
        super().__init__()
        self._name = name
        self._pending = pending
        self._node = node
        self._results = results
        self._timeout = timeout
        self._done = False
        self._error: Exception | None = None
        self._told = False
        self._future: DrivenFuture | None = None
        # A request must not be tested by two threads at once.
        self._busy = threading.RLock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there.

        Raises:
            TimeoutError: other ranks did not take part for `timeout`, or else for that of the group.
        """
        limit = timeout if timeout else self._timeout  # torch passes 0 when nobody gave one
        with self._busy:
            self._complete(limit)
        if self._future is not None and not self._future.done():
            self._future.set_result(self._results)
        return True

    def _complete(self, limit: timedelta) -> None:
        try:
            if self._error is None and not self._done:
                wait_until_ready(self._pending, self._node, limit.total_seconds(), lambda: self._complaint(limit))
                self._pending.wait()
                self._done = True
        except TimeoutError:  # it may be waited for again
            raise
        except Exception as error:
            self._error = error
        if self._error is not None:
            self._told = True
            raise self._error

    def _complaint(self, limit: timedelta) -> str:
        return (
            f"{self._name} was not complete after {limit}: some rank of its group has not come to it. Pass "
            "timeout=datetime.timedelta(...) to init_process_group or new_group if that is no fault"
        )

    def poke(self) -> bool:
        """Let MPI make progress; whether all is done, so that this need not be kept. Errors are for who waits."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            if self._error is not None:
                return self._told
            return self._done or (self._pending.ready() and self._future is None and self.wait())
        except Exception as error:
            self._error = error
            return False
        finally:
            self._busy.release()

    def is_completed(self) -> bool:
        if not self.poke() and self._error is None and self._future is not None and self._pending.ready():
            self.wait()
        return self._done or self._error is not None

    def is_success(self) -> bool:
        return self._done

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """The rank, in the group, that a message came from."""
        if not isinstance(self._pending, Arrival) or self._pending.source is None:
            raise RuntimeError("only a receive that is complete knows its source")
        return self._pending.source

    _source_rank = source_rank

    def get_future(self) -> "DrivenFuture":
        if self._future is None:
            devices = sorted({str(x.device) for x in self._results if isinstance(x, Tensor) and x.is_cuda})
            self._future = DrivenFuture(self, devices)
            if torch._C._current_autograd_node() is None:
                self.wait()
            else:
                Variable._execution_engine.queue_callback(self.synchronize)
        return self._future


class DrivenFuture(torch.futures.Future):
    """A future whose `wait` makes MPI progress, and so do those that `then` makes of it."""

    def __init__(self, work: MpiWork, devices: list[str]) -> None:
        super().__init__(devices=[torch.device(device) for device in devices])
        self._work = work
        self._devices = devices

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "DrivenFuture":
        following = DrivenFuture(self._work, self._devices)

        def follow(done: Any) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following
