"""Where master weights and the optimizer's state live: on the device of the model, on the host, or on disk."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mpi4dl.parallel.replicas.strides import seen_as

OFFLOADS = ("none", "cpu", "disk")
BLOCK_BYTES = 64 << 20  # of one file: each is open while it is in use
ALIGNMENT_BYTES = 64


class Home(Protocol):
    """Gives values a place to stay."""

    def place(self, value: Tensor) -> Tensor:
        """A tensor with the same values, shape, dtype and strides that stays there; the same one if it is there."""

    def has(self, value: Tensor) -> bool:
        """Whether it is there."""


class Device:
    """On the device of the model."""

    def place(self, value: Tensor) -> Tensor:
        return value

    def has(self, value: Tensor) -> bool:
        return True


class Host:
    """In memory of the host, pinned if the model is on a GPU."""

    def place(self, value: Tensor) -> Tensor:
        if self.has(value):
            return value
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)

    def has(self, value: Tensor) -> bool:
        return value.device.type == "cpu"


class Disk:
    """In files that are mapped into memory: the system keeps of them what it has room for.

    They have no names, so that nothing is left of them when the process ends, however it does. `folder` should be on a
    fast local disk; None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._blocks: list[Tensor] = []  # the last one is being filled
        self._filled_bytes = 0

    def place(self, value: Tensor) -> Tensor:
        if self.has(value):
            return value
        if not self._blocks or self._filled_bytes + value.nbytes > self._blocks[-1].nbytes:
            self._blocks.append(self._map(max(BLOCK_BYTES, value.nbytes)))
            self._filled_bytes = 0
        room = self._blocks[-1][self._filled_bytes : self._filled_bytes + value.nbytes]
        self._filled_bytes += -(-value.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return seen_as(room.view(value.dtype), value).copy_(value)

    def has(self, value: Tensor) -> bool:
        return any(block.data_ptr() <= value.data_ptr() < block.data_ptr() + block.nbytes for block in self._blocks)

    def _map(self, num_bytes: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self.folder) as file:
            # Reserved before use: a mapping of a hole ends the process with a signal when the disk is full.
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(
                    f"there is no room for {num_bytes >> 20} MiB more in {self.folder or tempfile.gettempdir()} "
                    f"({error.strerror}): make room, or choose another `offload_folder`"
                ) from error
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def home_for(offload: str, folder: str | Path | None = None) -> Home:
    """The place that `offload` names. Raises ValueError if it names none."""
    if offload not in OFFLOADS:
        raise ValueError(f"offload is {offload!r}, but must be one of {', '.join(OFFLOADS)}")
    return Disk(folder) if offload == "disk" else Host() if offload == "cpu" else Device()
