"""What torch.distributed asks of a group beside communication: its name, its size, its devices and its abilities."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpi4dl.comm.backend.wire import Wire

GROUP: Any = dist.ProcessGroup  # its declared methods take what Python passes, ours what C++ does


class Abilities(NamedTuple):
    """What torch.distributed may ask of the backend of a group."""

    supports_splitting: bool = False
    supports_coalescing: bool = False
    supports_time_estimate: bool = False

    def name(self) -> str:
        return "mpi4dl"

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


def devices() -> list[str]:
    """The kinds of devices whose tensors can be sent."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class NamedGroup(GROUP):
    """A group of the ranks of a wire. C++ calls the methods whose names are not of Python's style."""

    def __init__(self, collectives: Wire) -> None:
        super().__init__(collectives.rank, collectives.size)
        self._collectives = collectives
        self._labels = {"name": "", "description": ""}

    def __repr__(self) -> str:
        return f"MpiGroup({self._labels['name']}, rank {self.rank()} of {self.size()})"

    def rank(self) -> int:
        return self._collectives.rank

    def size(self) -> int:
        return self._collectives.size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "mpi4dl"

    getBackendName = _get_backend_name = name

    def setGroupName(self, name: str) -> None:
        self._labels["name"] = name

    def getGroupName(self) -> str:
        return self._labels["name"]

    def setGroupDesc(self, description: str) -> None:
        self._labels["description"] = description

    def getGroupDesc(self) -> str:
        return self._labels["description"]

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in devices()]

    def _get_backend(self, device: torch.device) -> Abilities:
        return Abilities()
