"""The old name of `mpi4dl.torch_backend`: what imported it registers the backend as before."""

from mpi4dl.torch_backend import Departed, Mismatch, MpiGroup, TimedOut

__all__ = ["Departed", "Mismatch", "MpiGroup", "TimedOut"]
