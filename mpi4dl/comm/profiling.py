"""What a rank does as events of torch.profiler, and as ranges of NVTX under its `emit_nvtx`.

mpi4dl:forward of stage 0, microbatch 1      an action of the plan's table, as its drawing has it
mpi4dl:wait                                  this rank waits for others
mpi4dl:all_reduce, mpi4dl:wait(all_reduce)   an operation of torch.distributed starts; somebody waits for it
"""

import contextlib
from collections.abc import Sequence
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
