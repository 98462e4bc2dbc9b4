"""Pipelines and replicas against torch.distributed's own: images/s, CPU time, work and memory of the same training.

    python -m benchmarks run peers --models amoebanetd,transformer --ranks 2,4

    plain PyTorch            one process, a loop over the microbatches
    gpipe, 1f1b, interleaved, zero-bubble
                             torch.distributed.pipelining over gloo and over our backend, and the engine's schedules
    DDP                      DistributedDataParallel over gloo and over our backend, with gradients added up over
                             microbatches; the engine's replicas (the benchmark `zero` has FSDP2)

All have the same layers, cut at the same places, weights, batch, microbatches, SGD and one thread a process.
Zero-bubble is ZB-H1 of ours, and InterleavedZeroBubble (ZB1P) with one stage a rank. The engine takes batch norm over
all replicas, torch.distributed over each one's samples alone: the reference of each is a plain loop over the same
samples. A contestant whose losses differ from plain PyTorch's is reported, and compared with nobody.

Each contestant is a job of its own, and they take turns. `benchmarks.common.meter` defines CPU seconds, work, idle time
and memory. The engine also takes the gradient's norm and stops all ranks at one that is not finite; its peers do not.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, PEERS, THIRD, Bars, bars
from benchmarks.common.charts import PLAIN as GREY
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, save
from benchmarks.common.results import Column, mebibytes, table
from benchmarks.common.turns import Contestant, answer_turns, measure_once, take_turns
from mpi4dl.options.kinds import choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from benchmarks.common.ranks import Step
    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.plan import Plan

TRANSFORMER = "transformer"
PIPELINES, REPLICAS = ("gpipe", "1f1b", "interleaved", "zero-bubble"), ("DDP",)
METHODS = PIPELINES + REPLICAS
ENGINE, GLOO, BACKEND = "engine", "gloo", "backend"
SIDES = (GLOO, BACKEND, ENGINE)
CHUNKS = 2
NUM_CLASSES = 10
LEARNING_RATE = 1e-3  # with a larger one batch norm over few values makes rounding grow from step to step
# In float64 all agree to 1e-14. In float32 AmoebaNet's batch norms over 4 samples make rounding a thousand times larger
# in each step, so that two are compared; another loss, or other samples, differ by far more.
CHECKED_STEPS = 2
TOLERANCE = 2e-3
COMPARED = ("images_per_second", "cpu_seconds", "work_seconds", "peak_bytes")
TITLES = {"amoebanetd": "AmoebaNet-D", TRANSFORMER: "transformer"}
SIZES = {"amoebanetd": {"num_layers": 6, "num_filters": 48}, TRANSFORMER: {"num_layers": 14, "features": 256}}
QUICK_SIZES = {"amoebanetd": {"num_layers": 3, "num_filters": 8}, TRANSFORMER: {"num_layers": 6, "features": 16}}
OPTIONS = (
    Option("--models", listed(choice(*SIZES)), ",".join(SIZES), f"of {', '.join(SIZES)}"),
    declared.ranks("2,4"),
    Option("--methods", listed(choice(*METHODS)), ",".join(METHODS), "schedules, and kinds of replicas"),
    Option(
        "--sides",
        listed(choice(*SIDES)),
        ",".join(SIDES),
        "gloo and backend: torch.distributed over gloo, and over ours; engine: ours",
    ),
    declared.count("--num-layers", None, "instead of 6 of amoebanetd and 14 of the transformer"),
    declared.count("--width", None, "filters of amoebanetd (48) or features of the transformer (256)"),
    declared.count("--size", 128, "height and width of the images, in pixels"),
    declared.batch_size(16),
    declared.count("--microbatches", 8, "of a batch"),
    declared.steps(2),
    declared.rounds(7),
)
QUICK = {"models": TRANSFORMER, "ranks": "2", "methods": "1f1b", "size": 32, "batch_size": 8, "microbatches": 4}
QUICK |= {"steps": 1, "rounds": 1}
COLUMNS = (
    NAME,
    Column("images/s", "images_per_second", 2, ends=True),
    Column("CPU s", "cpu_seconds", 3),
    Column("work s", "work_seconds", 3),
    Column("idle s", "idle_seconds", 3),
    mebibytes("peak MiB", "peak_bytes"),
    Column("over gloo", "over_peer_images_per_second", 2, ends=True),
    *(
        Column(head, f"over_peer_{key}", 2)
        for head, key in (("CPU", "cpu_seconds"), ("work", "work_seconds"), ("memory", "peak_bytes"))
    ),
)
COLORS = {"plain PyTorch": GREY, GLOO: PEERS, BACKEND: THIRD, ENGINE: OTHERS}


class Contest(NamedTuple):
    """How a contestant trains: by which schedule or kind of replicas, and whose. No method: plain PyTorch."""

    method: str
    side: str

    def __str__(self) -> str:
        return f"{self.method}, {self.side}" if self.method else self.side


PLAIN = Contest("", "plain PyTorch")


def check(options: Options) -> str | None:
    if min(options.ranks) < 2:
        return "--ranks: at least 2 ranks share the work"
    if any(options.microbatches % ranks for ranks in options.ranks) or options.batch_size % options.microbatches:
        return (
            "--batch-size, --microbatches, --ranks: ranks must divide the microbatches, and these the batch, since "
            "torch.distributed weights unequal parts equally"
        )
    return None


def contests(options: Options) -> list[Contest]:
    """Plain PyTorch, then side by side all that train alike."""
    return [PLAIN, *(Contest(method, side) for method in options.methods for side in options.sides)]


def num_stages(contest: Contest, ranks: int) -> int:
    if contest.method not in PIPELINES:
        return 1
    return ranks * (CHUNKS if contest.method == "interleaved" else 1)


def reference_of(contest: Contest, ranks: int, num_microbatches: int) -> int:
    """The number of microbatches of the plain loop that a contestant equals."""
    whole = contest.side == ENGINE and contest.method not in PIPELINES
    return num_microbatches // ranks if whole else num_microbatches


@dataclass(frozen=True)
class Task:
    """What all contestants train: a chain of layers, by SGD on one batch, in so many microbatches."""

    model: str
    options: Mapping[str, int]
    size_px: int
    batch_size: int
    num_microbatches: int

    @classmethod
    def of(cls, options: Options, model: str) -> "Task":
        chosen = dict((QUICK_SIZES if options.quick else SIZES)[model])
        flags = dict(zip(chosen, (options.num_layers, options.width), strict=True))
        chosen |= {name: value for name, value in flags.items() if value is not None}
        return cls(model, chosen, options.size, options.batch_size, options.microbatches)

    def layers(self) -> "nn.Sequential":
        """The model, with the weights that all contestants begin with."""
        import torch

        from benchmarks.common.models import encoder
        from mpi4dl import models

        torch.manual_seed(0)
        if self.model == TRANSFORMER:
            return encoder(self.options["features"], self.options["num_layers"], NUM_CLASSES)
        model = models.build(self.model, NUM_CLASSES, **self.options)
        assert isinstance(model, torch.nn.Sequential)
        return model

    @property
    def image(self) -> tuple[int, ...]:
        """The shape of a microbatch."""
        return (self.batch_size // self.num_microbatches, 3, self.size_px, self.size_px)

    def batch(self) -> "tuple[Tensor, Tensor]":
        from benchmarks.common.ranks import random_batch

        return random_batch(self.batch_size, self.image[2:], NUM_CLASSES)

    def share(self, rank: int, size: int) -> "tuple[Tensor, Tensor]":
        """A rank's part of the batch where ranks share its samples."""
        images, labels = self.batch()
        return images.tensor_split(size)[rank], labels.tensor_split(size)[rank]

    def counts(self, num_stages: int) -> tuple[int, ...]:
        """How many layers each stage has, by FLOPs."""
        import torch

        from mpi4dl.parallel.cut import choose_cut
        from mpi4dl.parallel.pipeline.split import Cuttable
        from mpi4dl.parallel.plan import Plan

        with torch.device("meta"):
            layers = self.layers()
        names = [name for name, _ in layers.named_children()]
        plan = Plan(((1, 1),) * num_stages, microbatches=self.num_microbatches)
        return choose_cut(Cuttable(layers, names), plan, None, "flops", self.image).counts


