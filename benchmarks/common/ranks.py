"""The contestants' side: how a rank begins, trains in plain loops, agrees with others on losses, and is timed."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.meter import Meter
from mpi4dl._memory import keep_freed_memory
from mpi4dl.comm import Communicator, world

Step = Callable[[], float]


def begin(threads: int | None = 1, keep: bool | None = True) -> Communicator:
    """This rank's communicator.

    `threads`: None gives a rank its share of the cores. `keep`: whether freed memory stays; None: by the C library.
    """
    if keep is not None:
        keep_freed_memory(keep)
    comm = world()
    if threads is None:
        comm.node.share_cores()
    else:
        torch.set_num_threads(threads)
    return comm


@contextmanager
def gloo(comm: Communicator) -> Iterator[None]:
    """Within this context torch.distributed knows the same ranks, over gloo. Collective."""
    from mpi4dl.torch_backend import shared_store

    store = shared_store(comm)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    with _until_all_leave(comm):
        yield


@contextmanager
def over_mpi(comm: Communicator) -> Iterator[None]:
    """Within this context torch.distributed knows the same ranks, over the backend of mpi4dl. Collective."""
    import mpi4dl.torch_backend  # noqa: F401

    dist.init_process_group("mpi4dl")
    with _until_all_leave(comm):
        yield


@contextmanager
def _until_all_leave(comm: Communicator) -> Iterator[None]:
    try:
        yield
    finally:
        comm.barrier()
        dist.destroy_process_group()


def random_batch(num_images: int, size: Sequence[int], num_classes: int) -> tuple[Tensor, Tensor]:
    """Images (N, 3, ...) and labels (N,), the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_images, 3, *size, generator=generator)
    return images, torch.randint(num_classes, (num_images,), generator=generator)


def use_pytorchs_kernels() -> None:
    """Take back all kernels on CPUs that mpi4dl has put in place of PyTorch's: in a process of another contestant."""
    from mpi4dl.parallel import cpu_kernels

    vars(cpu_kernels).pop("OURS", None)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    num_microbatches: int = 1,
    loss_of: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
    share: float = 1.0,
    sums: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
) -> Step:
    """A step as one writes it in PyTorch: a loop over microbatches. `sums(last)` is the context of each.

    It returns `share` of the mean loss.
    """
    inputs, targets = batch

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        pairs = zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True)
        for number, (some, theirs) in enumerate(pairs):
            with sums(number + 1 == num_microbatches):
                loss = loss_of(model(some), theirs) * (len(some) / len(inputs))
                loss.backward()
            total += loss.item() * share
        optimizer.step()
        return total

    return step


def first_losses(comm: Communicator, step: Step, num_steps: int) -> list[float]:
    """The losses of the whole batch in first steps: the means over the ranks. Collective."""
    losses = torch.tensor([step() for _ in range(num_steps)], dtype=torch.float64)
    return [loss / comm.size for loss in comm.all_reduce(losses).tolist()]


def difference(losses: Sequence[float], expected: Sequence[float], tolerance: float) -> str | None:
    """The first loss that differs from the expected one by more than `tolerance`, relative to it; None if none does."""
    for number, (found, wanted) in enumerate(zip(losses, expected, strict=False)):
        if not math.isclose(found, wanted, rel_tol=tolerance):
            return f"the loss of step {number} is {found:.6f} instead of {wanted:.6f}"
    return None


def must_agree(
    comm: Communicator, name: str, losses: Sequence[float], expected: Sequence[float], tolerance: float
) -> None:
    """Raises `Refusal` on all ranks if losses differ."""
    wrong = difference(losses, expected, tolerance)
    comm.agree(None if wrong is None else f"{name}: {wrong}: nothing was measured")


def burst_seconds(comm: Communicator, step: Callable[[], object], num_steps: int, device: torch.device) -> float:
    """Seconds per step on the slowest rank, after one step that does not count. Collective."""
    step()
    comm.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - began) / num_steps, dtype=torch.float64)
    return float(comm.all_reduce(seconds, "max"))


def image_turn(meter: Meter, step: Callable[[], object], num_steps: int, batch_size: int) -> dict[str, Any]:
    """The answer of a contestant that trains on images, for `beside_plain`. Collective."""
    found, images = meter.measure(step, num_steps), batch_size * num_steps
    return {
        "images_per_second": images / found["seconds"],
        "cpu_seconds_per_image": found["cpu_seconds"] / images,
        "work_seconds_per_image": found["work_seconds"] / images,
        "peak_bytes": found["peak_bytes"],
        "peak_bytes_of_ranks": found["peak_bytes_of_ranks"],
    }
