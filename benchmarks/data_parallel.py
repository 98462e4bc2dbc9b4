"""Data parallelism against torch's DistributedDataParallel over gloo: images/s of ResNet-50 on synthetic images.

    python -m benchmarks run data_parallel --model resnet50 --batch-size 8 --image-size 64 --ranks 1,2

    plain PyTorch              one process, on a batch of its own
    ours                       the engine: the same as plain PyTorch on the whole batch, batch norm over all ranks
    ours, norm per rank        the engine's sum of gradients (Reducer) around plain PyTorch: what DDP computes
    DDP                        batch norm of each rank's samples alone, so that results depend on the number of ranks

As in Horovod's synthetic benchmark: random images, SGD, images/s of a rank as mean +- 1.96 standard
deviations. Each number of ranks is a job, and the jobs take turns; so do all contestants on the ranks of a job, after
a check in float64 that those that should have the same losses have them.
"""

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, PEERS, PLAIN, THIRD, Bars, bars
from benchmarks.common.options import Option, Options
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, spread, table
from benchmarks.common.turns import Contestant, answer_turns, take_turns
from mpi4dl._wording import counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from benchmarks.common.ranks import Step
    from mpi4dl.comm import Communicator

PYTORCH, OURS, OURS_PER_RANK = "plain PyTorch", "ours", "ours, norm per rank"
DDP = "DDP"
COLORS = {PYTORCH: PLAIN, OURS: OTHERS, OURS_PER_RANK: THIRD, DDP: PEERS}
DEVIATIONS = 1.96
NUM_CLASSES = 1000
CHECKED_STEPS = 2
TOLERANCE = 1e-9  # in float64: in float32 batch norm of few values makes the loss after a step differ by rounding
OPTIONS = (
    Option("--model", str, "resnet50", "a model of mpi4dl.models or torchvision"),
    declared.batch_size(8, "images of each rank in a step"),
    declared.count("--image-size", 64, "height and width of the images, in pixels"),
    declared.ranks("1,2"),
    declared.THREADS,
    declared.steps(2),
    declared.rounds(10),
    declared.DEVICE,
)
QUICK = {"model": "small_resnet", "batch_size": 2, "image_size": 32, "steps": 1, "rounds": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("images/s of a rank", "images_per_second_of_a_rank", 1),
    Column("+-", "spread", 1),
    Column("images/s in all", "images_per_second", 1),
    Column("median step ms", "median_seconds", 0, 1e3),
    Column("over DDP", "speed_over_ddp", 2, ends=True),
)


