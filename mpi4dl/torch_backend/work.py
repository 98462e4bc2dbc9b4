"""The results of operations of torch.distributed: a handle to wait for, or a future.

MPI makes progress only in calls of the ranks. A thread would cost far more than it hides, and callbacks of `then` in it
would start collectives in another order on each rank. And a future can be waited for in ways that do not come here
(`collect_all`, C++). So it is complete when `get_future` returns, with one exception:

    DDP itself asks, in backward     it stays open; autograd completes it when the backward ends, before DDP waits
"""

import itertools
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.graph
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from mpi4dl.comm.pending import Pending, as_event
from mpi4dl.comm.requests import Calls
from mpi4dl.torch_backend.departure import Mismatch, TimedOut, within
from mpi4dl.torch_backend.messages import Letter

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.torch_backend.messages import Wire

# The ranks of a group must make the same calls: each tells others which call it makes, beside the data.
#
#     always     each rank tells the next one, in a message of its own that travels with the data
#     in full    under TORCH_DISTRIBUTED_DEBUG=DETAIL: every rank tells every other, also the shapes, before data moves
#
# MPI itself says nothing of sums of tensors of different sizes, or stops with a message that names no call.

PAGE_BYTES, PAGE_BYTES_IN_FULL = 128, 1024
CALL_TAG = 32764


class Agreement(Pending):
    """The announcements of other ranks about this rank's call, `call`, and then its `data`.

    It is ready when both have arrived; what MPI says of data that do not belong together is not looked at.
    """

    def __init__(self, wire: "Wire", call: str, in_full: bool) -> None:
        super().__init__(wire.node)
        self._rank = wire.rank
        self._page = _page(call, PAGE_BYTES_IN_FULL if in_full else PAGE_BYTES)
        others = [(wire.rank + step) % wire.size for step in range(1, wire.size)]
        told, heard = (others, others) if in_full else (others[:1], others[-1:])
        self._arriving: dict[int, tuple[MPI.Request, bytearray]] = {}
        self._different: dict[int, bytearray] = {}
        for rank in heard:
            page = bytearray(len(self._page))
            self._arriving[rank] = (wire.mpi.Irecv(page, rank, CALL_TAG), page)
        self._requests = [Calls([wire.mpi.Isend(self._page, rank, CALL_TAG) for rank in told])]

    @property
    def silent(self) -> list[int]:
        """The ranks that are known not to have come to this call yet."""
        return sorted(self._arriving)

    def carry(self, data: Sequence[Pending]) -> None:
        self._parts = data

    def test(self) -> bool:
        for rank, (request, page) in list(self._arriving.items()):
            if request.Test():
                del self._arriving[rank]
                if page != self._page:
                    self._different[rank] = page
        if self._arriving:
            return False
        if self._different:
            raise Mismatch(self._complaint())
        return super().test() and all([part.test() for part in self._parts])

    def _complaint(self) -> str:
        calls = {self._rank: self._page, **self._different}
        told = ", but ".join(f"rank {rank} calls {_text(page)}" for rank, page in sorted(calls.items()))
        return f"{told}: all ranks of a group must make the same calls, of the same sizes and dtypes, in one order"


def describe(name: str, detail: object, tensors: Sequence[Tensor], sized: bool, in_full: bool) -> str:
    """A call in words, as all ranks have to make it. `sized`: they have tensors of the same size, or shape in full."""
    if not sized:
        texts = sorted({str(x.dtype) for x in tensors})
    elif in_full:
        texts = [f"{x.dtype} of shape {tuple(x.shape)}" for x in tensors]
    else:
        texts = [f"{x.numel()} x {x.dtype}" for x in tensors]
    counts = [(len(list(alike)), text) for text, alike in itertools.groupby(texts)]
    what = ", ".join(text if count == 1 else f"{count} tensors of {text}" for count, text in counts)
    return f"{name}({detail}) of {what}" if tensors else f"{name}({detail})"


def _page(call: str, num_bytes: int) -> bytes:
    """A call as so many bytes; of what is too long, the end is there as a checksum."""
    text = call.encode()
    if len(text) > num_bytes:
        text = text[: num_bytes - 8] + b"%08x" % zlib.crc32(text)
    return text.ljust(num_bytes)


def _text(page: Sequence[int]) -> str:
    return bytes(page).decode(errors="replace").strip()


ENGINE = torch.autograd.graph._engine_run_backward.__code__


