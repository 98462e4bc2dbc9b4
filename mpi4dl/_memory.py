"""How much memory a rank has used at most: the allocator's count on a GPU, the process' resident memory on a CPU."""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mpi4dl._files import control_groups

if TYPE_CHECKING:
    import torch

Device: TypeAlias = "torch.device | str"

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # of glibc's malloc.h
KEPT_BYTES = 2**31 - 1
RETURNED_BYTES = 1 << 20
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # which PyTorch asks for when it makes its first tensor
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


def keep_freed_memory(keep: bool = True) -> bool:
    """Let freed memory stay with the process, or have large tensors return theirs at once; False without glibc.

    Returned memory is cleared page by page for the next tensor. That takes up to half of the CPU time of a small model,
    also with huge pages. Kept memory fragments: glibc leaves slivers between aligned tensors, and small objects in them
    keep new tensors from the place of the last ones. So a process grows over its first hundreds of steps, up to two or
    three times what it has in use at most, while the number and the bytes of its tensors stay as they are. Left alone,
    glibc does a little of both, and grows too. One arena for all threads leaves less lying about.

    Measured after 50 steps on 2 cores that others used too, so that CPU time is a hint. ResNet-50, 512 px, 1x2 tiles:
    kept 509 MiB, 1.56 CPU seconds a step; glibc's default 513, 1.64; returned, with huge pages, 452, 2.68.
    AmoebaNet-D (3, 48), 128 px, 2 tiles and 2 stages: 57 MiB kept, and 56 by glibc's default, with 32 MiB as the
    threshold of what is returned, and kept with malloc_trim every 10 steps.
    """
    if not keep:
        os.environ.setdefault(HUGE_PAGES, "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    options = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: KEPT_BYTES} if keep else {M_MMAP_THRESHOLD: RETURNED_BYTES}
    return all(mallopt(name, value) for name, value in (options | {M_ARENA_MAX: 1}).items())


def forget(x: "torch.Tensor") -> None:
    """Give the pages back on which only this contiguous tensor of a CPU lies. Its numbers are lost."""
    start, stop = (-(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE)
    if stop > start and hasattr(mmap, "MADV_DONTNEED"):
        place = ctypes.c_void_p(start * mmap.PAGESIZE), ctypes.c_size_t((stop - start) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(*place, mmap.MADV_DONTNEED)


def _status_bytes(field: str, file: Path | None = None) -> int | None:
    """A line of a file of /proc such as `VmHWM:  123456 kB`; None where there is no such file or line."""
    try:
        text = (file or STATUS).read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def memory_of_node(meminfo: Path = Path("/proc/meminfo"), *places: Path) -> int:
    """The bytes that all processes of this node may use together: its memory, or what its control group allows."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    found.append(_status_bytes("MemTotal", meminfo) or found[0])
    for words in control_groups("memory", ("memory.max", "memory.limit_in_bytes"), *places):
        found += [int(word) for word in words if word.isdecimal()]
    return min(found)


class NodeMemory(NamedTuple):
    """Where a rank computes: a node, or a GPU of one, and how many bytes of memory that has."""

    name: str
    num_bytes: int


def place_of(device: "torch.device") -> NodeMemory:
    """Where this rank computes on `device`."""
    import torch

    if device.type == "cuda":
        return NodeMemory(f"{device} of {platform.node()}", torch.cuda.get_device_properties(device).total_memory)
    return NodeMemory(platform.node(), memory_of_node())


def peak_memory_bytes(device: Device) -> int:
    """The most bytes in use at once since the process started, or since the peak was last reset.

    `device` is a torch device or its name. On a GPU these are the bytes of tensors, as PyTorch's allocator counts
    them; on the CPU it is the process' resident memory, with the interpreter, libraries and MPI's buffers.
    """
    if _on_gpu(device):
        import torch

        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _on_gpu(device: Device) -> bool:
    return str(device).startswith("cuda")


def within_limits(run: Callable[[], None], rank: int) -> None:
    """Do `run()`; raises `Refusal` with the ways out if this rank runs out of memory, or of open files."""
    import torch

    from mpi4dl.comm import Refusal

    try:
        run()
    except OSError as error:
        if error.errno not in OUT_OF_FILES:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise Refusal(
            f"rank {rank} has too many open files ({error.filename or 'of all kinds'}): it may have {limit}; raise "
            "that with ulimit -n, or lower `num_workers`"
        ) from error
    except (
        RuntimeError,
        MemoryError,
    ) as error:  # of which torch.OutOfMemoryError is one; the CPU has no kind of its own
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise Refusal(
            f"rank {rank} is out of memory: `mpi4dl plan` with the same flags shows the memory that it needs; try "
            f"`zero` 3, `offload` disk, `recompute`, more `tiles` or a smaller `batch_size` ({reason})"
        ) from error


def load_libraries(device: Device, shapes: bool = False) -> None:
    """Train something tiny, so that what PyTorch loads at first use is not taken for a model's memory.

    `shapes`: models will be built on shapes, too.
    """
    import torch
    from torch import nn

    with torch.random.fork_rng([torch.device(device)] if _on_gpu(device) else []):
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.TransformerEncoderLayer(36, 4, 8)
        )
        layers.to(device)(torch.ones(2, 3, 8, 8, device=device)).sum().backward()
        torch.optim.SGD(layers.parameters(), lr=0.1).step()
        if shapes:
            torch.empty(1, device="meta").normal_()


def return_freed_memory() -> None:
    """Give all memory that nothing lies in back to the system, where that is glibc's, and forget the peak so far."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    reset_peak()


def reset_peak() -> bool:
    """Count the resident memory's peak anew from here on; False where the system does not let a process do that."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


class MemoryMeter:
    """The peak memory of training itself: what a rank uses beyond what it used when the meter was made.

    On the CPU the resident memory at that moment (interpreter, libraries) is subtracted, so make the meter after the
    imports and before the model. Pages of files do not count: those of PyTorch's libraries come as its code is called
    for the first time, and the system may drop them. On a GPU the allocator counts tensors only, and nothing is
    subtracted.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reset()
        if _on_gpu(device):
            self.baseline_bytes = 0
        else:
            self.baseline_bytes = (_status_bytes("VmRSS") or peak_memory_bytes(device)) - self._bytes_of_files()

    def peak_bytes(self) -> int:
        """The most bytes in use at once since the last `reset`, or since the meter was made."""
        return max(0, peak_memory_bytes(self.device) - self._bytes_of_files() - self.baseline_bytes)

    def _bytes_of_files(self) -> int:
        return 0 if _on_gpu(self.device) else _status_bytes("RssFile") or 0

    def reset(self) -> bool:
        """Count the peak anew from here on; False where the system does not let a process do that."""
        if _on_gpu(self.device):
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        return reset_peak()