class Contests:
    """All contestants on the ranks of a job: `steps` has a step of its own copy of the model for each. Collective."""

    def __init__(self, options: Options, comm: "Communicator", dtype: "torch.dtype") -> None:
        from benchmarks.common.ranks import random_batch

        self.options, self.comm, self.dtype = options, comm, dtype
        self.device = comm.node.device(options.device)
        images, self.batch_labels = random_batch(options.batch_size * comm.size, [options.image_size] * 2, NUM_CLASSES)
        self.batch_images = images.to(self.device, dtype)
        own = slice(comm.rank * options.batch_size, (comm.rank + 1) * options.batch_size)
        self.own = self.batch_images[own], self.batch_labels[own].to(self.device)
        self.steps = {OURS: self.ours(), DDP: self.ddp(self.model())}
        if comm.size == 1:
            self.steps[PYTORCH] = self.plain()
        else:
            self.steps[OURS_PER_RANK] = self.ours_per_rank()

    def check(self) -> None:
        """Raises `Refusal` on all ranks if contestants that should have the same losses have not. Collective."""
        from benchmarks.common.ranks import first_losses, must_agree

        whole_batch = []
        if self.comm.rank == 0:
            step = self.plain()
            whole_batch = [step() for _ in range(CHECKED_STEPS)]
        whole_batch = self.comm.broadcast_object(whole_batch)
        found = {name: first_losses(self.comm, step, CHECKED_STEPS) for name, step in self.steps.items()}
        for name, losses in found.items():
            per_rank = name in (DDP, OURS_PER_RANK) and self.comm.size > 1
            must_agree(self.comm, name, losses, found[DDP] if per_rank else whole_batch, TOLERANCE)

    def model(self) -> "nn.Module":
        import torch

        from mpi4dl import models

        torch.manual_seed(0)
        return models.build(self.options.model, NUM_CLASSES).to(self.device, self.dtype)

    def optimizer(self, model: "nn.Module") -> "torch.optim.Optimizer":
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(self, model: "nn.Module", batch: "tuple[Tensor, Tensor]", **how: Any) -> "Step":
        from benchmarks.common.ranks import loop

        return loop(model, self.optimizer(model), batch, **how)

    def plain(self) -> "Step":
        """On the whole batch."""
        return self.loop(self.model(), (self.batch_images, self.batch_labels.to(self.device)))

    def ours(self) -> "Step":
        from torch.nn import functional as F

        from mpi4dl.engine import Engine
        from mpi4dl.parallel.plan import Plan

        model = self.model()
        engine = Engine(model, Plan(data=self.comm.size), self.optimizer(model), F.cross_entropy, comm=self.comm)
        return lambda: engine.step(self.own[0], self.batch_labels).loss

    def ours_per_rank(self) -> "Step":
        """A plain loop on gradients that the reducer sums over the ranks."""
        from torch.nn import functional as F

        from mpi4dl.parallel.replicas import Reducer

        model, size = self.model(), self.comm.size
        reducer = Reducer(model.parameters(), self.comm).attach()
        optimizer, (images, labels) = self.optimizer(model), self.own

        def step() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            reducer.prepare()
            (loss / size).backward()
            reducer.finish()
            optimizer.step()
            return loss.item()

        return step

    def ddp(self, model: "nn.Module") -> "Step":
        from torch.nn.parallel import DistributedDataParallel

        return self.loop(DistributedDataParallel(model, gradient_as_bucket_view=True), self.own)


def work(options: Options) -> None:
    """All contests on these ranks; an answer has the seconds of a step by contestant."""
    import torch

    from benchmarks.common.ranks import begin, burst_seconds, gloo
    from mpi4dl._torchvision import import_torchvision

    import_torchvision()
    comm = begin(options.threads)
    with gloo(comm):
        Contests(options, comm, torch.float64).check()
        contests = Contests(options, comm, torch.float32)

        def turn() -> dict[str, Any]:
            steps = contests.steps.items()
            return {
                "seconds": {name: burst_seconds(comm, step, options.steps, contests.device) for name, step in steps}
            }

        answer_turns(turn, comm)


def run(options: Options) -> None:
    contestants = [options.contestant(str(ranks), ranks) for ranks in options.ranks]
    take_turns(contestants, options.rounds)
    rows = summarise(contestants, options.batch_size)
    batch = f"batch of {options.batch_size} a rank, {options.image_size} px"
    title = f"{options.model}, {batch}, {options.device}, {counted(options.threads, 'thread')} a rank"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def summarise(contestants: list[Contestant], batch_size: int) -> list[dict[str, Any]]:
    """Means and deviations over the turns, and medians of the ratios of images/s to DDP's in the same turn."""
    rows = []
    for contestant in contestants:
        turns = contestant.of("seconds")
        for name in (name for name in COLORS if name in turns[0]):
            speeds = [batch_size / turn[name] for turn in turns]
            rows.append(
                {
                    "name": name,
                    "ranks": contestant.ranks,
                    "images_per_second_of_a_rank": statistics.mean(speeds),
                    "spread": DEVIATIONS * statistics.pstdev(speeds),
                    **spread("images_per_second", [contestant.ranks * speed for speed in speeds]),
                    "median_seconds": statistics.median([turn[name] for turn in turns]),
                    **spread("speed_over_ddp", [turn[DDP] / turn[name] for turn in turns]),
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Images/s of all ranks, and over DDP's on as many ranks."""
    panels = [
        Bars("images_per_second", "images/s of all ranks (median, min-max)", digits=1),
        Bars("speed_over_ddp", "images/s over DDP's (median, min-max)", baseline=1.0),
    ]
    return bars(rows, panels, title, [COLORS[row["name"]] for row in rows])
