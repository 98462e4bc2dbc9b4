"""The contestants of benchmarks.peers: one training, of the same layers cut at the same places, by each of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from benchmarks.bursts import Step, gloo
from benchmarks.encoder import encoder
from benchmarks.peers_options import BACKEND, CHUNKS, ENGINE, GLOO, PIPELINES, TRANSFORMER, Contest
from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.local_stages import choose_cut, split
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan

NUM_CLASSES = 10
LEARNING_RATE = 1e-3  # with a larger one batch norm over few values makes rounding grow from step to step
SCHEDULES: Mapping[str, Any] = MappingProxyType(
    {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
)


@dataclass(frozen=True)
class Task:
    """What all contestants train: a chain of layers, by SGD on one batch, in so many microbatches."""

    model: str
    options: Mapping[str, int]
    size_px: int
    batch_size: int
    num_microbatches: int

    def layers(self) -> nn.Sequential:
        """The model, with the weights that all contestants begin with."""
        torch.manual_seed(0)
        if self.model == TRANSFORMER:
            return encoder(self.options["features"], self.options["num_layers"], NUM_CLASSES)
        from mpi4dl import models

        model = models.build(self.model, NUM_CLASSES, **self.options)
        assert isinstance(model, nn.Sequential)
        return model

    @property
    def image(self) -> tuple[int, ...]:
        """The shape of a microbatch."""
        return (self.batch_size // self.num_microbatches, 3, self.size_px, self.size_px)

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch_size, *self.image[1:], generator=generator)
        return images, torch.randint(NUM_CLASSES, (self.batch_size,), generator=generator)

    def share(self, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """What a rank has of the batch where ranks share out its samples."""
        images, labels = self.batch()
        return images.tensor_split(size)[rank], labels.tensor_split(size)[rank]

    def counts(self, num_stages: int) -> tuple[int, ...]:
        """How many layers each stage has, by FLOPs."""
        with torch.device("meta"):
            layers = self.layers()
        names = [name for name, _ in layers.named_children()]
        plan = Plan(((1, 1),) * num_stages, microbatches=self.num_microbatches)
        return choose_cut(Cuttable(layers, names), plan, None, "flops", self.image).counts


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def loop(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    num_microbatches: int,
    share: float = 1.0,
    sums: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
) -> Step:
    """A step as one writes it in PyTorch: a loop over microbatches. `sums(last)` is the context of each.

    It returns `share` of the mean loss.
    """
    optimizer = sgd(model.parameters())
    images, labels = batch

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        pairs = zip(images.tensor_split(num_microbatches), labels.tensor_split(num_microbatches), strict=True)
        for number, (some, theirs) in enumerate(pairs):
            with sums(number + 1 == num_microbatches):
                loss = F.cross_entropy(model(some), theirs) * (len(some) / len(images))
                loss.backward()
            total += loss.item() * share
        optimizer.step()
        return total

    return step


def plain(task: Task) -> Step:
    return loop(task.layers(), task.batch(), task.num_microbatches)


class Chain(nn.Module):
    """Layers in a row, which hand on tensors as arguments: what torch.distributed takes for a stage."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any) -> Any:
        value = values if len(values) > 1 else values[0]
        for layer in self.layers:
            value = layer(value)
        return value


def pipeline(task: Task, method: str, counts: Sequence[int]) -> Step:
    """A schedule of torch.distributed, over the process group that is there."""
    rank, size, num_stages = dist.get_rank(), dist.get_world_size(), len(counts)
    layers = list(task.layers())
    ends = [sum(counts[:i]) for i in range(num_stages + 1)]
    chains = {i: Chain(layers[ends[i] : ends[i + 1]]) for i in range(rank, num_stages, size)}
    del layers
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(chain, i, num_stages, device) for i, chain in chains.items()]
    schedule = SCHEDULES[method](
        stages[0] if method in ("gpipe", "1f1b") else stages, task.num_microbatches, loss_fn=F.cross_entropy
    )
    images, labels = task.batch()
    optimizer = sgd(nn.ModuleList(chains.values()).parameters())
    is_first, is_last = rank == 0, num_stages - 1 in chains

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        wanted = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*([images] if is_first else []), return_outputs=False, **wanted)
        optimizer.step()
        return torch.stack(losses).mean().item() if is_last else 0.0

    return step


def data_parallel(task: Task, method: str) -> Step:
    """DistributedDataParallel, or FSDP2 on each layer: a rank's samples in microbatches of the same size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layers, batch = task.layers(), task.share(rank, size)
    if method == "DDP":
        ddp = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
        return loop(
            ddp, batch, task.num_microbatches // size, 1 / size, lambda last: nullcontext() if last else ddp.no_sync()
        )
    mesh = init_device_mesh("cpu", (size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)

    @contextmanager
    def sums(last: bool) -> Iterator[None]:
        assert isinstance(layers, FSDPModule)
        layers.set_requires_gradient_sync(last)
        yield

    return loop(layers, batch, task.num_microbatches // size, 1 / size, sums)


def plan_of(method: str, num_ranks: int, num_microbatches: int) -> Plan:
    if method in PIPELINES:
        chunks = CHUNKS if method == "interleaved" else 1
        return Plan(((1, 1),) * num_ranks, microbatches=num_microbatches, schedule=method, chunks=chunks)
    return Plan(data=num_ranks, microbatches=num_microbatches // num_ranks, zero=3 if method == "FSDP2" else 0)


def engine(task: Task, method: str, counts: Sequence[int], comm: Communicator) -> Step:
    """Ours: it also takes the norm of the gradient, and sees to it that all ranks have finite ones."""
    plan = plan_of(method, comm.size, task.num_microbatches)
    size = (task.size_px, task.size_px)
    with torch.device("meta"):
        names = [name for name, _ in task.layers().named_children()]
    held = split(task.layers, plan, comm, balance=counts, image=task.image, whole=names)
    trainer = Engine(held, plan, sgd(held.parameters()), F.cross_entropy, comm=comm)
    images, labels = task.batch()
    tiles = [images[slice(*read.box[0])] for read in trainer.reads(task.batch_size, size)]
    share = 1.0 if comm.rank == 0 else 0.0
    return lambda: trainer.step(tiles, labels, size).loss * share


class Joined(NamedTuple):
    """The context in which a contestant trains, and what makes its step there: the sum over ranks is the loss."""

    group: AbstractContextManager[None]
    make: Callable[[], Step]


@contextmanager
def over_mpi(comm: Communicator) -> Iterator[None]:
    """Within this context torch.distributed knows the same ranks, over our backend. Collective."""
    import mpi4dl.torch_backend  # noqa: F401

    dist.init_process_group("mpi4dl")
    try:
        yield
    finally:
        comm.barrier()
        dist.destroy_process_group()


def join(task: Task, contest: Contest, counts: Sequence[int], comm: Communicator | None) -> Joined:
    """A contestant on this rank."""
    if comm is None:
        return Joined(nullcontext(), lambda: plain(task))
    if contest.side == ENGINE:
        return Joined(nullcontext(), lambda: engine(task, contest.method, counts, comm))
    group = {GLOO: gloo, BACKEND: over_mpi}[contest.side](comm)
    if contest.method in PIPELINES:
        return Joined(group, lambda: pipeline(task, contest.method, counts))
    return Joined(group, lambda: data_parallel(task, contest.method))
