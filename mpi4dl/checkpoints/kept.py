"""What an engine must have for a checkpoint to be taken of it."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.parallel.pipeline.executor import Executor
from mpi4dl.parallel.pipeline.held import Held
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.replicas import ReadShard, Shard


class Scaler(Protocol):
    """The state of loss scaling under fp16."""

    enabled: bool
    scale: float
    finite_steps: int


class Kept(Protocol):
    """The face of `mpi4dl.engine.Engine` that checkpoints see, who stand below it."""

    comm: Communicator
    plan: Plan
    held: Held
    optimizer: torch.optim.Optimizer
    executor: Executor
    num_steps: int
    is_averaged: bool

    @property
    def scaler(self) -> Scaler: ...

    def shards(self) -> Iterator[Shard]: ...

    def load_shards(self, read: ReadShard) -> None: ...

    def buffers(self) -> dict[str, Tensor]: ...
