"""Stages, tiles and mirrored copies against plain PyTorch: images/s, memory of a rank, and how long ranks stand idle.

    python -m benchmarks run stages --models amoebanetd,resnet_v2 --sizes 128,256
    python -m benchmarks run stages --sleep

    LP   the stages of a model lie on ranks, one microbatch at a time     SP+    the first stage is cut into tiles
    PP   the same, with microbatches in flight by a schedule              GEMS+  a mirrored copy takes half of them

Plain PyTorch, one process and a plain loop over the same microbatches, and each configuration (a job of its own under
mpirun) take turns on the same cores. With more ranks than cores, images/s says nothing about scaling, and a bubble is
also a wait for a core. With --sleep, stages sleep instead of computing, so that the bubble is that of the schedule.

Memory is the peak of the largest rank above a process with all imports (`benchmarks.common.meter`, which also
defines CPU time and work); activations are the bytes that autograd keeps at most, counted in a step that is not timed.
The bubble is the share of a step for which ranks stand idle: measured, and simulated from the measured seconds of each
stage. On a GPU, whose work the host does not wait for, there is none.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import options as declared
from benchmarks.common.charts import OTHERS, PLAIN, Bars, bars
from benchmarks.common.options import GRID, Option, Options, listed
from benchmarks.common.report import NAME, RANKS, save
from benchmarks.common.results import Column, mebibytes, share_cores, table
from benchmarks.common.turns import Contestant, answer_turns, beside_plain, take_turns
from mpi4dl._wording import counted
from mpi4dl.options.kinds import TEXT, choice

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.tables.simulator import Costs, Simulation, TimeSpan

NUM_CLASSES = 10
SLEEP, SLEEP_PX = "sleep", 8
SLEEP_SECONDS = 0.03  # a rank's forward of a microbatch; its backward takes twice as long
CONFIGURATIONS = ("SP", *(kind + way for kind in ("", "SP+", "GEMS+", "SP+GEMS+") for way in ("LP", "PP")))
INTERLEAVED, CHUNKS = "interleaved", 2
TITLES = {"amoebanetd": "AmoebaNet-D", "resnet_v2": "ResNet-v2", SLEEP: "stages that sleep"}
SIZES = {"amoebanetd": {"num_layers": 3, "num_filters": 48}, "resnet_v2": {"depth": 20, "num_filters": 8}}
QUICK_SIZES = {"amoebanetd": {"num_layers": 3, "num_filters": 8}, "resnet_v2": {"depth": 11, "num_filters": 4}}
OPTIONS = (
    Option("--models", listed(TEXT), "amoebanetd,resnet_v2", "models of mpi4dl.models"),
    declared.count("--num-layers", None, "of amoebanetd, instead of 3"),
    declared.count("--num-filters", None, "of all models, instead of 48 (amoebanetd) and 8 (resnet_v2)"),
    declared.count("--depth", None, "of resnet_v2, instead of 20"),
    declared.counts("--sizes", "128,256", "heights and widths of the images, in pixels"),
    Option(
        "--configurations",
        listed(choice(*CONFIGURATIONS)),
        "LP,PP,SP+LP,SP+PP,GEMS+LP,GEMS+PP,SP+GEMS+PP",
        f"of {', '.join(CONFIGURATIONS)}",
    ),
    declared.count("--stages", 2, "into how many LP and PP cut the model"),
    Option("--balance", str, "auto", "of the stages", {"choices": ("auto", "flops", "memory", "measured")}),
    Option("--tiles", GRID, "1x2", "grid of SP, over the first stage"),
    declared.count("--microbatches", 4, "of a batch; with GEMS half of them each way"),
    Option("--schedules", listed(TEXT), "1f1b", "of PP; interleaved cuts twice as many stages, not for GEMS"),
    declared.batch_size(8),
    declared.steps(2),
    declared.rounds(7),
    declared.CORES,
    declared.DEVICE,
    Option("--sleep", bool, False, "4 stages that sleep instead of --models"),
)
QUICK = {"models": "resnet_v2", "sizes": "64", "configurations": "SP+GEMS+PP", "rounds": 1, "steps": 1}
PRESETS = {
    "sleep": {
        "stages": 4,
        "microbatches": 8,
        "batch_size": 8,
        "steps": 1,
        "configurations": "LP,PP,GEMS+LP,GEMS+PP",
        "schedules": "gpipe,1f1b,interleaved,zero-bubble",
    },
    "quick sleep": {"configurations": "PP", "schedules": "gpipe,1f1b", "rounds": 1},
}
BUBBLES = (Column("bubble %", "measured_bubble", 1, 100), Column("simulated %", "simulated_bubble", 1, 100))
COLUMNS = (
    NAME,
    RANKS,
    Column("images/s", "images_per_second", 2, ends=True),
    Column("ratio", "speed_ratio", 2),
    Column("CPU s", "cpu_seconds_per_image", 2),
    mebibytes("peak MiB", "peak_bytes", 1),
    Column("ratio", "memory_ratio", 2),
    mebibytes("activations", "activation_bytes", 1),
    *BUBBLES,
)


class Case(NamedTuple):
    """What contestants are compared on."""

    model: str
    size_px: int


class Trainer(NamedTuple):
    """A training step, and when this rank worked on what in the last one."""

    step: Callable[[], Any]
    spans: "Callable[[], list[TimeSpan]]"


def check(options: Options) -> str | None:
    if options.sleep and cuts_images(options):
        return "--sleep, --configurations: stages that sleep have no tiles, omit SP"
    if any("GEMS" in name for name in options.configurations) and options.microbatches % 2:
        return f"--microbatches {options.microbatches} cannot be halved for GEMS: use an even number"
    try:
        for name, plan in plans(options).items():
            for case in cases(options):
                problem = plan.problem(plan.num_ranks, (case.size_px, case.size_px), options.batch_size)
                if problem is not None:
                    return f"{name}: {problem}"
    except ValueError as problem:
        return str(problem)
    return None


def cuts_images(options: Options) -> bool:
    return any("SP" in name.split("+") for name in options.configurations)


def cases(options: Options) -> list[Case]:
    if options.sleep:
        return [Case(SLEEP, SLEEP_PX)]
    return [Case(model, size) for model in options.models for size in options.sizes]


def plans(options: Options) -> "dict[str, Plan]":
    """A plan for each configuration, and for each schedule where it has a choice. Raises ValueError."""
    from mpi4dl.parallel.plan import Plan

    found: dict[str, Plan] = {}
    for name in options.configurations:
        words = name.split("+")
        gems, pipelined = "GEMS" in words, "PP" in words
        stages = options.stages if pipelined or "LP" in words else 1
        tiles = [tuple(options.tiles) if "SP" in words else (1, 1)] + [(1, 1)] * (stages - 1)
        offered = [s for s in options.schedules if not (gems and s == INTERLEAVED)] if pipelined else ["layer"]
        if not offered:
            raise ValueError(f"{name} --schedules {','.join(options.schedules)}: GEMS needs another than {INTERLEAVED}")
        for schedule in offered:
            chunks = CHUNKS if schedule == INTERLEAVED else 1
            label = f"{name} {schedule}" if pipelined and len(options.schedules) > 1 else name
            microbatches, pairs = (options.microbatches // 2, 1) if gems else (options.microbatches, 0)
            found[label] = Plan(tuple(tiles), (), 1, microbatches, schedule, pairs, chunks)
    return found


def model_options(options: Options, model: str) -> dict[str, int]:
    """Options of the model: our small ones, unless flags say otherwise; of other models nothing but flags."""
    chosen = dict((QUICK_SIZES if options.quick else SIZES).get(model, {}))
    flags = {"num_layers": options.num_layers, "num_filters": options.num_filters, "depth": options.depth}
    return chosen | {k: v for k, v in flags.items() if v is not None and (k in chosen or not chosen)}


def title_of(options: Options, model: str, most_ranks: int) -> str:
    """What is trained on how many cores."""
    sizes = ", ".join(f"{name} {value}" for name, value in model_options(options, model).items())
    what = TITLES.get(model, model) + (f" ({sizes})" if sizes and model != SLEEP else "")
    batch = f"batch {options.batch_size} in {options.microbatches} microbatches"
    where = f"up to {counted(most_ranks, 'rank')} on {counted(options.cores, 'core')} in all"
    tiles = f", SP tiles {options.tiles}" if cuts_images(options) else ""
    return f"{what}, {batch}, {options.stages} stages{tiles}, {options.device}, {where}"


def sleep_seconds(plan: "Plan | None") -> float:
    return SLEEP_SECONDS / (1 if plan is None else plan.chunks)


def builder(options: Options, model: str, plan: "Plan | None") -> "Callable[[], nn.Module]":
    if model == SLEEP:
        from benchmarks.common.models import sleeping_model

        return partial(sleeping_model, plan.num_stages if plan else options.stages, sleep_seconds(plan), NUM_CLASSES)
    from mpi4dl import models

    return partial(models.build, model, NUM_CLASSES, **model_options(options, model))


def work(options: Options) -> None:
    """One contestant: steps of plain PyTorch, or of the engine by a plan."""
    import torch

    from benchmarks.common.meter import ActivationMeter, Meter
    from benchmarks.common.ranks import image_turn
    from mpi4dl._memory import keep_freed_memory
    from mpi4dl.comm import world

    model, size, name, cores = options.worker
    case, plan = Case(model, size), plans(options).get(name)
    keep_freed_memory()
    comm = None if plan is None else world()
    torch.set_num_threads(cores if comm is None else max(1, cores // comm.size))
    device = torch.device(options.device) if comm is None else comm.node.device(options.device)
    meter, activations = Meter(device, comm), ActivationMeter()
    if plan is None or comm is None:
        trainer = plain_trainer(options, case, device)
    else:
        trainer = engine_trainer(options, case, device, plan, comm)

    def turn() -> dict[str, Any]:
        found = image_turn(meter, trainer.step, options.steps, options.batch_size)
        rows = meter.of_ranks(trainer.spans())
        if not activations.peak_bytes:  # in the first turn, which does not count
            with activations.counting():
                trainer.step()
        return found | {"activation_bytes_of_ranks": meter.of_ranks(activations.peak_bytes), "rows": rows}

    answer_turns(turn, comm)


def plain_trainer(options: Options, case: Case, device: "torch.device") -> Trainer:
    import torch

    from benchmarks.common.ranks import loop

    model = builder(options, case.model, None)().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(options.batch_size, 3, case.size_px, case.size_px, device=device)
    labels = torch.zeros(options.batch_size, dtype=torch.int64, device=device)
    return Trainer(_slow(loop(model, optimizer, (images, labels), options.microbatches), case, None), list)


def engine_trainer(options: Options, case: Case, device: "torch.device", plan: "Plan", comm: "Communicator") -> Trainer:
    import torch
    from torch.nn import functional as F

    from mpi4dl.engine import Engine
    from mpi4dl.parallel.cut import split

    size = (case.size_px, case.size_px)
    sleeps = case.model == SLEEP
    held = split(
        builder(options, case.model, plan),
        plan,
        comm,
        device=device,
        balance=(1,) * plan.num_stages if sleeps else options.balance,
        image=(max(1, options.batch_size // options.microbatches), 3, *size),
        whole=[str(stage) for stage in range(plan.num_stages)] if sleeps else (),
    )
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.01), F.cross_entropy, comm=comm)
    engine.executor.records = True
    shapes = [[interval.length for interval in read.box] for read in engine.reads(options.batch_size, size)]
    tiles = [torch.randn(n, 3, rows, cols, device=device) for n, rows, cols in shapes]
    labels = torch.zeros(options.batch_size, dtype=torch.int64)
    return Trainer(_slow(lambda: engine.step(tiles, labels, size), case, plan), lambda: engine.executor.spans)


def _slow(step: Callable[[], Any], case: Case, plan: "Plan | None") -> Callable[[], Any]:
    """The step; of stages that sleep one in which they also do for the gradients of weights."""
    if case.model != SLEEP:
        return step
    from benchmarks.common.models import SlowWeights

    def slowly() -> Any:
        with SlowWeights(sleep_seconds(plan)):
            return step()

    return slowly


def run(options: Options) -> None:
    """All cases; a case that fails is named, and the others are kept."""
    chosen = plans(options)
    options.cores = share_cores(options.cores)
    if options.sleep:
        options.out = Path(f"{options.out}_{SLEEP}")
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for case in cases(options):
        try:
            contestants = compete(case, chosen, options)
        except SystemExit as problem:
            problems.append(f"{case.model} {case.size_px} px: {problem}")
            print(problems[-1], file=sys.stderr)
        else:
            found = summarise(case, contestants, chosen, options.device)
            rows += found
            title = title_of(options, case.model, max(row["ranks"] for row in found))
            print(f"\n{title}, {case.size_px} px\n{table(found, COLUMNS)}", flush=True)
        if rows:
            results = {"cores": options.cores, "problems": problems, "measurements": rows}
            save(options, results, draw(options, rows))
    if problems:
        raise SystemExit("\n".join(["not measured:", *problems]))


def compete(case: Case, chosen: "dict[str, Plan]", options: Options) -> list[Contestant]:
    """Plain PyTorch and all others after their turns."""
    jobs = {"plain": 1, **{name: plan.num_ranks for name, plan in chosen.items()}}
    contestants = [options.contestant(name, ranks, (*case, name, options.cores)) for name, ranks in jobs.items()]
    print(f"{case.model}, {case.size_px} px: {len(contestants)} contestants", file=sys.stderr)
    take_turns(contestants, options.rounds)
    return contestants


def measured(answer: dict[str, Any]) -> "Simulation":
    """The work of the ranks in the last step of a turn."""
    from mpi4dl.parallel.tables.schedules import Action
    from mpi4dl.parallel.tables.simulator import Simulation, TimeSpan

    rows = tuple(tuple(TimeSpan(Action(*action), start, end) for action, start, end in row) for row in answer["rows"])
    return Simulation(rows, tuple(answer["activation_bytes_of_ranks"]))


def measured_costs(timelines: "Sequence[Simulation]", num_stages: int) -> "Costs":
    """The mean seconds of each stage's forward and backward; messages are left to the bubble."""
    from mpi4dl.parallel.tables.simulator import Costs

    spans = [span for timeline in timelines for row in timeline.rows for span in row]

    def mean(kind: str, stage: int) -> float:
        seconds = [s.end_seconds - s.start_seconds for s in spans if (s.action.kind, s.action.stage) == (kind, stage)]
        return sum(seconds) / len(seconds) if seconds else 0.0

    stages = range(num_stages)
    forward, whole, inputs, weights = (
        [mean(kind, stage) for stage in stages] for kind in ("forward", "backward", "input", "weight")
    )
    backward = [sum(parts) for parts in zip(whole, inputs, weights, strict=True)]
    return Costs(tuple(forward), tuple(backward), (0.0,) * (num_stages - 1), (1,) * num_stages, tuple(weights))


