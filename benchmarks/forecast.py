"""Estimated beside measured step times of plans, by virtual time: ranks with a core each, on a network of our choice.

    python -m benchmarks run forecast --models amoebanetd,resnet_v2 --ranks 4,8 --plans 10

The estimate ranks all plans for so many ranks. Some are taken at even distances from the fastest to the slowest,
and trained under a virtual clock (`benchmarks.common.emulated`): CPU seconds are what ranks compute, and messages
take the time of the network. So ranks beyond the cores have the times of ranks with a core each. With --clock wall
steps are timed as they are, for ranks up to the cores.

`of ranks` is Spearman's coefficient of the two orders of the plans of a model on a number of ranks.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.common import options as declared
from benchmarks.common.options import Option, Options
from benchmarks.common.report import NAME, RANKS, publish
from benchmarks.common.turns import measure_once
from mpi4dl._palette import CURVES
from mpi4dl.options.kinds import POSITIVE, TEXT, choice, listed
from mpi4dl.sweeps.results import Column, table

if TYPE_CHECKING:
    from torch import nn

    from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate
    from mpi4dl.parallel.costs.machine import Machine
    from mpi4dl.parallel.plan import Plan

NUM_CLASSES = 10
SIZES = {"amoebanetd": {"num_layers": 3, "num_filters": 24}, "resnet_v2": {"depth": 20}, "small_resnet": {}}
OPTIONS = (
    Option("--models", listed(TEXT), "amoebanetd,resnet_v2", "models of mpi4dl.models"),
    declared.ranks("4,8"),
    declared.count("--plans", 10, "for each number of ranks"),
    declared.count("--image-size", 128, "height and width of the images, in pixels"),
    declared.batch_size(8),
    declared.count("--ranks-per-node", 1 << 20, "neighbouring ranks on an emulated node"),
    Option("--latency-us", POSITIVE, 5.0, "of a message within a node"),
    Option("--gigabytes", POSITIVE, 10.0, "a second, within a node"),
    Option("--network-latency-us", POSITIVE, 500.0, "of a message between nodes"),
    Option("--network-gigabytes", POSITIVE, 0.125, "a second, between nodes, for each rank"),
    Option("--clock", choice("virtual", "wall"), "virtual", "whose seconds"),
    declared.steps(5),
)
QUICK = {"models": "small_resnet", "ranks": "2", "plans": 2, "image_size": 32, "batch_size": 4, "steps": 1}
COLUMNS = (
    NAME,
    RANKS,
    Column("measured ms", "measured_ms", 1),
    Column("estimated ms", "estimated_ms", 1),
    Column("ratio", "ratio", 2),
    Column("work ms", "work_ms", 1),
    Column("estimated", "estimated_work_ms", 1),
    Column("of ranks", "spearman", 2),
)


def check(options: Options) -> str | None:
    unknown = [name for name in options.models if name not in SIZES]
    if unknown:
        return f"--models {unknown[0]}: choose of {', '.join(SIZES)}"
    parted = [ranks for ranks in options.ranks if ranks % min(options.ranks_per_node, ranks)]
    return f"--ranks {parted[0]}: no multiple of --ranks-per-node {options.ranks_per_node}" if parted else None


def builder(name: str) -> "partial[nn.Module]":
    from mpi4dl import models

    return partial(models.build, name, NUM_CLASSES, **SIZES[name])


def machine_of(options: Options, num_ranks: int) -> "Machine":
    """The emulated machine as data, with as many ranks."""
    from mpi4dl.parallel.costs.cost_model import MESSAGE_SECONDS
    from mpi4dl.parallel.costs.machine import LinkLevel, Machine

    each = min(options.ranks_per_node, num_ranks)
    inside = LinkLevel("node", 1e-6 * options.latency_us, 1e9 * options.gigabytes, each)
    between = LinkLevel("network", 1e-6 * options.network_latency_us, 1e9 * options.network_gigabytes, num_ranks)
    links = (inside,) if each == num_ranks else (inside, between)
    return Machine("emulated", num_ranks // each, each, links, message_seconds=MESSAGE_SECONDS)


def estimator_of(options: Options, name: str, num_ranks: int) -> "Estimator":
    import torch

    from mpi4dl.estimate.plan_estimate import Estimator
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.parallel.pipeline.split import Cuttable, outline

    image = (options.batch_size, 3, options.image_size, options.image_size)
    found = Estimator(
        Cuttable(outline(builder(name)).train()),
        image,
        Profiler.of_user(),
        torch.device("cpu"),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        machine=(machine_of(options, num_ranks), "emulated"),
    )
    found.streams = False
    return found


def chosen(options: Options, name: str, num_ranks: int) -> "list[tuple[PlanEstimate, tuple[int, ...]]]":
    """Plans from the fastest to the slowest by the estimate, and how many units their stages have."""
    from mpi4dl.estimate.search import candidates, outlooks
    from mpi4dl.parallel.pipeline.cut import partition

    estimator = estimator_of(options, name, num_ranks)
    plans = list(candidates(num_ranks, len(estimator.cuttable), estimator.image))
    found = [each for each in outlooks(estimator, plans) if each is not None]
    found.sort(key=lambda each: -each.samples_per_second)
    count = min(options.plans, len(found))
    places = {round(i * (len(found) - 1) / max(1, count - 1)) for i in range(count)}
    return [(found[i], partition(estimator.prices(found[i].plan).matrix)) for i in sorted(places)]


def work(options: Options) -> None:
    """The answer has the milliseconds of a step, of the rank that takes longest, and those of work."""
    from benchmarks.common.emulated import MonotonicClock, Network, VirtualClock, emulated, time_steps, training_step
    from benchmarks.common.ranks import begin
    from benchmarks.common.turns import answer_turns
    from mpi4dl.parallel.plan import Plan

    comm = begin()
    told = options.worker
    plan = Plan.of(**{**told["plan"], "tiles": [tuple(each) for each in told["plan"]["tiles"]]})
    size = (options.image_size, options.image_size)

    def turn() -> dict[str, Any]:
        build = builder(told["model"])
        if options.clock == "wall":
            step = training_step(comm, build, plan, options.batch_size, size, NUM_CLASSES, told["counts"])
            times = time_steps(comm, MonotonicClock(), step, options.steps)
        else:
            network, clock = Network.of(machine_of(options, comm.size)), VirtualClock()
            with emulated(comm, network, clock) as world:
                step = training_step(world, build, plan, options.batch_size, size, NUM_CLASSES, told["counts"])
                times = time_steps(world, clock, step, options.steps)
        return {"measured_ms": 1e3 * times.seconds, "work_ms": 1e3 * max(each.work_seconds for each in times.medians)}

    answer_turns(turn, comm)


def run(options: Options) -> None:
    from mpi4dl._memory import keep_freed_memory

    keep_freed_memory()  # as the ranks do, whose units are timed here
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for num_ranks in options.ranks:
            own = []
            for estimate, counts in chosen(options, name, num_ranks):
                asked = {"model": name, "plan": _plain(estimate.plan), "counts": counts}
                answer = measure_once(options.contestant(f"{name}: {estimate.plan}", num_ranks, asked))
                own.append(row_of(name, num_ranks, estimate, answer))
                print(f"{own[-1]['name']}: {own[-1]['measured_ms']:.1f} ms, {own[-1]['estimated_ms']:.1f} estimated")
            rows += ordered(own)
    title = f"steps by {options.clock} time, {options.batch_size} images of {options.image_size} px"
    publish(options, title, table(rows, COLUMNS), draw(rows, title), rows)


def _plain(plan: "Plan") -> dict[str, Any]:
    return plan.asked()


def row_of(name: str, num_ranks: int, estimate: "PlanEstimate", answer: dict[str, Any]) -> dict[str, Any]:
    assert estimate.time is not None
    parts, estimated = estimate.time.parts, 1e3 * estimate.time.seconds
    return {
        "name": f"{name}: {estimate.plan.describe()}",
        "model": name,
        "ranks": num_ranks,
        **{key: answer[key] for key in ("measured_ms", "work_ms")},
        "estimated_ms": estimated,
        "estimated_work_ms": 1e3 * (parts.arithmetic + parts.optimizer),
        "ratio": estimated / answer["measured_ms"],
        "parts": parts._asdict(),
    }


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows from the fastest measured plan on, with how alike both orders are."""
    from scipy.stats import spearmanr

    several = len(rows) > 2
    both = [[row[key] for row in rows] for key in ("measured_ms", "estimated_ms")]
    alike = float(spearmanr(*both).statistic) if several else None
    return [{**row, "spearman": alike} for row in sorted(rows, key=lambda row: row["measured_ms"])]


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """Estimated against measured milliseconds, by model and ranks."""
    from matplotlib.figure import Figure

    figure = Figure((6, 5.5))
    axes = figure.add_subplot()
    groups = list(dict.fromkeys((row["model"], row["ranks"]) for row in rows))
    for color, group in zip(CURVES * len(groups), groups, strict=False):
        own = [row for row in rows if (row["model"], row["ranks"]) == group]
        measured, estimated = ([row[key] for row in own] for key in ("measured_ms", "estimated_ms"))
        axes.loglog(measured, estimated, "o", color=color, label=f"{group[0]}, {group[1]} ranks")
    ends = [f(row[key] for row in rows for key in ("measured_ms", "estimated_ms")) for f in (min, max)]
    axes.loglog(ends, ends, "--", color="0.6", label="alike")
    axes.set(xlabel="measured ms of a step", ylabel="estimated ms", title=title)
    axes.legend()
    return figure
