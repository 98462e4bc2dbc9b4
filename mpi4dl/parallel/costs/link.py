"""The link between ranks as a straight line: a message takes a latency, and so many seconds for each of its bytes."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

SMALL_BYTES, LARGE_BYTES = 64, 1 << 21
LINK_REPEATS = {SMALL_BYTES: 40, LARGE_BYTES: 5}
LINK_TAG = 3


class Link(NamedTuple):
    """`latency_seconds` of a message without bytes, and the seconds that each byte adds."""

    latency_seconds: float
    byte_seconds: float

    def seconds(self, messages: float, num_bytes: float) -> float:
        return messages * self.latency_seconds + num_bytes * self.byte_seconds

    def __str__(self) -> str:
        return f"{self.latency_seconds * 1e6:.0f} us and {self.byte_seconds * 2**20 * 1e3:.2g} ms/MiB a message"


ASSUMED = Link(20e-6, 1 / 4e9)  # between processes of one machine, which share memory


def measure_link(comm: "Communicator", device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Link:
    """The link between the first and the last rank, the fastest of a few messages. Collective; alike on all ranks."""
    if comm.size == 1:
        return ASSUMED
    small, large = (_one_way(comm, num_bytes, device, clock) for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    found = None
    if comm.rank == 0:
        found = Link(max(small, 1e-7), max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-13))
    link: Link = comm.broadcast_object(found)
    return link


def _one_way(comm: "Communicator", num_bytes: int, device: torch.device, clock: Callable[[], float]) -> float:
    there, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
    for _ in range(LINK_REPEATS[num_bytes]):
        start = clock()
        if comm.rank == 0:
            comm.send(there, comm.size - 1, LINK_TAG)
            comm.recv(there, comm.size - 1, LINK_TAG)
        elif comm.rank == comm.size - 1:
            comm.recv(there, 0, LINK_TAG)
            comm.send(there, 0, LINK_TAG)
        seconds.append((clock() - start) / 2)
    return min(seconds)
