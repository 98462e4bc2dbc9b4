"""Replicas: ranks that hold copies of the same parameters, and how their gradients come together."""

from mpi4dl.parallel.replicas.reducer import Reducer

__all__ = ["Reducer"]