class MpiWork(dist.Work):
    """An operation under way. `results` are the tensors that it fills; `alarm` raises if it never can be complete."""

    def __init__(
        self,
        name: str,
        group: object,
        pending: Pending,
        results: list[Any],
        timeout: timedelta,
        alarm: Callable[[], None],
        receives: bool = False,
    ) -> None:
        super().__init__()
        self.receives = receives  # a message that others may never send
        self._name = name
        self._group = group
        self._pending = pending
        self._results = results
        self._timeout = timeout
        self._alarm = alarm
        self.late = False  # somebody has waited in vain
        self._done = False
        self._error: Exception | None = None
        self._told = False
        self._future: torch._C.Future[Any] | None = None
        # A request must not be tested by two threads at once.
        self._busy = threading.RLock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there.

        Raises:
            TimedOut: other ranks did not take part for `timeout`, or else for that of the call, or of the group.
            Departed: a rank that would have to take part has left.
            Mismatch: other ranks made another call.
        """
        limit = timeout if timeout else self._timeout  # torch passes 0 when nobody gave one
        with self._busy:
            self._complete(limit)
        self._pending.join()
        if self._future is not None and not self._future.done():
            self._future.set_result(self._results)
        return True

    def agree(self) -> None:
        """Wait for the message before the data."""
        self._await(self._timeout)

    def _complete(self, limit: timedelta) -> None:
        try:
            if self._error is None and not self._done:
                with as_event(f"wait({self._name})", []):
                    self._await(limit)
                    self._pending.conclude()
                self._done = True
        except TimedOut:  # it may be waited for again
            self.late = True
            raise
        except Exception as error:
            self._error = error
        if self._error is not None:
            self._told = True
            raise self._error

    def _await(self, limit: timedelta) -> None:
        self._pending.node.wait(self._pending, within(limit, lambda: self._complaint(limit), self._alarm))

    def _complaint(self, limit: timedelta) -> str:
        silent = self._pending.silent if isinstance(self._pending, Agreement) else []
        who = f"rank {silent[0]}" if silent else "some rank of its group"
        return (
            f"{self._name} of {self._group!r} was not complete in the timeout of {limit}: {who} has not come to it. "
            "Pass timeout=datetime.timedelta(...) to init_process_group or new_group if that is no fault"
        )

    def poke(self) -> bool:
        """Let MPI make progress; whether all is done, so that this need not be kept. Errors are for who waits."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            if self._error is not None:
                return self._told and not isinstance(self._error, Mismatch)  # whose data may still be on their way
            return self._done or (self._pending.test() and self._future is None and self.wait())
        except Exception as error:
            self._error = error
            return False
        finally:
            self._busy.release()

    def cancel(self) -> None:
        """Give up a receive that nobody has answered, as its group is destroyed. The waiting caller gets an error."""
        with self._busy:
            if not self._done and self._error is None and not self._pending.test():
                self._pending.cancel()
                self._error = RuntimeError(f"{self._name} of {self._group!r} was given up: the group was destroyed")

    def is_completed(self) -> bool:
        if not self.poke() and self._error is None and self._future is not None and self._pending.test():
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
        if not isinstance(self._pending, Letter) or self._pending.source is None:
            raise RuntimeError("only a receive that is complete knows its source")
        return self._pending.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        if self._future is not None:
            return self._future
        # DDP's own hook, which may have made tensors of 16 bits, looks into the future for a list as C++ has it.
        compressed = any(x.dtype is torch.float16 for x in self._results)
        if not self.is_completed() and _ddp_asks(sys._getframe(0).f_back) and not compressed:
            self._future = torch.futures.Future(devices=self._devices())
            Variable._execution_engine.queue_callback(self.synchronize)
            return self._future
        self.wait()
        if self._results and not self._devices():
            self._future = torch._C.fork(lambda: self._results)  # with the type, in C++, that a list of tensors has
        else:
            future: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices())
            future.set_result(self._results)
            self._future = future
        return self._future

    def _devices(self) -> list[Any]:
        return sorted({str(x.device) for x in self._results if isinstance(x, Tensor) and x.is_cuda})


def _ddp_asks(caller: FrameType | None) -> bool:
    """Whether C++ asks within a backward pass, with no function in Python between autograd's engine and us.

    The engine has threads of its own for GPUs, which no function in Python called.
    """
    return torch._C._current_autograd_node() is not None and (caller is None or caller.f_code is ENGINE)