def sgd(parameters: Any) -> "torch.optim.SGD":
    import torch

    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def loop_of(model: "nn.Module", batch: "tuple[Tensor, Tensor]", num_microbatches: int, **how: Any) -> "Step":
    from benchmarks.common.ranks import loop

    return loop(model, sgd(model.parameters()), batch, num_microbatches, **how)


def plain(task: Task) -> "Step":
    return loop_of(task.layers(), task.batch(), task.num_microbatches)


def pipeline(task: Task, method: str, counts: Sequence[int]) -> "Step":
    """A schedule of torch.distributed, over the process group that is there."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.nn import functional as F

    from benchmarks.common.models import Chain

    schedules: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    rank, size, num_stages = dist.get_rank(), dist.get_world_size(), len(counts)
    layers = list(task.layers())
    ends = [sum(counts[:i]) for i in range(num_stages + 1)]
    chains = {i: Chain(layers[ends[i] : ends[i + 1]]) for i in range(rank, num_stages, size)}
    del layers
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(chain, i, num_stages, device) for i, chain in chains.items()]
    schedule = schedules[method](
        stages[0] if method in ("gpipe", "1f1b") else stages, task.num_microbatches, loss_fn=F.cross_entropy
    )
    images, labels = task.batch()
    optimizer = sgd(torch.nn.ModuleList(chains.values()).parameters())
    is_first, is_last = rank == 0, num_stages - 1 in chains

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        wanted = {"target": labels, "losses": losses} if is_last else {}
        schedule.step(*([images] if is_first else []), return_outputs=False, **wanted)
        optimizer.step()
        return torch.stack(losses).mean().item() if is_last else 0.0

    return step


def data_parallel(task: Task) -> "Step":
    """DistributedDataParallel: a rank's samples in microbatches of the same size."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    batch, num_microbatches = task.share(rank, size), task.num_microbatches // size
    ddp = DistributedDataParallel(task.layers(), gradient_as_bucket_view=True)
    sums: dict[bool, Any] = {True: nullcontext, False: ddp.no_sync}
    return loop_of(ddp, batch, num_microbatches, share=1 / size, sums=lambda last: sums[last]())


