"""Replicas: the ranks that hold the same parameters. They sum gradients, and share out by ZeRO what all would have."""

from mpi4dl.parallel.replicas.group import ReadShard, ReplicaGroup, Shard, step_all
from mpi4dl.parallel.replicas.reducer import Reducer

__all__ = ["ReadShard", "Reducer", "ReplicaGroup", "Shard", "step_all"]
