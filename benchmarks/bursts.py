"""Contestants on the same ranks: they must compute the same, and are then timed burst by burst, one after the other."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mpi4dl.comm import Communicator

Step = Callable[[], float]


@contextmanager
def gloo(comm: "Communicator") -> Iterator[None]:
    """Within this context torch.distributed knows the same ranks, over gloo. Collective."""
    import torch.distributed

    from mpi4dl.torch_backend.rendezvous import shared_store

    store = shared_store(comm)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        comm.barrier()
        torch.distributed.destroy_process_group()


def first_losses(comm: "Communicator", step: Step, num_steps: int) -> list[float]:
    """The losses of the whole batch, of which every rank has as much, in first steps. Collective."""
    import torch

    losses = torch.tensor([step() for _ in range(num_steps)], dtype=torch.float64)
    return [loss / comm.size for loss in comm.all_reduce(losses).tolist()]


def must_agree(
    comm: "Communicator", name: str, losses: Sequence[float], expected: Sequence[float], tolerance: float
) -> None:
    """Raises `Refusal` on all ranks if a loss is further from what is expected than `tolerance`, relative to it."""
    wrong = None
    for number, (found, wanted) in enumerate(zip(losses, expected, strict=True)):
        if wrong is None and not math.isclose(found, wanted, rel_tol=tolerance):
            wrong = f"{name}: the loss of step {number} is {found:.6f} instead of {wanted:.6f}: nothing was measured"
    comm.agree(wrong)


def burst_seconds(comm: "Communicator", step: Callable[[], object], num_steps: int, device: "torch.device") -> float:
    """Seconds a step on the slowest rank, after one that is not counted. Collective."""
    import torch

    step()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - began) / num_steps, dtype=torch.float64)
    return float(comm.all_reduce(seconds, "max"))
