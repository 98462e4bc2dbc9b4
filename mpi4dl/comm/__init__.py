"""The wire: torch tensors over MPI, and the linear maps between ranks that autograd can differentiate.

This is the only package that imports mpi4py, and it does so when MPI is first needed. Torch comes with the first of the
names below, so that `mpi4dl.comm.failure` can watch over its import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4dl.comm.communicator import Communicator, Pending, RankFailed, Refusal, world

__all__ = ["Communicator", "Pending", "RankFailed", "Refusal", "world"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpi4dl.comm import communicator

    return getattr(communicator, name)
