"""Replicas: whoever holds the same parameters. Gradients are summed over them, ZeRO shares out what they would repeat."""

from mpi4dl.parallel.replicas.group import Read, ReplicaGroup, Shard, step_all
from mpi4dl.parallel.replicas.reducer import Reducer

__all__ = ["Read", "Reducer", "ReplicaGroup", "Shard", "step_all"]
