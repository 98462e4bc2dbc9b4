"""The cost of training steps: seconds, CPU time, the share of it that is work, and memory.

wall time of a rank    |=== computes ===|.. waits ..|== computes ==|.. waits ..|
CPU seconds             xxxxxxxxxxxxxxxxx  x  x  x   xxxxxxxxxxxxxx  x  x  x        of all threads of the process
work                    xxxxxxxxxxxxxxxxx            xxxxxxxxxxxxxx                 CPU seconds outside of waits
idle                                     ...........                ...........     wall time without work

A waiting rank of mpi4dl polls. The clock of its thread tells the CPU time of polling, with MPI's copies, which is no
work. Waits of gloo sleep while its threads move messages, so all CPU time of gloo is work. `cpu_seconds` counts both.

Memory is the peak of the process above its memory after all imports. Modules that PyTorch loads at first use, such as
those behind an optimizer's first step, count as imports.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mpi4dl._memory import MemoryMeter, load_libraries
from mpi4dl.comm import Communicator
from mpi4dl.comm.requests import Waits


class ClockedWaits(Waits):
    """Marks waits as `inner` does, and counts their CPU seconds of the thread that waits."""

    def __init__(self, inner: Waits) -> None:
        self.inner = inner
        self.cpu_seconds = 0.0
        self._depth, self._began = 0, 0.0

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self._depth == 0:
            self._began = time.thread_time()
        self._depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.cpu_seconds += time.thread_time() - self._began
        self.inner.__exit__(kind, error, trace)


class Meter:
    """Measures this rank's steps from here on; make it after `world()` and before the model. Collective."""

    def __init__(self, device: torch.device, comm: Communicator | None) -> None:
        self.device, self.comm = device, comm
        load_libraries(device)
        self.memory = MemoryMeter(device)
        self.waits = ClockedWaits(Waits() if comm is None else comm.node.waits)
        if comm is not None:
            comm.node.waits = self.waits

    def measure(self, step: Callable[[], object], num_steps: int) -> dict[str, Any]:
        """Wall seconds of the slowest rank, seconds of all ranks together, and the peak of the largest. Collective."""
        if self.comm is not None:
            self.comm.barrier()
        began, cpu, waited = time.perf_counter(), time.process_time(), self.waits.cpu_seconds
        for _ in range(num_steps):
            step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.process_time() - cpu
        work = spent - (self.waits.cpu_seconds - waited)
        own = (time.perf_counter() - began, spent, work, self.memory.peak_bytes())
        seconds, cpus, works, peaks = zip(*self.of_ranks(own), strict=True)
        return {
            "seconds": max(seconds),
            "cpu_seconds": sum(cpus),
            "work_seconds": sum(works),
            "idle_seconds": max(0.0, max(seconds) * len(works) - sum(works)),
            "peak_bytes": max(peaks),
            "peak_bytes_of_ranks": list(peaks),
        }

    def of_ranks(self, value: Any) -> list[Any]:
        """This value of each rank. Collective."""
        if self.comm is None:
            return [value]
        return self.comm.all_gather_object(value)


class _Kept:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class ActivationMeter:
    """Counts the bytes that autograd keeps for the backward pass, each storage once, without parameters.

    `with meter.counting(): ...` counts what is saved in there, until it is freed. It takes time: not for training.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._uses: dict[int, int] = {}

    def counting(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            self._uses[place] = self._uses.get(place, 0) + 1
            if self._uses[place] == 1:
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(kept, self._release, place, size)
        return kept

    def _release(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            self.live_bytes -= size