def summarise(
    case: Case, contestants: list[Contestant], chosen: "dict[str, Plan]", device: str
) -> list[dict[str, Any]]:
    """Medians over the rounds, and those of the ratios to plain PyTorch in the same round.

    Bubbles are None without stages and on a GPU, and so are the activations of zero-bubble, which keeps values for
    later outside of autograd.
    """
    from mpi4dl.parallel.tables.simulator import simulate

    rows = []
    for contestant in contestants:
        plan, answers = chosen.get(contestant.name), contestant.answers
        row: dict[str, Any] = {
            "model": case.model,
            "size_px": case.size_px,
            "plan": None if plan is None else plan.describe(),
            **beside_plain(contestant, contestants),
            "peak_bytes_of_ranks": answers[-1]["peak_bytes_of_ranks"],
            "activation_bytes": max(answers[-1]["activation_bytes_of_ranks"]),
            "measured_bubble": None,
            "simulated_bubble": None,
        }
        if plan is not None and plan.schedule == "zero-bubble":
            row["activation_bytes"] = None
        if plan is not None and plan.num_stages > 1 and device == "cpu":
            timelines = [measured(answer) for answer in answers]
            costs = measured_costs(timelines, plan.num_stages)
            row["measured_bubble"] = median([timeline.bubble for timeline in timelines])
            row["simulated_bubble"] = simulate(plan.table(), plan.placement, costs).bubble
            row["forward_seconds"], row["backward_seconds"] = costs.forward_seconds, costs.backward_seconds
        rows.append(row)
    return rows


def draw(options: Options, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A picture for each model: speed, memory with activations, and bubbles, by the end of its file's name."""
    figures = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        its = [row for row in rows if row["model"] == model]
        panels = [Bars("measured_bubble", "bubble in % (line: simulated)", 100, 1, mark="simulated_bubble")]
        if not options.sleep:
            panels.insert(0, Bars("images_per_second", "images/s (median, min-max)"))
            label = "peak memory of the largest rank (MiB)\n(line: activations)"
            panels.insert(1, Bars("peak_bytes", label, 1 / 2**20, 0, mark="activation_bytes"))
        names = [f"{row['name']}, {counted(row['ranks'], 'rank')}, {row['size_px']} px" for row in its]
        colors = [PLAIN if row["name"].startswith("plain") else OTHERS for row in its]
        title = title_of(options, model, max(row["ranks"] for row in its))
        figures["" if options.sleep else f"_{model}"] = bars(its, panels, title, colors, names)
    return figures
