"""The wire: torch tensors over MPI, and the linear maps between ranks that autograd can differentiate.

This is the only package that imports mpi4py, and it does so when MPI is first needed. Torch comes with the first of the
names below, so that `mpi4dl.comm.failure` can watch over its import.
"""

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4dl.comm.communicator import Communicator, Pending, world

__all__ = ["Communicator", "Pending", "RankFailed", "Refusal", "world"]


# The errors that all ranks raise together, and the error of a rank about others.


class Refusal(ValueError):
    """The request cannot be done. It is raised by all ranks together, with the same message."""


class RankFailed(RuntimeError):
    """Another rank failed, in a way that is no refusal, where all were to do something; with that rank's traceback."""


class Mismatch(ValueError, RuntimeError):
    """Ranks made calls that do not belong together: other operations, sizes or dtypes."""


# Errors of code about wrong arguments. Anything else says nothing of the code, but of the machine.
NOT_TAKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    copy.Error,
)


def __getattr__(name: str) -> Any:
    """What comes with torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mpi4dl.comm import communicator

    return getattr(communicator, name)
