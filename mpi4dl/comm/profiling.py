"""What a rank does as events of torch.profiler, and as ranges of NVTX under its `emit_nvtx`.

mpi4dl:forward of stage 0, microbatch 1      an action of the plan's table, as its drawing has it
mpi4dl:wait                                  this rank waits for others
mpi4dl:all_reduce, mpi4dl:wait(all_reduce)   an operation of torch.distributed starts; somebody waits for it

PyTorch takes an event for asynchronous if it begins on one thread and ends on another, as those of its own backends do.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.autograd.profiler
from torch import Tensor


def profiling() -> bool:
    """Whether a profiler runs."""
    return torch.autograd.profiler._is_profiler_enabled


def as_event(name: object, tensors: Sequence[Tensor] = ()) -> contextlib.AbstractContextManager[Any]:
    """A context that is an event while a profiler runs, with the shapes of these tensors, and else costs nothing."""
    if not profiling():
        return contextlib.nullcontext()
    return torch._C._profiler._RecordFunctionFast(f"mpi4dl:{name}", list(tensors), {})


@contextlib.contextmanager
def as_asynchronous_event(name: object, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
    """The same for the start of an operation that goes on behind it: a profile shows it as asynchronous."""
    if not profiling():
        yield
        return
    event = as_event(name, tensors)
    event.__enter__()
    try:
        yield
    finally:
        ending = threading.Thread(target=event.__exit__, args=(None, None, None), name="profile")
        ending.start()
        ending.join()
