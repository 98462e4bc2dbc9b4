"""Data parallelism against torch's DistributedDataParallel over gloo: images/s of ResNet-50 on synthetic images.

    python -m benchmarks.data_parallel --model resnet50 --batch-size 8 --image-size 64 --ranks 1,2

    plain PyTorch              one process, on a batch of its own
    ours                       the engine: the same as plain PyTorch on the whole batch, batch norm over all ranks
    ours, norm per rank        the engine's sum of gradients (Reducer) around plain PyTorch: what DDP computes
    DDP                        batch norm of each rank's samples alone, so that results depend on the number of ranks
    DDP, SyncBatchNorm         batch norm over all ranks, which PyTorch has for GPUs alone

As in Horovod's synthetic benchmark: random images, SGD, images/s of a rank and of all as mean +- 1.96 standard
deviations. Every number of ranks is a job of its own under mpirun, and the jobs take turns; so do all contestants on
the ranks of a job, after it has been checked in float64 that those that should have the same losses have them.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bursts import Step, burst_seconds, first_losses, gloo, must_agree
from benchmarks.report import between, error_bars, publish, pyplot, spread, table
from benchmarks.turns import Contestant, answer_turns, median, numbers, on_ranks, take_turns

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.replicas import Reducer

PLAIN, OURS, OURS_PER_RANK = "plain PyTorch", "ours", "ours, norm per rank"
DDP, SYNCHRONISED = "DDP", "DDP, SyncBatchNorm"
COLORS = {PLAIN: "0.6", OURS: "tab:blue", OURS_PER_RANK: "tab:cyan", DDP: "tab:orange", SYNCHRONISED: "tab:red"}
DEVIATIONS = 1.96
NUM_CLASSES = 1000
LEARNING_RATE = 0.01
CHECKED_STEPS = 2
TOLERANCE = 1e-9  # in float64: in float32 batch norm of few values makes the loss after a step differ by rounding


def parse(argv: list[str]) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=description)
    parser.add_argument("--model", default="resnet50", help="a model of mpi4dl.models or torchvision")
    parser.add_argument("--batch-size", type=int, default=8, help="images of each rank in a step")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of the images, in pixels")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank, on the CPU")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a contestant in a turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each number of ranks")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("results/data_parallel"), help="where to write .json and .png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("batch_size", "image_size", "threads", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be at least 1")
    try:
        fewest = min(numbers(options.ranks))
    except ValueError:
        parser.error(f"--ranks {options.ranks}: write them as 1,2,4")
    if fewest < 1:
        parser.error(f"--ranks {options.ranks}: a job has 1 rank at least")
    return options


class Contests:
    """All contestants on the ranks of a job: `steps` has a step of its own copy of the model for each. Collective."""

    def __init__(self, options: argparse.Namespace, comm: "Communicator", dtype: "torch.dtype") -> None:
        import torch

        self.options, self.comm, self.dtype = options, comm, dtype
        self.device = comm.node.device(options.device)
        generator = torch.Generator().manual_seed(1)
        total, size = options.batch_size * comm.size, options.image_size
        self.batch_images = torch.randn(total, 3, size, size, generator=generator).to(self.device, dtype)
        self.batch_labels = torch.randint(NUM_CLASSES, (total,), generator=generator)
        own = slice(comm.rank * options.batch_size, (comm.rank + 1) * options.batch_size)
        self.images, self.labels = self.batch_images[own], self.batch_labels[own].to(self.device)
        self.missing: dict[str, str] = {}
        self.steps = {OURS: self.ours(), DDP: self.ddp(self.model())}
        if comm.size == 1:
            self.steps[PLAIN] = self.plain()
            return
        self.steps[OURS_PER_RANK] = self.ours_per_rank()
        try:
            self.steps[SYNCHRONISED] = self.synchronised()
        except ValueError as refusal:
            self.missing[SYNCHRONISED] = str(refusal)

    def check(self) -> None:
        """Raises `Refusal` on all ranks if contestants that should have the same losses have not. Collective."""
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

    def loop(
        self, model: "nn.Module", images: "torch.Tensor", labels: "torch.Tensor", reducer: "Reducer | None" = None
    ) -> Step:
        """A step as one writes it in PyTorch; with a reducer, on gradients that are summed over the ranks."""
        import torch
        from torch.nn import functional as F

        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

        def step() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            if reducer is None:
                loss.backward()
            else:
                reducer.prepare()
                (loss / self.comm.size).backward()
                reducer.finish()
            optimizer.step()
            return loss.item()

        return step

    def plain(self) -> Step:
        """On the whole batch."""
        return self.loop(self.model(), self.batch_images, self.batch_labels.to(self.device))

    def ours(self) -> Step:
        import torch
        from torch.nn import functional as F

        from mpi4dl.engine import Engine
        from mpi4dl.parallel.plan import Plan

        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        engine = Engine(model, Plan(data=self.comm.size), optimizer, F.cross_entropy, comm=self.comm)
        return lambda: engine.step(self.images, self.batch_labels).loss

    def ours_per_rank(self) -> Step:
        from mpi4dl.parallel.replicas import Reducer

        model = self.model()
        return self.loop(model, self.images, self.labels, Reducer(model.parameters(), self.comm).attach())

    def ddp(self, model: "nn.Module") -> Step:
        from torch.nn.parallel import DistributedDataParallel

        return self.loop(DistributedDataParallel(model, gradient_as_bucket_view=True), self.images, self.labels)

    def synchronised(self) -> Step:
        from torch.nn import SyncBatchNorm

        return self.ddp(SyncBatchNorm.convert_sync_batchnorm(self.model()))


def worker(options: argparse.Namespace) -> None:
    """All contests on these ranks; an answer has the seconds of a step by contestant."""
    import torch

    from mpi4dl._memory import keep_freed_memory
    from mpi4dl._torchvision import import_torchvision
    from mpi4dl.comm import world

    import_torchvision()
    keep_freed_memory()
    comm = world()
    torch.set_num_threads(options.threads)
    with gloo(comm):
        Contests(options, comm, torch.float64).check()
        contests = Contests(options, comm, torch.float32)

        def turn() -> dict[str, Any]:
            steps = contests.steps.items()
            seconds = {name: burst_seconds(comm, step, options.steps, contests.device) for name, step in steps}
            return {"seconds": seconds, "missing": contests.missing}

        answer_turns(turn, comm)


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    contestants = on_ranks(options.ranks, ["-m", "benchmarks.data_parallel", *sys.argv[1:], "--worker"])
    take_turns(contestants, options.rounds)
    results, missing = summarise(contestants, options.batch_size), contestants[-1].answers[0]["missing"]
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''} a rank"
    title = (
        f"{options.model}, batch of {options.batch_size} a rank, {options.image_size} px, {options.device}, {threads}"
    )
    print(f"{title}\n{as_table(results)}")
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    publish(options, {"not_measured": missing, "contestants": results}, plot(results, title))


def summarise(contestants: list[Contestant], batch_size: int) -> list[dict[str, Any]]:
    """Means and deviations over the turns, and medians of the ratios of images/s to DDP's in the same turn."""
    results = []
    for contestant in contestants:
        turns = [answer["seconds"] for answer in contestant.answers]
        for name in (name for name in COLORS if name in turns[0]):
            speeds = [batch_size / turn[name] for turn in turns]
            over_ddp = [turn[DDP] / turn[name] for turn in turns]
            results.append(
                {
                    "name": name,
                    "ranks": contestant.ranks,
                    "images_per_second_of_a_rank": statistics.mean(speeds),
                    "spread": DEVIATIONS * statistics.pstdev(speeds),
                    "median_seconds": median([turn[name] for turn in turns]),
                    **spread("speed_over_ddp", over_ddp),
                }
            )
    return results


