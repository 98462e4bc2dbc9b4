"""Estimated beside measured steps of plans: by virtual time, as if each rank had a core, here, or on two nodes.

    python -m benchmarks run forecast --models amoebanetd,resnet_v2 --ranks 4,8 --plans 10
    python -m benchmarks run forecast --models amoebanetd,resnet_v2,vit --clock wall
    python -m benchmarks run forecast --models amoebanetd,resnet_v2,vit --clock network

The estimate ranks all plans for so many ranks. Some are taken at even distances from the fastest to the slowest,
and trained under a virtual clock (`benchmarks.common.emulated`): CPU seconds are what ranks compute, and messages
take the time of the network. So ranks beyond the cores have the times of ranks with a core each.

With --clock wall steps are timed as they are, with the memory of the rank that needs most, and there is one plan of
each kind for two ranks, with a core each: tiles, schedules of stages, GEMS, replicas, ZeRO, features, streaming.

With --clock network these two ranks are on two nodes (`benchmarks.common.nodes`, which takes root): messages go by TCP
through a cable of --network-gigabytes, and are held back by --network-latency-us.

Each plan is measured --turns times, in turn with the others, and its fastest step counts: other processes, and other
users of the machine, only add to it. Before each plan one process takes some steps of plain PyTorch on the whole
batch, which shows how fast the machine was then. `of ranks` is Spearman's coefficient of the two orders of the plans of
a model on a number of ranks, `share` the estimated share of the work over the measured one, of the rank of a replica
where they differ most.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import estimates
from benchmarks.common.nodes import NoNodes, two_nodes
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, mebibytes, table
from benchmarks.common.turns import measure_once
from mpi4dl._wording import counted
from mpi4dl.options.kinds import POSITIVE, TEXT, choice

if TYPE_CHECKING:
    from torch import nn

    from mpi4dl.estimate.plan_estimate import Estimator
    from mpi4dl.estimate.step_time import StepTime
    from mpi4dl.parallel.costs.machine import Machine
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.streaming.leading_part import StreamOptions

NUM_CLASSES = 10
SIZES: dict[str, dict[str, Any]] = {
    "amoebanetd": {"num_layers": 3, "num_filters": 24},
    "resnet_v2": {"depth": 20},
    "small_resnet": {},
    "vit": {"patch": 16},
}
TWO_STAGES: dict[str, Any] = {"stages": 2, "microbatches": 4}
KINDS: dict[str, dict[str, Any]] = {  # plans of two ranks, one of each kind
    "tiles 1x2": {"tiles": [(1, 2)]},
    "tiles 2x1, 2 microbatches": {"tiles": [(2, 1)], "microbatches": 2},
    "layers": {"stages": 2, "schedule": "layer"},
    "1F1B": TWO_STAGES,
    "GPipe": {**TWO_STAGES, "schedule": "gpipe"},
    "zero-bubble": {**TWO_STAGES, "schedule": "zero-bubble"},
    "interleaved": {**TWO_STAGES, "stages": 4, "chunks": 2, "schedule": "interleaved"},
    "GEMS": {**TWO_STAGES, "microbatches": 2, "bidirectional": 1},
    "data 2": {"data": 2, "local_batches": True},
    "data 2, ZeRO 1": {"data": 2, "local_batches": True, "zero": 1},
    "data 2, ZeRO 3": {"data": 2, "local_batches": True, "zero": 3},
    "features 2": {"tensor": 2},
    "streaming 2x2": {},
}
STREAMED = "streaming 2x2"  # on one rank
NETWORK = "network"  # the clock of a job on two nodes
PLAIN_STEPS = 3
ATTENTION = ("vit",)  # models that can share features, and that are neither streamed nor cut into tiles here
OPTIONS = (
    Option("--models", listed(TEXT), "amoebanetd,resnet_v2", "models of mpi4dl.models"),
    declared.ranks("4,8"),
    declared.count("--turns", 3, "measurements of each plan"),
    declared.count("--plans", 10, "for each number of ranks"),
    declared.count("--image-size", 128, "height and width of the images, in pixels"),
    declared.batch_size(8),
    Option("--latency-us", POSITIVE, 5.0, "of a message within a node"),
    Option("--gigabytes", POSITIVE, 10.0, "a second, within a node"),
    Option("--network-latency-us", POSITIVE, 500.0, "of a message between nodes"),
    Option("--network-gigabytes", POSITIVE, 0.125, "a second, between nodes, for each rank"),
    Option("--clock", choice("virtual", "wall", NETWORK), "virtual", "whose seconds"),
    declared.steps(8),
)
QUICK = {"models": "small_resnet", "ranks": "2", "plans": 2, "image_size": 32, "batch_size": 4, "steps": 1, "turns": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("measured ms", "measured_ms", 1),
    Column("estimated ms", "estimated_ms", 1),
    Column("speedup", "speedup", 2),
    Column("estimated", "estimated_speedup", 2),
    Column("ratio", "ratio", 2),
    Column("work ms", "work_ms", 1),
    Column("estimated", "estimated_work_ms", 1),
    Column("share", "share_ratio", 2),
    mebibytes("MiB", "peak_bytes", 1),
    mebibytes("estimated", "estimated_bytes", 1),
    Column("ratio", "memory_ratio", 2),
    Column("of ranks", "spearman", 2),
)


def check(options: Options) -> str | None:
    from mpi4dl.comm.node import cores

    if options.clock != "virtual" and cores() < 2:
        return f"--clock {options.clock} needs a core for each of two ranks, and there is {cores()}"
    unknown = [name for name in options.models if name not in SIZES]
    return f"--models {unknown[0]}: choose of {', '.join(SIZES)}" if unknown else None


def builder(name: str, image_size: int) -> "partial[nn.Module]":
    from mpi4dl import models

    size = {"image_size": image_size} if name in ATTENTION else {}
    return partial(models.build, name, NUM_CLASSES, **SIZES[name], **size)


def machine_of(options: Options, num_ranks: int) -> "Machine":
    """The emulated machine as data, with as many ranks."""
    from benchmarks.common.emulated import emulated_machine
    from mpi4dl.parallel.costs.cost_model import Link

    each = 1 if options.clock == NETWORK else num_ranks
    within = Link(1e-6 * options.latency_us, 1e-9 / options.gigabytes)
    between = Link(1e-6 * options.network_latency_us, 1e-9 / options.network_gigabytes)
    return emulated_machine(num_ranks // each, each, within, between)


def estimator_of(options: Options, name: str, num_ranks: int) -> "Estimator":
    import torch

    from mpi4dl.estimate.plan_estimate import Estimator
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.pipeline.split import Cuttable, outline

    image = (options.batch_size, 3, options.image_size, options.image_size)
    machine = machine_of(options, num_ranks) if options.clock != "wall" else None
    found = Estimator(
        Cuttable(outline(builder(name, options.image_size)).train()),
        image,
        Profiler.of_user(machine=machine),
        torch.device("cpu"),
        optimizer=partial(torch.optim.SGD, lr=0.01),
    )
    found.streams = False
    return found


def chosen(options: Options, name: str, num_ranks: int) -> "list[Case]":
    """Plans from the fastest to the slowest by the estimate."""
    from mpi4dl.estimate.search import candidates, estimates
    from mpi4dl.parallel.cut import partition

    estimator = estimator_of(options, name, num_ranks)
    plans = list(candidates(num_ranks, len(estimator.cuttable), estimator.image))
    found = [each for each in estimates(estimator, plans) if each is not None]
    found.sort(key=lambda each: -each.samples_per_second)
    count = min(options.plans, len(found))
    places = {round(i * (len(found) - 1) / max(1, count - 1)) for i in range(count)}
    cases = []
    for i in sorted(places):
        counts, time = partition(estimator.costs(found[i].plan).matrix), found[i].time
        assert time is not None
        described = found[i].plan.describe()
        cases.append(Case(name, described, found[i].plan, counts, time, plain_ms(estimator), found[i].num_bytes))
    return cases


def plain_ms(estimator: "Estimator") -> float:
    """The milliseconds of the units of a whole batch on one rank, on plain tensors."""
    from mpi4dl.parallel.plan import Plan

    (column,) = estimator.costs(Plan.of()).columns
    return 1e3 * sum(unit.forward_seconds + unit.backward_seconds for unit in column)


def of_each_kind(options: Options, name: str) -> "Iterator[Case]":
    """A plan of each kind that the model can be trained by."""
    from mpi4dl.parallel.cut import partition
    from mpi4dl.parallel.plan import Plan

    estimator = estimator_of(options, name, 2)
    for kind, asked in KINDS.items():
        if (kind == STREAMED or "tiles" in asked) if name in ATTENTION else "tensor" in asked:
            continue
        if kind == STREAMED and options.clock == NETWORK:
            continue
        plan = Plan.of(**asked)
        try:
            costs = estimator.costs(plan)
            counts = partition(costs.matrix)
            needs = estimator.streaming(plan, counts, stream_options()) if kind == STREAMED else None
            step = estimator.step(plan, counts, costs, needs=needs, exact=True)
        except (ValueError, RuntimeError) as error:
            print(f"{name}: {kind} is left out: {error}")
            continue
        peak = max(step.memory.of_ranks(plan.zero))
        yield Case(name, kind, plan, counts, step.time(plan), plain_ms(estimator), peak)


def stream_options() -> "StreamOptions":
    from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions

    return StreamOptions((2, 2), None, "exact", EACH_NORM)


@dataclass
class Case:
    """A plan of a model, with its estimate and what was measured in each turn."""

    model: str
    name: str
    plan: "Plan"
    counts: tuple[int, ...]
    time: "StepTime"
    plain_ms: float
    num_bytes: int
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def asked(self) -> dict[str, Any]:
        streams = self.name == STREAMED
        return {"model": self.model, "plan": self.plan.asked(), "counts": self.counts, "streams": streams}

    def row(self, memory: bool) -> dict[str, Any]:
        found = {key: min(each[key] for each in self.answers) for key in ("measured_ms", "work_ms", "plain_ms")}
        work = [min(of_rank) for of_rank in zip(*(each["work_of_ranks"] for each in self.answers), strict=True)]
        found["peak_bytes"] = max(each["peak_bytes"] for each in self.answers)
        parts, estimated = self.time.parts, 1e3 * self.time.seconds
        if memory:
            found |= {"estimated_bytes": self.num_bytes, "memory_ratio": self.num_bytes / found["peak_bytes"]}
        else:  # that of the emulation is among it
            found |= dict.fromkeys(("peak_bytes", "estimated_bytes", "memory_ratio"))
        return {
            "name": f"{self.model}: {self.name}",
            "model": self.model,
            "ranks": self.plan.num_ranks,
            **found,
            "estimated_ms": estimated,
            "estimated_work_ms": 1e3 * (parts.arithmetic + parts.optimizer),
            "estimated_plain_ms": self.plain_ms,
            "speedup": found["plain_ms"] / found["measured_ms"],
            "estimated_speedup": self.plain_ms / estimated,
            "ratio": estimated / found["measured_ms"],
            "share_ratio": share_ratio(self.time.work, work),
            "parts": parts._asdict(),
        }


def share_ratio(estimated: Sequence[float], measured: Sequence[float]) -> float | None:
    """The estimated share of the work over the measured one, of the rank of a replica where they differ most."""
    ranks = len(estimated)
    if ranks == 1:
        return None
    of_ranks = [sum(measured[rank::ranks]) for rank in range(ranks)]
    ratios = [mine * sum(of_ranks) / (other * sum(estimated)) for mine, other in zip(estimated, of_ranks, strict=True)]
    return max(ratios, key=lambda ratio: abs(log(ratio)))


def work(options: Options) -> None:
    """The answer has the milliseconds of a step, of the rank that takes longest, and those of work."""
    import torch

    from benchmarks.common.emulated import MonotonicClock, Network, VirtualClock, emulated, time_steps, training_step
    from benchmarks.common.meter import Meter
    from benchmarks.common.ranks import begin
    from benchmarks.common.turns import answer_turns
    from mpi4dl.parallel.plan import Plan

    comm = begin()
    meter = Meter(torch.device("cpu"), comm)
    told = options.worker
    if "plan" not in told:
        return answer_turns(partial(plain_turn, options, told["model"]))
    plan = Plan.of(**{**told["plan"], "tiles": [tuple(each) for each in told["plan"]["tiles"]]})
    size = (options.image_size, options.image_size)
    stream = {"stream": stream_options()} if told["streams"] else {}

    def turn() -> dict[str, Any]:
        asked = builder(told["model"], options.image_size), plan, options.batch_size, size, NUM_CLASSES, told["counts"]
        if options.clock == "wall":
            times = time_steps(comm, MonotonicClock(), training_step(comm, *asked, **stream), options.steps)
        else:
            network = Network.of(machine_of(options, comm.size))
            clock = MonotonicClock() if options.clock == NETWORK else VirtualClock()
            with emulated(comm, network, clock) as world:
                times = time_steps(world, clock, training_step(world, *asked, **stream), options.steps)
        work = [each.work_seconds for each in times.medians]
        peak = max(meter.of_ranks(meter.memory.peak_bytes()))
        found = {"measured_ms": 1e3 * times.fastest, "work_ms": 1e3 * max(work), "peak_bytes": peak}
        return {**found, "work_of_ranks": work}

    return answer_turns(turn, comm)


def plain_turn(options: Options, name: str) -> dict[str, Any]:
    """The milliseconds of plain PyTorch for the whole batch in one process, of the fastest step."""
    import time

    from torch.nn import functional as F

    from benchmarks.common.ranks import random_batch

    size = (options.image_size, options.image_size)
    model = builder(name, options.image_size)().train()
    images, labels = random_batch(options.batch_size, size, NUM_CLASSES)
    times = []
    for _ in range(1 + PLAIN_STEPS):
        began = time.thread_time()
        F.cross_entropy(model(images), labels).backward()
        times.append(time.thread_time() - began)
    return {"plain_ms": 1e3 * min(times[1:])}


@contextmanager
def nodes_of(options: Options) -> "Iterator[list[str]]":
    """The words that start a job where its steps are timed, within the context; none: as usual."""
    if options.clock != NETWORK:
        yield []
        return
    with TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            cluster = stack.enter_context(two_nodes(Path(folder), 1e3 * options.network_gigabytes))
        except NoNodes as none:
            raise SystemExit(f"--clock {NETWORK}: {none}") from None
        yield cluster.launch(1)


def run(options: Options) -> None:
    import torch

    from mpi4dl._memory import keep_freed_memory

    keep_freed_memory()  # as the ranks do, on one thread each, whose units are timed here
    torch.set_num_threads(1)
    by_kind = options.clock != "virtual"
    groups = []
    for name in options.models:
        groups += [list(of_each_kind(options, name))] if by_kind else [chosen(options, name, n) for n in options.ranks]
    with nodes_of(options) as launch:
        for turn in range(options.turns):
            for case in (case for group in groups for case in group):
                contestant = options.contestant(f"{case.model}: {case.name}", case.plan.num_ranks, case.asked)
                contestant.launch = launch
                plain = options.contestant(f"{case.model}: plain", 1, {"model": case.model})
                case.answers.append({**measure_once(plain), **measure_once(contestant)})
                said = f"{case.answers[-1]['measured_ms']:.1f} ms, {1e3 * case.time.seconds:.1f} estimated"
                print(f"turn {turn + 1}, {case.model}: {case.name}: {said}", flush=True)
    rows = [row for group in groups for row in ordered([case.row(options.clock == "wall") for case in group])]
    on = "on two nodes" if options.clock == NETWORK else f"by {options.clock} time"
    title = f"steps {on}, {options.batch_size} images of {options.image_size} px"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows from the fastest measured plan on, with how alike both orders are."""
    from scipy.stats import spearmanr

    several = len(rows) > 2
    both = [[row[key] for row in rows] for key in ("measured_ms", "estimated_ms")]
    alike = float(spearmanr(*both).statistic) if several else None
    return [{**row, "spearman": alike} for row in sorted(rows, key=lambda row: row["measured_ms"])]


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Estimated against measured milliseconds, by model and ranks."""
    return estimates(rows, lambda row: f"{row['model']}, {counted(row['ranks'], 'rank')}", title, "o")
