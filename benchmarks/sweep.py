"""Every legal plan of a search space, or the planner's best, trained one after the other: images/s, memory, forecast.

    python -m benchmarks.sweep --model amoebanetd --model-options num_layers=3,num_filters=16 --image-size 256
        --batch-size 8 --ranks 4 --grids 1x1,1x2,2x2 --stages 1,2,4 --schedules 1f1b,gpipe --bidirectional 0,1
    python -m benchmarks.sweep ... --best 10

Tiles x stages x schedules x GEMS x replicas x ZeRO x microbatches; what else is trained, and how, is said by the flags
of mpi4dl.train. Each plan runs in a job of its own (sweep_jobs.py), in as many turns as --turns says, one after the
other with all other plans, so that what else the machine does meets all of them:

    turn 1   [plan 1][plan 2][plan 3: out of memory][plan 4]        forecast: before the first job
    turn 2   [plan 1][plan 2][plan 4]

A job that fails, by its limit of time or memory, a refusal or a crash, is recorded with its reason, and the sweep goes
on. After each job all is saved; the same command goes on where a sweep was broken off, and one with other plans, or
more turns, adds to it. Imports, building the model, reading and the first steps are not measured (sweep_worker.py).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.report import save_figure
from benchmarks.stages import share_cores
from benchmarks.sweep_charts import as_csv, as_table, plot
from benchmarks.sweep_jobs import Outcome, run_job
from benchmarks.sweep_options import Space, Sweep, legal, parse
from benchmarks.sweep_results import Results, Tried
from mpi4dl._wording import counted

INTERRUPTED = 130
READING = ("--num-workers", "0")  # of a single batch, before anything is measured


def main() -> None:
    sweep = parse(sys.argv[1:])
    cores = share_cores(sweep.cores or len(os.sched_getaffinity(0)))
    results = Results(sweep, cores)
    try:
        results.take_up()
        if results.asked_before:
            plans = list(results.tried)
        else:
            plans = [results.known.get(each.key, each) for each in foreseen(sweep)]
            results.add(plans)
    except (ValueError, OSError) as problem:
        print(f"python -m benchmarks.sweep: {in_flags(problem)}", file=sys.stderr)
        raise SystemExit(2) from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the job that runs ends too
    try:
        run_all(sweep, plans, results.save)
    except KeyboardInterrupt:
        print("broken off: the same command goes on from here", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        publish(sweep, results)
    if not any(each.measured for each in plans):
        raise SystemExit("no plan was measured")


def in_flags(problem: Exception) -> str:
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import spelling

    return spelling(Config)(str(problem))


def foreseen(sweep: Sweep) -> list[Tried]:
    """The plans that were asked for, with what the planner foresees of each. Raises ValueError if there are none.

    That is for ranks with a core each; atoms are timed on as many threads as ranks will have.
    """
    found: list[Tried] = []
    for ranks in sweep.space.ranks:
        found += foreseen_of(sweep, ranks)
    if sweep.best is not None:
        fastest = sorted(found, key=lambda each: -(each.predicted or {}).get("images_per_second", 0.0))
        found = fastest[: sweep.best]
    if not found:
        raise ValueError(nothing_legal(sweep.space, sweep.config().samples_per_step))
    return found


def nothing_legal(space: Space, batch_size: int) -> str:
    shown = [
        f"--{name} {','.join('x'.join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values)}"
        for name, values in vars(space).items()
    ]
    return (
        f"no plan of {' '.join(shown)} is legal for a batch of {batch_size}: the tiles of all stages times replicas "
        "must be as many as ranks, and microbatches times replicas at most as many as images"
    )


def foreseen_of(sweep: Sweep, num_ranks: int) -> list[Tried]:
    """The plans for so many ranks."""
    import torch

    from mpi4dl.estimate.dry_run import build_forecaster
    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.estimate.planning import as_a_rank
    from mpi4dl.estimate.search import candidates, outlooks, search
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.plan import with_samples

    config = sweep.config()
    plans = legal(replace(sweep.space, ranks=(num_ranks,)), config.data.image_size, config.samples_per_step)
    if not plans and sweep.best is None:
        return []
    config, samples = with_samples(config)
    print("forecasting: atoms are timed, once for each shape of tile", file=sys.stderr, flush=True)
    with as_a_rank(config, num_ranks) as device:
        forecaster = build_forecaster(
            config, samples.num_classes, samples.channels, Profiler.of_user(), torch.device(device)
        )
        if sweep.best is not None:
            every = candidates(num_ranks, len(forecaster.cuttable), forecaster.image)
            best = search(forecaster, every, float("inf") if sweep.memory is None else sweep.memory).best
            return [Tried.by(each.plan, each) for each in best[: sweep.best]]
        known: list[PlanEstimate | None] = [None] * len(plans)
        if not (config.training.recompute or config.parallel.stream):  # which would be foreseen without them
            known = outlooks(forecaster, plans)
    return [Tried.by(plan, each) for plan, each in zip(plans, known, strict=True)]


def run_all(sweep: Sweep, plans: list[Tried], save: Callable[[], None]) -> None:
    """Turn by turn all plans that have not had it, nor failed, saving after each job."""
    if sweep.again:
        for each in plans:
            each.failure = None
    jobs = [(turn, each) for turn in range(sweep.turns) for each in plans if len(each.turns) <= turn]
    began, seconds = time.perf_counter(), []
    for number, (turn, each) in enumerate(jobs):
        if each.failure is not None:
            continue
        outcome = run_job(each.ranks, worker_arguments(sweep, each), sweep.time_limit)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        each.take(outcome)
        save()
        left = sum(later.failure is None for _, later in jobs[number + 1 :]) * sum(seconds) / len(seconds)
        where = f"[{number + 1}/{len(jobs)}] turn {turn + 1} of {sweep.turns}: {each.plan}"
        told = f"{where}: {in_words(outcome)}, in {seconds[-1]:.0f} s; about {duration(left)} left"
        print(told, file=sys.stderr, flush=True)


def in_words(outcome: Outcome) -> str:
    if outcome.answer is None:
        return f"failed: {outcome.failure}"
    speed = outcome.answer["images"] / outcome.answer["seconds"]
    return f"{speed:.3g} images/s, {outcome.answer['peak_bytes'] / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def worker_arguments(sweep: Sweep, each: Tried) -> list[str]:
    limit = [] if sweep.memory is None else [f"--memory={sweep.memory}"]
    how = [f"--steps={sweep.steps}", f"--warm-up={sweep.warm_up}", *limit]
    return ["-m", "benchmarks.sweep_worker", *how, "--", *READING, *sweep.training, *each.flags]


def publish(sweep: Sweep, results: Results) -> None:
    """The table on the terminal; the CSV; and the plot, if there is anything to draw."""
    rows = results.rows(sweep.training)
    as_csv(rows, path := sweep.out.with_name(f"{sweep.out.name}.csv"))
    paths = [f"{sweep.out}.json", str(path)]
    heading = title(sweep, rows, results.cores)
    print(f"\n{heading}\n{as_table(rows)}")
    front = [row for row in rows if row["on_front"]]
    for row in front:
        print(f"{row['number']}: {row['command']}")
    if front:
        save_figure(plot(rows, heading), sweep.out.with_name(f"{sweep.out.name}.png"))
        paths.append(f"{sweep.out}.png")
    print("saved " + ", ".join(paths))


def title(sweep: Sweep, rows: list[dict[str, Any]], cores: int) -> str:
    """What was trained on how many cores, by how many threads, and how it was measured."""
    config = sweep.config()
    options = ", ".join(f"{name} {value}" for name, value in config.model.model_options.items())
    size = " x ".join(map(str, config.data.image_size))
    threads = " or ".join(str(n) for n in sorted({row["threads_of_a_rank"] for row in rows} - {None})) or "no"
    freed = "kept" if config.parallel.keep_freed_memory else "returned"
    allocator = os.environ.get("LD_PRELOAD") or "the C library's malloc"
    ranks = " or ".join(map(str, sweep.space.ranks))
    limit = "" if sweep.memory is None else f", of {sweep.memory / 2**20:.0f} MiB each"
    return (
        f"{config.model_name}{f' ({options})' if options else ''}, {size} px, batches of {config.data.batch_size}, "
        f"{config.optimizer.optimizer}; {ranks} ranks{limit}, on {counted(cores, 'core')} in all, "
        f"threads of a rank: {threads}\nmedians of {counted(sweep.turns, 'turn')} of {counted(sweep.steps, 'step')}; "
        f"{allocator}, freed memory {freed}"
    )


if __name__ == "__main__":
    main()
