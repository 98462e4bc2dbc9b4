"""What PyTorch's own functions do not hand on to groups that are written in Python."""

import functools
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpi4dl.comm.backend.group import MpiGroup

OPERATION = "_c10d_functional::all_gather_into_tensor_out"


def gather_into_given_tensors() -> torch.library.Library:
    """Let `OPERATION`, which compiled programs call, work on our groups. It holds while the result is kept."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        kernel = torch.library.get_kernel(OPERATION, device)

        def gather(
            keys: torch._C.DispatchKeySet, x: Tensor, size: int, name: str, *, out: Tensor, kernel: Any = kernel
        ) -> Tensor:
            group = dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))
            if not isinstance(group, MpiGroup):
                return kernel.call_boxed(keys, x, size, name, out=out)
            group.all_gather_single(out, x).wait()
            return out

        library.impl("all_gather_into_tensor_out", gather, device, with_keyset=True)
    return library


def hand_on_monitored_barriers() -> None:
    """Let `dist.monitored_barrier`, which asks for the backend gloo by name, work on our groups."""
    of_gloo = dist.monitored_barrier

    @functools.wraps(of_gloo)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        ours = dist.group.WORLD if group is None else group
        if not isinstance(ours, MpiGroup):
            of_gloo(group, timeout, wait_all_ranks)
        else:
            limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
            ours.monitored_barrier(limit, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def keep_what_ddp_waits_for() -> None:
    """Keep what `Join` gives DDP to wait for in backward: C++ keeps its own part of it, whose `wait` never returns."""
    of_reducer: Any = dist.Reducer._set_forward_pass_work_handle
    kept: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()

    def set_forward_pass_work_handle(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        kept[reducer] = work
        of_reducer(reducer, work, use_static_world_size)

    reducer_class: Any = dist.Reducer
    reducer_class._set_forward_pass_work_handle = set_forward_pass_work_handle