def plan_of(method: str, num_ranks: int, num_microbatches: int) -> "Plan":
    from mpi4dl.parallel.plan import Plan

    if method in PIPELINES:
        chunks = CHUNKS if method == "interleaved" else 1
        return Plan(((1, 1),) * num_ranks, microbatches=num_microbatches, schedule=method, chunks=chunks)
    return Plan(data=num_ranks, microbatches=num_microbatches // num_ranks)


def engine(task: Task, method: str, counts: Sequence[int], comm: "Communicator") -> "Step":
    """Ours: it also takes the norm of the gradient, and sees to it that all ranks have finite ones."""
    import torch
    from torch.nn import functional as F

    from mpi4dl.engine import Engine
    from mpi4dl.parallel.cut import split

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


@contextmanager
def joined(task: Task, contest: Contest, counts: Sequence[int], comm: "Communicator | None") -> "Iterator[Step]":
    """A contestant's step on this rank, in the context in which it trains: its sum over the ranks is the loss."""
    from benchmarks.common.ranks import gloo, over_mpi

    if comm is None:
        yield plain(task)
    elif contest.side == ENGINE:
        yield engine(task, contest.method, counts, comm)
    else:
        with {GLOO: gloo, BACKEND: over_mpi}[contest.side](comm):
            pipelined = contest.method in PIPELINES
            yield pipeline(task, contest.method, counts) if pipelined else data_parallel(task)


def work(options: Options) -> None:
    """One contestant, or the references of all."""
    import torch

    from benchmarks.common.meter import Meter
    from benchmarks.common.ranks import use_pytorchs_kernels
    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm import world

    model, ranks, told, counts = options.worker
    task = Task.of(options, model)
    keep_freed_memory()
    torch.set_num_threads(1)
    if told is None:
        answer_turns(lambda: references(options, task, ranks))
        return
    contest = Contest(*told)
    comm = None if contest == PLAIN else world()
    meter = Meter(torch.device("cpu"), comm)
    if contest.side != ENGINE:
        use_pytorchs_kernels()
    shares: list[float] = []
    with joined(task, contest, counts, comm) as step:

        def recorded() -> None:
            loss = step()
            if len(shares) < CHECKED_STEPS:
                shares.append(loss)

        def turn() -> dict[str, Any]:
            found = meter.measure(recorded, options.steps)
            found["images_per_second"] = options.batch_size * options.steps / found["seconds"]
            return found | {"losses": [sum(some) for some in zip(*meter.of_ranks(shares), strict=True)]}

        answer_turns(turn, comm)


def references(options: Options, task: Task, ranks: int) -> dict[str, Any]:
    """The losses of plain loops, by their number of microbatches, and the layers of stages, by the number of these."""
    losses = {}
    for number in {reference_of(contest, ranks, options.microbatches) for contest in contests(options)}:
        step = plain(replace(task, num_microbatches=number))
        losses[number] = [step() for _ in range(CHECKED_STEPS)]
    stages = {num_stages(contest, ranks) for contest in contests(options)}
    return {"losses": losses, "counts": {number: task.counts(number) if number > 1 else (0,) for number in stages}}


def compete(options: Options, model: str, ranks: int) -> tuple[dict[str, list[float]], list[Contestant]]:
    """The losses of plain loops, and all contestants after their turns."""
    found = measure_once(options.contestant("references", 1, (model, ranks, None, None)))
    contestants = [
        options.contestant(
            str(contest),
            1 if contest == PLAIN else ranks,
            (model, ranks, contest, found["counts"][str(num_stages(contest, ranks))]),
        )
        for contest in contests(options)
    ]
    print(f"{model}, {ranks} ranks: {len(contestants)} contestants", file=sys.stderr)
    take_turns(contestants, options.rounds)
    return found["losses"], contestants


def run(options: Options) -> None:
    """All cases; a case that fails is named, and the others are kept."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    figures: dict[str, Any] = {}
    for model, ranks in [(model, ranks) for model in options.models for ranks in options.ranks]:
        try:
            losses, contestants = compete(options, model, ranks)
        except SystemExit as problem:
            problems.append(f"{model} on {ranks} ranks: {problem}")
            continue
        found = summarise(options, model, ranks, losses, contestants)
        rows += found
        title = title_of(Task.of(options, model), ranks)
        print(f"\n{title}\n{table(found, COLUMNS)}", flush=True)
        for row in found:
            if row["wrong"]:
                print(f"{row['name']} computes something else: {row['wrong']}")
        figures[f"_{model}_{ranks}"] = draw(found, title)
        save(options, {"problems": problems, "measurements": rows}, figures)
    if problems:
        raise SystemExit("\n".join(["not measured:", *problems]))


def summarise(
    options: Options, model: str, ranks: int, losses: dict[str, list[float]], contestants: list[Contestant]
) -> list[dict[str, Any]]:
    """Medians over the rounds, and ratios to plain PyTorch and to the same over gloo in the same round."""
    from benchmarks.common.ranks import difference

    of = {str(contest): contest for contest in contests(options)}
    named = {contestant.name: contestant for contestant in contestants}
    rows = []
    for contestant in contestants:
        contest = of[contestant.name]
        last = contestant.answers[-1]
        expected = losses[str(reference_of(contest, ranks, options.microbatches))]
        wrong = difference(last["losses"], expected, TOLERANCE)
        row: dict[str, Any] = {
            "model": model,
            "job_ranks": ranks,
            "name": contestant.name,
            "method": contest.method,
            "side": contest.side,
            "ranks": contestant.ranks,
            "wrong": wrong,
            "losses": last["losses"],
            "expected_losses": expected,
            **contestant.spreads("images_per_second", "peak_bytes"),
            "peak_bytes_of_ranks": last["peak_bytes_of_ranks"],
            "peer": None,
        }
        for key in ("cpu_seconds", "work_seconds", "idle_seconds"):
            row[key] = median(contestant.of(key)) / options.steps
        rivals, peer = {"over_plain": named[str(PLAIN)]}, named.get(f"{contest.method}, {GLOO}")
        if peer is not None and contest.side != GLOO and wrong is None:
            row["peer"], rivals["over_peer"] = peer.name, peer
        for name, rival in rivals.items():
            row |= contestant.over(rival, **{f"{name}_{key}": key for key in COMPARED})
        rows.append(row)
    return rows


def title_of(task: Task, ranks: int) -> str:
    """What is trained on how many ranks."""
    sizes = ", ".join(f"{name} {value}" for name, value in task.options.items())
    batch = f"batch {task.batch_size} of {task.size_px} px in {task.num_microbatches} microbatches"
    return f"{TITLES[task.model]} ({sizes}), {batch}, {ranks} ranks of one thread"


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Images/s, CPU seconds with the part that is work, and peak memory."""
    panels = [
        Bars("images_per_second", "images/s (median of turns, min-max)"),
        Bars("cpu_seconds", "CPU seconds of a step, all ranks\n(full color: without waits)", part="work_seconds"),
        Bars("peak_bytes", "peak memory of the largest rank (MiB)", 1 / 2**20, 0),
    ]
    names = [row["name"] + (" (other loss)" if row["wrong"] else "") for row in rows]
    return bars(rows, panels, title, [COLORS[row["side"]] for row in rows], names)
