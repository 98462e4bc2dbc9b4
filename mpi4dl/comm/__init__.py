"""The wire: torch tensors over MPI, and the linear maps between ranks that autograd can differentiate.

This is the only package that imports mpi4py, and it does so when `world()` is first called.
"""

from mpi4dl.comm.communicator import Communicator, Pending, Refusal, world

__all__ = ["Communicator", "Pending", "Refusal", "world"]
