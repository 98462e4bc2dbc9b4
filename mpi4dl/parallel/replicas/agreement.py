"""Whether ranks that should hold the same values do so, to the last bit."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mpi4dl.comm import Communicator


def digest(value: Tensor) -> str:
    """Equal for equal bits, shapes and dtypes."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{tuple(value.shape)} {value.dtype}".encode() + flat.numpy().tobytes()).hexdigest()


def disagreement(comm: Communicator, values: Mapping[str, Tensor]) -> str | None:
    """Which of these values differ between the ranks of `comm`, in words; None if all are alike. Collective."""
    found = comm.all_gather_object({name: digest(value) for name, value in values.items()})
    wrong = [name for name in found[0] if any(other.get(name) != found[0][name] for other in found)]
    if not wrong:
        return None
    ranks = [rank for rank, other in enumerate(found) if any(other.get(name) != found[0][name] for name in wrong)]
    others = f" and {len(wrong) - 1} other values" if len(wrong) > 1 else ""
    return f"{wrong[0]}{others} on ranks {ranks} of the {comm.size} that hold them differ from those of the first"
