"""Replicas: the ranks that hold the same parameters. They sum gradients, and share out by ZeRO what all would have."""

from mpi4dl.parallel.replicas.group import GradientHook, ReadShard, ReplicaGroup, learners
from mpi4dl.parallel.replicas.groups import ReplicaGroups
from mpi4dl.parallel.replicas.reducer import Reducer
from mpi4dl.parallel.replicas.stepping import Stepping
from mpi4dl.parallel.replicas.whole import Shard

__all__ = ["GradientHook", "ReadShard", "Reducer", "ReplicaGroup", "ReplicaGroups", "Shard", "Stepping", "learners"]
