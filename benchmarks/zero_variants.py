"""The contestants of benchmarks.zero: one training of a transformer, in plain PyTorch, by our engine and its peers."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.bursts import Step
from benchmarks.encoder import encoder
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.plan import Plan

NUM_CLASSES = 10
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Task:
    """What all contestants train: a model of this size on the same batch, of which each of `ranks` has `samples`."""

    features: int
    num_layers: int
    samples: int
    size_px: int
    ranks: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return encoder(self.features, self.num_layers, NUM_CLASSES)

    @property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())

    def batch(self) -> tuple[Tensor, Tensor]:
        """Images and labels of all ranks."""
        generator = torch.Generator().manual_seed(1)
        total = self.ranks * self.samples
        images = torch.randn(total, 3, self.size_px, self.size_px, generator=generator)
        return images, torch.randint(NUM_CLASSES, (total,), generator=generator)

    def own(self, rank: int) -> slice:
        return slice(rank * self.samples, (rank + 1) * self.samples)


class Trained(NamedTuple):
    """A step, which returns the loss of this rank's samples (of all of them from our engine), and what it works on.

    `parameters` are those whose gradients only PyTorch keeps; ours lie in buckets, which Python knows.
    """

    step: Step
    optimizer: torch.optim.Optimizer
    parameters: Sequence[Tensor]


Make = Callable[[Task, Communicator], Trained]


def adam(parameters: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Trained:
    """A step as one writes it in PyTorch."""

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Trained(step, optimizer, list(model.parameters()))


def plain(task: Task, comm: Communicator) -> Trained:
    model = task.model()
    return loop(model, adam(model.parameters()), *task.batch())


def shared(task: Task, rank: int) -> tuple[Tensor, Tensor]:
    images, labels = task.batch()
    return images[task.own(rank)], labels[task.own(rank)]


def ours(zero: int) -> Make:
    def make(task: Task, comm: Communicator) -> Trained:
        model = task.model()
        optimizer = adam(model.parameters())
        engine = Engine(model, Plan(data=comm.size, zero=zero), optimizer, F.cross_entropy, comm=comm)
        images, _ = shared(task, comm.rank)
        labels = task.batch()[1]
        size = (task.size_px, task.size_px)
        return Trained(lambda: engine.step(images, labels, size).loss, optimizer, [])

    return make


def ddp(task: Task, comm: Communicator) -> Trained:
    model = nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    return loop(model, adam(model.parameters()), *shared(task, comm.rank))


def redundancy(task: Task, comm: Communicator) -> Trained:
    with warnings.catch_warnings():  # of its own use of torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=LEARNING_RATE
    )
    return loop(model, optimizer, *shared(task, comm.rank))


def fully_sharded(reshard: bool) -> Make:
    """FSDP2, each encoder layer on its own as its documentation advises.

    Without `reshard`, parameters stay from forward to backward, which is as much communication as ZeRO 2 makes.
    """

    def make(task: Task, comm: Communicator) -> Trained:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = task.model()
        mesh = init_device_mesh("cpu", (comm.size,))
        for layer in list(model)[1:-1]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return loop(model, adam(model.parameters()), *shared(task, comm.rank))

    return make


class Variant(NamedTuple):
    """A contestant, whom of torch.distributed it is measured against, and which bytes it shares out over the ranks.

    `whole` and `shared` are the bytes per parameter that a rank has of all parameters and of its part of them, while
    the optimizer works: 4 for a parameter, 4 for its gradient, 8 for Adam's state.
    """

    make: Make
    peer: str | None
    whole: int
    shared: int

    def formula(self, num_ranks: int) -> float:
        return self.whole + self.shared / num_ranks


PLAIN = "plain PyTorch"
VARIANTS = {
    PLAIN: Variant(plain, None, 16, 0),
    "ZeRO-0": Variant(ours(0), "DDP", 16, 0),
    "DDP": Variant(ddp, None, 16, 0),
    "ZeRO-1": Variant(ours(1), "ZeroRedundancyOptimizer", 8, 8),
    "ZeroRedundancyOptimizer": Variant(redundancy, None, 8, 8),
    "ZeRO-2": Variant(ours(2), "FSDP2-kept", 4, 12),
    "FSDP2-kept": Variant(fully_sharded(reshard=False), None, 0, 16),
    "ZeRO-3": Variant(ours(3), "FSDP2", 0, 16),
    "FSDP2": Variant(fully_sharded(reshard=True), None, 0, 16),
}
