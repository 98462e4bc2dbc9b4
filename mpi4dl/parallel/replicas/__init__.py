"""Replicas: the ranks that hold the same parameters. They sum gradients, and share out by ZeRO what all would have."""

from mpi4dl.parallel.replicas.buckets import Shard
from mpi4dl.parallel.replicas.group import GradientHook, ReadShard, ReplicaGroup, trainable
from mpi4dl.parallel.replicas.groups import ReplicaGroups, Stepping
from mpi4dl.parallel.replicas.reducer import Reducer

__all__ = ["GradientHook", "ReadShard", "Reducer", "ReplicaGroup", "ReplicaGroups", "Shard", "Stepping", "trainable"]