def as_table(results: list[dict[str, Any]]) -> str:
    rows = [("", "ranks", "images/s of a rank", "images/s in all", "median step ms", "over DDP", "(min-max)")]
    for r in results:
        speed, deviation = r["images_per_second_of_a_rank"], r["spread"]
        rows.append(
            (
                r["name"],
                str(r["ranks"]),
                f"{speed:.1f} +- {deviation:.1f}",
                f"{speed * r['ranks']:.1f} +- {deviation * r['ranks']:.1f}",
                f"{1e3 * r['median_seconds']:.0f}",
                f"{r['speed_over_ddp']:.2f}",
                between(r, "speed_over_ddp"),
            )
        )
    return table(rows)


def plot(results: list[dict[str, Any]], title: str) -> Any:
    """Images/s of all ranks, and over DDP's on as many ranks: a bar for each contestant, a group for each job."""
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 0.45 * len(results) + 1.6), sharey=True)
    ranks = [r["ranks"] for r in results]
    places = [place + 0.6 * sorted(set(ranks)).index(ranks[place]) for place in range(len(results))]
    names = [f"{r['name']}, {r['ranks']} rank{'s' if r['ranks'] > 1 else ''}" for r in results]
    style = {
        "error_kw": {"ecolor": "0.3"},
        "capsize": 3,
        "color": [COLORS[r["name"]] for r in results],
    }
    speeds, spreads = ([r["ranks"] * r[key] for r in results] for key in ("images_per_second_of_a_rank", "spread"))
    axes[0].barh(places, speeds, xerr=spreads, **style)
    axes[0].set_xlabel("images/s of all ranks (mean, 1.96 deviations)")
    over = [r["speed_over_ddp"] for r in results]
    axes[1].barh(places, over, xerr=error_bars(results, "speed_over_ddp"), **style)
    axes[1].axvline(1.0, color="0.3", linewidth=0.8, linestyle="--")
    axes[1].set_xlabel("images/s over DDP's (median of turns, min-max)")
    ends_of_all = [[v + s for v, s in zip(speeds, spreads, strict=True)], [r["speed_over_ddp_max"] for r in results]]
    for axis, values, tips, digits in zip(axes, (speeds, over), ends_of_all, (1, 2), strict=True):
        axis.set_xlim(0, 1.2 * max(tips))
        for place, value, tip in zip(places, values, tips, strict=True):
            axis.text(tip, place, f"  {value:.{digits}f}", verticalalignment="center")
    axes[0].set_yticks(places, names)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11)
    return figure


if __name__ == "__main__":
    main()
