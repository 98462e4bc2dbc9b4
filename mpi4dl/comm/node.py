"""What the ranks of one machine share: its cores and its GPUs, and how a rank should wait for the others."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mpi4dl.comm.sentry import Waits

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.pending import Phases

SPINS_BEFORE_SLEEP = 200
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 0.4e-3  # a large message comes in pieces, and each may have to be fetched
NAP_SHARE = 1 / 200  # of the time waited so far: what a nap may add to the wait


def nap(waited_seconds: float) -> None:
    """Leave the core to others for a while, which is longer the longer this rank has waited already."""
    time.sleep(min(max(SHORTEST_NAP_SECONDS, NAP_SHARE * waited_seconds), LONGEST_NAP_SECONDS))


@dataclass
class Node:
    """This rank's place on its machine, as MPI reports it: never read from a launcher's environment.

    `wait_seconds` counts the time that this rank has spent waiting for others, in all communicators; `waits` marks when
    it does. `underway` is the communication that this rank has to drive forward while it waits for anything.
    """

    local_rank: int
    local_size: int
    cores: int
    threads: int
    wait_seconds: float = 0.0
    waits: Waits = field(default_factory=Waits)
    underway: "list[Phases]" = field(default_factory=list)

    @classmethod
    def of(cls, comm: "MPI.Comm") -> "Node":
        from mpi4py import MPI

        local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        mine = os.sched_getaffinity(0)
        shared = set().union(*local.allgather(mine))
        node = cls(local.rank, local.size, len(shared), max(1, min(len(mine), len(shared) // local.size)))
        local.Free()
        return node

    @property
    def oversubscribed(self) -> bool:
        return self.local_size > self.cores

    def share_cores(self) -> None:
        """Give every rank its part of the cores: PyTorch's default is all of them for each."""
        torch.set_num_threads(self.threads)

    def device(self, kind: str = "auto") -> torch.device:
        """The device of this rank. Where there are more ranks than GPUs, they share them in turn.

        `kind` is "auto" (a GPU where there is one), "cpu" or "cuda".
        """
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU here: use --device cpu")
        device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def wait(self, requests: "Sequence[MPI.Request]", phases: "Sequence[Phases]" = ()) -> None:
        """Wait for all of these. With more ranks than cores a spinning wait starves the rank it waits for.

        It gives way to whoever needs the core at every look, and then sleeps when that has not helped for a while.
        """
        from mpi4py import MPI

        requests = list(requests)
        begin = time.perf_counter()
        with self.waits:
            if not self.oversubscribed and not self.underway:
                MPI.Request.Waitall(requests)
            tries = 0
            while not (self._advance(phases) and MPI.Request.Testall(requests)):
                tries += 1
                if self.oversubscribed and tries > SPINS_BEFORE_SLEEP:
                    nap(time.perf_counter() - begin)
                else:
                    os.sched_yield()
        self.wait_seconds += time.perf_counter() - begin

    def _advance(self, phases: "Sequence[Phases]") -> bool:
        """Drive forward all that is under way; whether these phases are complete."""
        for each in list(self.underway):
            each.advance()
        return all(each not in self.underway for each in phases)
