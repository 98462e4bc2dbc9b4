"""Memory in files that are mapped, and where values are kept that nobody needs for a while."""

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mpi4dl.comm.exchange import linear

PLACES = ("device", "host", "disk")


class NoRoom(OSError):
    """A folder has no room for a file of values, or cannot be written; the message says what to do."""


_maps: "WeakValueDictionary[int, mmap.mmap]" = WeakValueDictionary()  # by the address at which they begin


def mapped(num_bytes: int, folder: str | Path | None = None) -> Tensor:
    """So many bytes, all 0, in a file without a name: nothing is left of it when the process ends, however it does.

    `folder` should be on a fast local disk; None: the system's folder for temporary files.

    Raises:
        NoRoom: the folder cannot be written, or the disk is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved before use: a mapping of a hole ends the process with a signal when the disk is full.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapping = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise NoRoom(
            f"there is no room for {num_bytes >> 20} MiB more in {folder or tempfile.gettempdir()} "
            f"({error.strerror}): make room, or name another folder by the variable TMPDIR"
        ) from error
    found = torch.frombuffer(mapping, dtype=torch.uint8)
    _maps[found.data_ptr()] = mapping
    return found


PROBE_BYTES, PROBES = 32 << 20, 3


def byte_seconds(folder: str | Path | None = None) -> tuple[float, float]:
    """The seconds in which a byte of a file in a folder is written and read: where the system keeps it in its memory,
    and where the disk has to write it. Infinite if there is no room.
    """
    in_memory = on_disk = float("inf")
    for _ in range(PROBES):
        began = time.perf_counter()
        try:
            values = mapped(PROBE_BYTES, folder).view(torch.float32)
        except NoRoom:
            break
        values.fill_(1)
        let_go(values)
        values.sum()
        in_memory = min(in_memory, time.perf_counter() - began)
        _maps[values.data_ptr()].flush()
        on_disk = min(on_disk, time.perf_counter() - began)
    return in_memory / PROBE_BYTES, on_disk / PROBE_BYTES


def let_go(*tensors: Tensor | None) -> None:
    """Take those of these tensors that are in mapped files out of the process's memory; they come back when needed."""
    for x in tensors:
        mapping = None if x is None or not x.is_cpu else _maps.get(x.untyped_storage().data_ptr())
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Keep:
    """Where values are kept until they are needed again: on the device, on the host, or in files of `folder`."""

    where: str = "device"
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise ValueError(f"values are kept on {self.where!r}, but must be on one of {', '.join(PLACES)}")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a value that is computed on `device`. Raises NoRoom."""
        num_bytes = prod(shape) * dtype.itemsize
        if self.where == "disk" and num_bytes:
            return mapped(num_bytes, self.folder).view(dtype).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype, device=device if self.where == "device" else "cpu")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, all 0."""
        found = self.empty(shape, dtype, device)
        return found if self.where == "disk" else found.zero_()

    def moved(self, x: Tensor) -> Tensor:
        """x, kept there; differentiable."""
        if self.where == "device":
            return x
        device = x.device
        return linear(x, lambda x: self.empty(x.shape, x.dtype, device).copy_(x), lambda g: g.to(device))


ON_DEVICE = Keep()
