"""What the estimates choose on a slow network, beside what is fastest there: all-reduces, placement of ranks.

    python -m benchmarks run choices

Nodes are emulated by virtual time (`benchmarks.common.emulated`): ranks have a core each, and messages between nodes
take the time of --latency-us and --megabytes. In each case there are some ways to do the same:

    sum        `direct`, `ring` and `two-level` all-reduces of a buffer
    placement  ranks in blocks on nodes, or dealt out over them (`cyclic`), as Slurm's --distribution calls it

The choice is right if the way that is estimated to be the fastest is measured to be so, or takes at most 5 % longer.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.charts import estimates
from benchmarks.common.options import Option, Options, listed
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.results import Column, table
from benchmarks.common.turns import measure_once
from benchmarks.forecast import builder
from mpi4dl.options.kinds import POSITIVE, choice

if TYPE_CHECKING:
    from mpi4dl.estimate.step_time import StepTime
    from mpi4dl.parallel.costs.machine import Machine
    from mpi4dl.parallel.plan import Plan

NUM_CLASSES, BATCH = 10, 4
TIE = 1.05  # times as long as the fastest
INSIDE = 5e-6, 1e-10  # seconds of a message within a node, and of each of its bytes
SUMS = ("direct", "ring", "two-level")
KINDS = ("sum", "placement")


@dataclass(frozen=True)
class Case:
    """Some ways to do the same on `nodes` of so many ranks each."""

    name: str
    nodes: int
    ranks_per_node: int
    ways: tuple[str, ...]
    num_bytes: int = 0  # of a sum
    model: str = ""
    size: int = 0
    plan: tuple[tuple[str, Any], ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def _sum(nodes: int, ranks_per_node: int, kib: int) -> Case:
    name = f"sum of {kib} KiB, {nodes} nodes of {ranks_per_node}"
    return Case(name, nodes, ranks_per_node, SUMS, num_bytes=kib << 10)


def _placement(what: str, model: str = "resnet_v2", size: int = 128, **plan: Any) -> Case:
    name = f"placement of {what} of {model}, {size} px, 2 nodes of 2"
    return Case(name, 2, 2, ("block", "cyclic"), model=model, size=size, plan=tuple(plan.items()))


CASES = (
    _sum(2, 4, 16),
    _sum(2, 4, 256),
    _sum(2, 4, 4096),
    _sum(4, 2, 256),
    _sum(4, 2, 4096),
    _placement("2 stages of 1x2 tiles", stages=2, tiles=((1, 2),), microbatches=2),
    _placement("4 stages", stages=4, microbatches=4),
    _placement("2x2 tiles", tiles=((2, 2),)),
    _placement("2 replicas of 1x2 tiles", tiles=((1, 2),), data=2),
)
OPTIONS = (
    Option("--latency-us", POSITIVE, 500.0, "of a message between nodes"),
    Option("--megabytes", POSITIVE, 125.0, "a second, between nodes, for each rank"),
    Option("--kinds", listed(choice(*KINDS)), ",".join(KINDS), "of cases"),
    declared.count("--cases", len(CASES), "the first so many of them"),
    declared.steps(10),
)
QUICK = {"kinds": "sum", "cases": 1, "steps": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("way", "way"),
    Column("measured ms", "measured_ms", 2),
    Column("work ms", "work_ms", 2),
    Column("estimated ms", "estimated_ms", 2),
    Column("ratio", "ratio", 2),
    Column("right", "right"),
)


def machine_of(options: Options, case: Case, way: str = "block") -> "Machine":
    from benchmarks.common.emulated import emulated_machine
    from mpi4dl.parallel.costs.cost_model import Link
    from mpi4dl.parallel.costs.machine import DISTRIBUTIONS

    between = Link(1e-6 * options.latency_us, 1e-6 / options.megabytes)
    distribution = way if way in DISTRIBUTIONS else "block"
    return emulated_machine(case.nodes, case.ranks_per_node, Link(*INSIDE), between, distribution)


def estimated(options: Options, case: Case, way: str) -> float:
    """Seconds of a way."""
    import numpy as np

    from mpi4dl.parallel.costs.machine import CollectiveCost

    machine = machine_of(options, case, way)
    if case.num_bytes:
        return CollectiveCost(machine, np.arange(case.ranks)[None]).all_reduce_seconds(case.num_bytes, way)
    return estimated_step(case, way, machine).seconds


def estimated_step(case: Case, way: str, machine: "Machine") -> "StepTime":
    import torch

    from mpi4dl.estimate.plan_estimate import Estimator
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.cut import partition
    from mpi4dl.parallel.pipeline.split import Cuttable, outline

    units = Cuttable(outline(builder(case.model, case.size)).train())
    profiler = Profiler.of_user(machine=machine)
    sgd = partial(torch.optim.SGD, lr=0.01)
    image = (BATCH, 3, case.size, case.size)
    found = Estimator(units, image, profiler, torch.device("cpu"), optimizer=sgd)
    plan = plan_of(case)
    costs = found.costs(plan)
    if not costs.timed:
        raise SystemExit(f"{case.name}, {way}: it cannot be timed")
    return found.step(plan, partition(costs.matrix), costs).time(plan)


def plan_of(case: Case) -> "Plan":
    from mpi4dl.parallel.plan import Plan

    return Plan.of(**dict(case.plan))


def work(options: Options) -> None:
    """The answer has the milliseconds of a way."""
    import torch

    from benchmarks.common.emulated import Network, VirtualClock, emulated, time_steps, training_step
    from benchmarks.common.ranks import begin
    from benchmarks.common.turns import answer_turns
    from mpi4dl.comm import allreduce

    comm = begin()
    number, way = options.worker
    case = CASES[number]

    def turn() -> dict[str, Any]:
        network, clock = Network.of(machine_of(options, case, way)), VirtualClock()
        with emulated(comm, network, clock) as world:
            if case.num_bytes:
                add_up = allreduce.pick(world, way)
                flat = torch.zeros(case.num_bytes // 4)
                step = lambda: add_up(flat).wait()  # noqa: E731
            else:
                asked = builder(case.model, case.size), plan_of(case), BATCH, (case.size, case.size), NUM_CLASSES
                step = training_step(world, *asked)
            times = time_steps(world, clock, step, options.steps)
        work_ms = 1e3 * max(each.work_seconds for each in times.medians)
        return {"measured_ms": 1e3 * times.fastest, "work_ms": work_ms}

    answer_turns(turn, comm)


def run(options: Options) -> None:
    import torch

    from mpi4dl._memory import keep_freed_memory

    keep_freed_memory()  # as the ranks do, on one thread each, whose units are timed here
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    cases = [(number, case) for number, case in enumerate(CASES) if case.name.startswith(tuple(options.kinds))]
    for number, case in cases[: options.cases]:
        own = []
        for way in case.ways:
            answer = measure_once(options.contestant(f"{case.name}: {way}", case.ranks, (number, way)))
            ms = 1e3 * estimated(options, case, way)
            told = {"name": case.name, "ranks": case.ranks, "way": way, "estimated_ms": ms, **answer}
            own.append({**told, "ratio": ms / answer["measured_ms"]})
            print(f"{case.name}, {way}: {answer['measured_ms']:.2f} ms, {ms:.2f} estimated", flush=True)
        rows += judged(own)
    right = sum(row["right"] == "yes" for row in rows)
    title = f"{right} of {min(options.cases, len(cases))} choices are right"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a case, of which the one that is estimated to be the fastest says whether it is."""
    chosen = min(rows, key=lambda row: row["estimated_ms"])
    fastest = min(row["measured_ms"] for row in rows)
    right = "yes" if chosen["measured_ms"] <= TIE * fastest else "no"
    return [{**row, "right": right if row is chosen else ""} for row in rows]


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Estimated against measured milliseconds, a line for each case."""
    return estimates(rows, lambda row: row["name"], title, "o-")
