"""Streams of a GPU and memory of the host: the one file that says who records which event, and who waits for it.

`S` is the caller's stream, on which it made what is sent and will use what arrives. `C` is a stream of its own for
transfers, on which it copies, so that `S` computes on meanwhile. `host` is the thread that calls MPI.

    S     ..makes x, packs it..|E0|............computes on..............(E2)..unpacks y..|E3|..
                                  \\                                       /                 \\
    C                            (E0)..copies x..|E1|      (E0)..copies y..|E2|              \\
                                                    \\       /                                 \\
    host                                           (E1)..MPI..                                 \\
    W     ..another stream, where somebody waits for y........................................(E3)..uses y..

    |E| records event E; (E) waits for it: streams in their queues, the host by asking whether E1 has been reached,
    while it waits for anything else too. Nothing here stops the host.

E0 also stands for everything that `S` did before with the memory that y goes to. A staging buffer that MPI has sent is
free at once, as the host knows; one that was copied to the GPU is free once E2 is reached. Memory that belongs to `S`
and that `C` uses is held until then. Whoever finds that messages have come, and on whatever stream, what follows is put
on `S`. Where MPI reads GPU memory itself ("direct"), MPI is called once E0 is reached.

NCCL is called at once, with `S` current. torch records and waits for E0 and E2 by itself, around a stream N of its own:

    S     ..makes x, packs it..|E0|............computes on..............(E2)..unpacks y..|E3|..
    N                            (E0)..sends x, receives y..|E2|
    host                              ..drives MPI meanwhile.. E2 is reached

The host looks for E2 before it puts anything on `S` that needs y; `Works.join` is (E2). Memory that N uses is held
until then, by us and by torch.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.packing import as_bytes, is_dense
from mpi4dl.comm.requests import Condition, Request

SMALLEST_BYTES = 1 << 12


class Nowhere:
    """Where there is no GPU."""

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> None:
        """Remember the work that was queued so far, for `join`."""

    def join(self) -> None:
        """Let what is put on the current stream come after it."""

    def wait(self) -> None:
        """Let the host wait until it is done."""


class Here(Nowhere):
    """The stream that is current now: S."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._event: Any = None

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def join(self) -> None:
        current = torch.cuda.current_stream()
        if self._event is not None and current != self._stream:
            current.wait_event(self._event)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


NOWHERE = Nowhere()


def here() -> Nowhere:
    return Here() if torch.cuda.is_initialized() else NOWHERE


class StagingBuffers:
    """Where tensors of one GPU meet the host: the stream of transfers, and the pinned buffers that it reuses.

    Operations of C are numbered: once the host has seen a number, all operations before it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._free: dict[int, list[Staging]] = {}
        self._begun = 0
        self._seen = 0
        self._lock = threading.Lock()  # autograd's thread for this GPU takes and gives, too

    def begin(self) -> tuple[Any, Request]:
        """E0: what has been put on the current stream by now; and the host's wait for it."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event, Condition(event.query)

    def to_host(self, packed: Tensor, begun: Any) -> tuple[Tensor, Request]:
        """Copy flat bytes to a staging buffer, after E0 `begun`; and the host's wait for E1."""
        host = self.take(packed.numel(), for_copy=True)
        copied = self._after(begun, lambda: host.copy_(packed, non_blocking=True))
        return host, Condition(lambda: self._sees(copied))

    def to_device(self, host: Tensor, packed: Tensor, begun: Any) -> None:
        """Copy a staging buffer, which is free after it, to flat bytes, after E0; the current stream waits for E2."""
        copied = self._after(begun, lambda: packed.copy_(host, non_blocking=True))
        torch.cuda.current_stream(self.device).wait_event(copied.event)
        self.give(host, copied)

    def take(self, num_bytes: int, for_copy: bool = False) -> Tensor:
        """A staging buffer: so many bytes of pinned memory, for C to copy to, in its turn, or for MPI to write to."""
        size = max(SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(size, [])
            for place, (buffer, done) in enumerate(free):
                if for_copy or done is None or self._sees(done):
                    del free[place]
                    return buffer[:num_bytes]
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)[:num_bytes]

    def give(self, buffer: Tensor, done: "Done | None" = None) -> None:
        """Take a staging buffer back: it is free once C has done that, or at once."""
        whole = buffer._base
        assert whole is not None
        with self._lock:
            self._free[whole.numel()].append(Staging(whole, done))

    def _after(self, begun: Any, work: Callable[[], Any]) -> "Done":
        with self._lock:  # numbers rise in the order of C
            self.stream.wait_event(begun)
            with torch.cuda.stream(self.stream):
                work()
            event = torch.cuda.Event()
            event.record(self.stream)
            self._begun += 1
            return Done(self._begun, event)

    def _sees(self, done: "Done") -> bool:
        if done.number > self._seen and done.event.query():
            self._seen = done.number
        return done.number <= self._seen


class Done(NamedTuple):
    """The end of what C did as its `number`th work."""

    number: int
    event: Any


class Staging(NamedTuple):
    """A buffer, and what has to be done before it is free."""

    buffer: Tensor
    done: Done | None


@cache
def staging_buffers_of(device: torch.device) -> StagingBuffers:
    """The dock of a GPU."""
    return StagingBuffers(device)


def carried(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. It goes to a GPU by pinned memory, so that the host need not stop until it is there."""
    if device.type != "cuda" or not x.is_cpu or not is_dense(x) or not x.numel():
        return x.to(device, non_blocking=True)
    staging = staging_buffers_of(device)
    host, result = staging.take(x.nbytes), torch.empty(x.shape, dtype=x.dtype, device=device)
    begun, _ = staging.begin()
    host.copy_(as_bytes(x.detach()))
    staging.to_device(host, as_bytes(result), begun)
    return result


def to_pinned(x: Tensor) -> Tensor:
    """A copy of x, which is on a GPU, in pinned memory; the host waits for it."""
    stream, host = here(), torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    stream.mark()
    stream.wait()
    return host
