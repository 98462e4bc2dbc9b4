"""Stages, tiles and mirrored copies against plain PyTorch: images/s, memory of a rank, and how long ranks stand idle.

    python -m benchmarks.stages --models amoebanetd,resnet_v2 --sizes 128,256
    python -m benchmarks.stages --sleep

    LP   the stages of a model lie on ranks, one microbatch at a time     SP+    the first stage is cut into tiles
    PP   the same, with microbatches in flight by a schedule              GEMS+  a mirrored copy takes half of them

Plain PyTorch, one process and a plain loop over the same microbatches, and every configuration (a job of its own under
mpirun) take turns on the same cores. With more ranks than cores, images/s says nothing about scaling, and a bubble is
also a wait for a core. With --sleep, stages sleep instead of computing, so that the bubble is that of the schedule.

Memory is the peak of the largest rank above a process that has imported everything (`sweeps.meter`, which also says
what CPU time and work are); activations are the bytes that autograd keeps at most, counted in a step that is not timed.
What a user sees after some steps, with other allocators: --allocators default,keep,tcmalloc,jemalloc --age 50. The
bubble is the share of a step for which ranks stand idle: measured, and simulated from the measured seconds of each
stage. On a GPU, whose work the host does not wait for, there is none.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.allocators import least_memory, use, with_each
from benchmarks.report import save_figure, save_json, settings, spread
from benchmarks.stages_charts import as_table, plot, plot_bubbles
from benchmarks.stages_options import SLEEP, Case, cases, model_options, parse, plans, title
from benchmarks.turns import Contestant, answer_turns, median, plain_for, ratios, take_turns

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpi4dl.comm import Communicator
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.parallel.tables.simulator import Costs, Simulation, TimeSpan

PLAIN = "plain"
MEDIANS = ("cpu_seconds_per_image", "work_seconds_per_image", "peak_bytes")
NUM_CLASSES = 10
SLEEP_SECONDS = 0.03  # a rank's forward of a microbatch; its backward takes twice as long


class Trainer(NamedTuple):
    """A training step, and when this rank worked on what in the last one."""

    step: Callable[[], Any]
    spans: "Callable[[], list[TimeSpan]]"


def sleep_seconds(plan: "Plan | None") -> float:
    return SLEEP_SECONDS / (1 if plan is None else plan.chunks)


def builder(options: argparse.Namespace, model: str, plan: "Plan | None") -> "Callable[[], nn.Module]":
    if model == SLEEP:
        from benchmarks.sleeping import sleeping_model

        return partial(sleeping_model, plan.num_stages if plan else options.stages, sleep_seconds(plan), NUM_CLASSES)
    from mpi4dl import models

    return partial(models.build, model, NUM_CLASSES, **model_options(options, model))


def worker(options: argparse.Namespace) -> None:
    """One contestant: steps of plain PyTorch, or of the engine by a plan."""
    import torch

    from mpi4dl._memory import ActivationMeter
    from mpi4dl.comm import world
    from mpi4dl.sweeps.meter import Meter

    model, size, name = options.worker
    case, plan = Case(model, int(size)), None if name == PLAIN else plans(options)[name]
    use(options.allocator)
    comm = None if plan is None else world()
    torch.set_num_threads(options.cores if comm is None else max(1, options.cores // comm.size))
    device = torch.device(options.device) if comm is None else comm.node.device(options.device)
    meter, activations = Meter(device, comm), ActivationMeter()
    if plan is None or comm is None:
        trainer = plain_trainer(options, case, device)
    else:
        trainer = engine_trainer(options, case, device, plan, comm)

    for _ in range(options.age):
        trainer.step()

    def turn() -> dict[str, Any]:
        found, images = meter.measure(trainer.step, options.steps), options.batch_size * options.steps
        rows = meter.of_ranks(trainer.spans())
        if not activations.peak_bytes:  # in the first turn, which is not counted
            with activations.counting():
                trainer.step()
        return {
            "images_per_second": images / found["seconds"],
            "cpu_seconds_per_image": found["cpu_seconds"] / images,
            "work_seconds_per_image": found["work_seconds"] / images,
            "peak_bytes": found["peak_bytes"],
            "peak_bytes_of_ranks": found["peak_bytes_of_ranks"],
            "activation_bytes_of_ranks": meter.of_ranks(activations.peak_bytes),
            "rows": rows,
        }

    answer_turns(turn, comm)


def plain_trainer(options: argparse.Namespace, case: Case, device: "torch.device") -> Trainer:
    import torch
    from torch.nn import functional as F

    model = builder(options, case.model, None)().to(device)
    if case.model == SLEEP:
        slow_weights_of(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(options.batch_size, 3, case.size_px, case.size_px, device=device)
    labels = torch.zeros(options.batch_size, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        total = 0.0
        pairs = zip(images.tensor_split(options.microbatches), labels.tensor_split(options.microbatches), strict=True)
        for some, theirs in pairs:
            loss = F.cross_entropy(model(some), theirs) * (len(some) / len(images))
            loss.backward()
            total += loss.item()
        optimizer.step()

    return Trainer(step, list)


def engine_trainer(
    options: argparse.Namespace, case: Case, device: "torch.device", plan: "Plan", comm: "Communicator"
) -> Trainer:
    import torch
    from torch.nn import functional as F

    from mpi4dl.engine import Engine
    from mpi4dl.parallel.pipeline.local_stages import split

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
    if sleeps:
        slow_weights_of(held, plan)
    engine = Engine(held, plan, torch.optim.SGD(held.parameters(), lr=0.01), F.cross_entropy, comm=comm)
    engine.executor.records = True
    shapes = [[slab.length for slab in read.box] for read in engine.reads(options.batch_size, size)]
    tiles = [torch.randn(n, 3, rows, cols, device=device) for n, rows, cols in shapes]
    labels = torch.zeros(options.batch_size, dtype=torch.int64)
    return Trainer(lambda: engine.step(tiles, labels, size), lambda: engine.executor.spans)


def slow_weights_of(model: "nn.Module", plan: "Plan | None") -> None:
    from benchmarks.sleeping import slow_weights

    slow_weights(model, sleep_seconds(plan))


def main() -> None:
    options = parse(sys.argv[1:])
    if options.worker:
        worker(options)
        return
    chosen = plans_that_fit(options)
    options.cores = share_cores(options.cores)
    results: list[dict[str, Any]] = []
    problems: list[str] = []
    for case in cases(options):
        try:
            contestants = compete(case, chosen, options)
        except SystemExit as problem:
            problems.append(f"{case.model} {case.size_px} px: {problem}")
            print(problems[-1], file=sys.stderr)
        else:
            found = summarise(case, contestants, chosen, options.device)
            if options.timeline and not results:
                draw_timeline(contestants, Path(options.timeline))
            results += found
            print(f"\n{title(options, case.model, most_ranks(found))}\n{as_table(found)}", flush=True)
        if results:
            save(results, problems, options)
    if problems:
        raise SystemExit("\n".join(["not measured:", *problems]))


def plans_that_fit(options: argparse.Namespace) -> "dict[str, Plan]":
    """The plans of all configurations; ends with what is wrong with one."""
    try:
        chosen = plans(options)
        for name, plan in chosen.items():
            for case in cases(options):
                problem = plan.problem(plan.num_ranks, (case.size_px, case.size_px), options.batch_size)
                if problem is not None:
                    raise ValueError(f"{name}: {problem}")
    except ValueError as problem:
        print(f"python -m benchmarks.stages: {problem}", file=sys.stderr)
        raise SystemExit(2) from None
    return chosen


def share_cores(wanted: int) -> int:
    """Keep this process and the contestants that it starts to so many cores, or as many as there are."""
    cores = sorted(os.sched_getaffinity(0))[:wanted]
    os.sched_setaffinity(0, cores)
    return len(cores)


def compete(case: Case, chosen: "dict[str, Plan]", options: argparse.Namespace) -> list[Contestant]:
    """Plain PyTorch and all others after their turns."""
    arguments = ["-m", "benchmarks.stages", *sys.argv[1:], f"--cores={options.cores}", "--worker"]
    arguments += [case.model, str(case.size_px)]
    contestants = [Contestant(PLAIN, 1, [*arguments, PLAIN])]
    contestants += [Contestant(name, plan.num_ranks, [*arguments, name]) for name, plan in chosen.items()]
    contestants = with_each(contestants, options.allocators)
    print(f"{case.model}, {case.size_px} px: {len(contestants)} contestants", file=sys.stderr)
    take_turns(contestants, options.rounds)
    return contestants


def measured(answer: dict[str, Any]) -> "Simulation":
    """What the ranks did in the last step of a turn."""
    from mpi4dl.parallel.tables.simulator import Simulation, TimeSpan
    from mpi4dl.parallel.tables.table import Action

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
    split_seconds = sum(inputs) + sum(weights)
    share = sum(inputs) / split_seconds if split_seconds else 0.5
    return Costs(tuple(forward), tuple(backward), (0.0,) * (num_stages - 1), (1,) * num_stages, share)


def summarise(
    case: Case, contestants: list[Contestant], chosen: "dict[str, Plan]", device: str
) -> list[dict[str, Any]]:
    """Medians over the rounds, and medians of the ratios to plain PyTorch with the same allocator in the same round.

    `memory_over_least` is over plain PyTorch with the allocator with which it needs least.
    What there is no such thing of is None: bubbles without stages or on a GPU, and the activations of zero-bubble,
    which keeps what it needs for later outside of autograd.
    """
    from mpi4dl.parallel.tables.simulator import simulate

    least, results = least_memory(contestants), []
    for contestant in contestants:
        plan, answers = chosen.get(contestant.name), contestant.answers
        speeds = [answer["images_per_second"] for answer in answers]
        plain = plain_for(contestant, contestants)
        speed, memory = (ratios(contestant, plain, key) for key in ("images_per_second", "peak_bytes"))
        kept = answers[-1]["activation_bytes_of_ranks"]
        row: dict[str, Any] = {
            "model": case.model,
            "size_px": case.size_px,
            "name": contestant.label,
            "ranks": contestant.ranks,
            "plan": None if plan is None else plan.describe(),
            **spread("images_per_second", speeds),
            "speed_ratio": median(speed),
            **{key: median([answer[key] for answer in answers]) for key in MEDIANS},
            "peak_bytes_of_ranks": answers[-1]["peak_bytes_of_ranks"],
            "memory_ratio": median(memory),
            "memory_over_least": median([answer["peak_bytes"] for answer in answers]) / least,
            "activation_bytes": None if plan and plan.schedule == "zero-bubble" else max(kept),
            "measured_bubble": None,
            "simulated_bubble": None,
        }
        if plan is not None and plan.num_stages > 1 and device == "cpu":
            timelines = [measured(answer) for answer in answers]
            costs = measured_costs(timelines, plan.num_stages)
            row["measured_bubble"] = median([timeline.bubble for timeline in timelines])
            row["simulated_bubble"] = simulate(plan.table(), plan.placement, costs).bubble
            row["forward_seconds"], row["backward_seconds"] = costs.forward_seconds, costs.backward_seconds
        results.append(row)
    return results


def most_ranks(results: list[dict[str, Any]]) -> int:
    return max(r["ranks"] for r in results)


def save(results: list[dict[str, Any]], problems: list[str], options: argparse.Namespace) -> None:
    """What there is so far: a sweep that is broken off keeps what it has measured."""
    out = f"{options.out}_{SLEEP}" if options.sleep else str(options.out)
    what = {"settings": settings(options), "cores": options.cores, "problems": problems, "measurements": results}
    save_json(Path(f"{out}.json"), what)
    paths = [f"{out}.json"]
    for model in dict.fromkeys(r["model"] for r in results):
        paths.append(f"{out}.png" if options.sleep else f"{out}_{model}.png")
        draw, its = plot_bubbles if options.sleep else plot, [r for r in results if r["model"] == model]
        save_figure(draw(its, title(options, model, most_ranks(its))), Path(paths[-1]))
    print("saved " + ", ".join(paths))


def draw_timeline(contestants: list[Contestant], path: Path) -> None:
    """What the first configuration with PP did in its last step."""
    from mpi4dl.parallel.tables.drawing import as_image

    first = next(contestant for contestant in contestants if "PP" in contestant.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    as_image(measured(first.answers[-1])).save(path)
    print(f"timeline of {first.name}: {path}")


if __name__ == "__main__":
    main()
