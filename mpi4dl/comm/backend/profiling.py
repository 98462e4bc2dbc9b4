"""Operations as events of torch.profiler: `mpi4dl:all_reduce` starts one, `mpi4dl:wait(all_reduce)` waits for it."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.autograd.profiler
from torch import Tensor


def as_event(name: str, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """A context that is an event while a profiler runs, with the shapes of these tensors, and else costs nothing."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch._C._profiler._RecordFunctionFast(f"mpi4dl:{name}", list(tensors), {})
