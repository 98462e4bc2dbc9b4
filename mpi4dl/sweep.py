"""Measure plans: `mpi4dl sweep --ranks 4 --grids 1x1,2x2 --stages 1,2`, with the flags of `mpi4dl train`.

It trains by every legal plan of a search space, or by the planner's best, and sets images/s and memory beside the
estimate. Each plan runs in jobs of its own, in turn with all other plans, so that other load affects all of them:

    turn 1   [plan 1][plan 2][plan 3: out of memory][plan 4]        estimates: before the first job
    turn 2   [plan 1][plan 2][plan 4]

It records a job that fails, by its limit of time or memory, a refusal or a crash, and continues. It saves after each
job. The same command continues an interrupted sweep; one with other plans, or more turns, adds to it.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpi4dl._commands import INTERRUPTED, one_message
from mpi4dl._wording import counted, duration, to_install
from mpi4dl.options.kinds import SIDES
from mpi4dl.sweeps.job import Outcome, run_job
from mpi4dl.sweeps.results import MIB, Results, Tried, as_csv, as_table, plot, save_figure, share_cores
from mpi4dl.sweeps.space import Space, Sweep, legal, parse

DESCRIPTION = "Train by many plans in turn; compare images/s and memory with the estimates. It starts mpirun itself."
READING = ("--num-workers", "0")  # of a single batch, before anything is measured


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the plans of the command line `argv`; a wrong flag ends in one message."""
    from mpi4dl.options.config import Config
    from mpi4dl.options.declare import spelling

    with one_message(spelling(Config)):
        sweep = parse(list(sys.argv[1:] if argv is None else argv), DESCRIPTION)
        cores = share_cores(sweep.cores or len(os.sched_getaffinity(0)))
        results = Results(sweep, cores)
        plans = results.tried if results.asked_before else results.add(estimated(sweep))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running job ends too
    try:
        run_all(sweep, plans, results)
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    finally:
        publish(sweep, results)
    if not any(each.measured for each in plans):
        raise SystemExit("no plan was measured")


def estimated(sweep: Sweep) -> list[Tried]:
    """The plans of the sweep with their estimates. Raises ValueError if there are none.

    Estimates are for ranks with a core each; units are timed on as many threads as ranks will have.
    """
    found = [each for ranks in sweep.space.ranks for each in _estimated_for(sweep, ranks)]
    if sweep.best is not None:
        found = sorted(found, key=lambda each: -(each.predicted or {}).get("images_per_second", 0.0))[: sweep.best]
    if not found:
        raise ValueError(_nothing_legal(sweep.space, sweep.config().samples_per_step))
    return found


def _nothing_legal(space: Space, batch_size: int) -> str:
    values = vars(space) | {"grids": map(SIDES.raw, space.grids)}
    shown = [f"--{name} {','.join(map(str, each))}" for name, each in values.items()]
    return (
        f"no plan of {' '.join(shown)} is legal for a batch of {batch_size}: tiles of all stages times replicas "
        "must equal the ranks, and microbatches times replicas may not exceed the images"
    )


def _estimated_for(sweep: Sweep, num_ranks: int) -> list[Tried]:
    """The plans for so many ranks."""
    from mpi4dl.estimate.plan_estimate import PlanEstimate
    from mpi4dl.estimate.planning import as_a_rank
    from mpi4dl.estimate.search import candidates, estimates, search
    from mpi4dl.parallel.costs.cost_model import Profiler
    from mpi4dl.training.setup import with_samples

    config = sweep.config()
    plans = legal(replace(sweep.space, ranks=(num_ranks,)), config.data.image_size, config.samples_per_step)
    if not plans and sweep.best is None:
        return []
    work = with_samples(config)
    print("estimating: units are timed, once for each shape of tile", file=sys.stderr, flush=True)
    with as_a_rank(config, num_ranks) as device:
        estimator = work.estimator(None, device, Profiler.of_user())
        if sweep.best is not None:
            every = candidates(num_ranks, len(estimator.cuttable), estimator.image)
            best = search(estimator, every, float("inf") if sweep.memory is None else sweep.memory).best
            return [Tried.by(each.plan, each) for each in best[: sweep.best]]
        known: list[PlanEstimate | None] = [None] * len(plans)
        if not (config.training.recompute or config.parallel.stream):  # which estimates of given plans leave out
            known = estimates(estimator, plans)
    return [Tried.by(plan, each) for plan, each in zip(plans, known, strict=True)]


def run_all(sweep: Sweep, plans: list[Tried], results: Results) -> None:
    """Run, turn by turn, all plans that have neither had the turn nor failed; save after each job."""
    if sweep.retry:
        for each in plans:
            each.failure = None
    jobs = [(turn, each) for turn in range(sweep.turns) for each in plans if len(each.turns) <= turn]
    began, seconds = time.perf_counter(), []
    for number, (turn, each) in enumerate(jobs):
        if each.failure is not None:
            continue
        outcome = run_job(each.ranks, _job_arguments(sweep, each), sweep.time_limit)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        each.take(outcome)
        results.save()
        left = sum(later.failure is None for _, later in jobs[number + 1 :]) * sum(seconds) / len(seconds)
        where = f"[{number + 1}/{len(jobs)}] turn {turn + 1} of {sweep.turns}: {each.plan}"
        told = f"{where}: {_shown(outcome)}, in {seconds[-1]:.0f} s; about {duration(left)} left"
        print(told, file=sys.stderr, flush=True)


def _shown(outcome: Outcome) -> str:
    if outcome.answer is None:
        return f"failed: {outcome.failure}"
    speed = outcome.answer["images"] / outcome.answer["seconds"]
    return f"{speed:.3g} images/s, {outcome.answer['peak_bytes'] / MIB:.0f} MiB"


def _job_arguments(sweep: Sweep, each: Tried) -> list[str]:
    limit = [] if sweep.memory is None else [f"--memory={sweep.memory}"]
    how = [f"--steps={sweep.steps}", f"--warm-up={sweep.warm_up}", *limit]
    return ["-m", "mpi4dl.sweeps.job", *how, "--", *READING, *sweep.training, *each.flags]


def publish(sweep: Sweep, results: Results) -> None:
    """Print the table; write the CSV; and draw the plot if a plan was measured."""
    rows = results.rows(sweep.training)
    as_csv(rows, path := sweep.out.with_name(f"{sweep.out.name}.csv"))
    paths = [f"{sweep.out}.json", str(path)]
    heading = title(sweep, rows, results.cores)
    print(f"\n{heading}\n{as_table(rows)}")
    front = [row for row in rows if row["on_front"]]
    for row in front:
        print(f"{row['number']}: {row['command']}")
    if front:
        try:
            save_figure(plot(rows, heading), sweep.out.with_name(f"{sweep.out.name}.png"))
            paths.append(f"{sweep.out}.png")
        except ImportError:
            print(f"no picture without matplotlib; run {to_install('matplotlib')}")
    print("saved " + ", ".join(paths))


def title(sweep: Sweep, rows: list[dict[str, Any]], cores: int) -> str:
    """The title of a sweep: the training, cores and threads, and how it is measured."""
    config = sweep.config()
    options = ", ".join(f"{name} {value}" for name, value in config.model.model_options.items())
    size = " x ".join(map(str, config.data.image_size))
    threads = " or ".join(str(n) for n in sorted({row["threads_of_a_rank"] for row in rows} - {None})) or "no"
    freed = "kept" if config.parallel.keep_freed_memory else "returned"
    allocator = os.environ.get("LD_PRELOAD") or "the C library's malloc"
    ranks = " or ".join(map(str, sweep.space.ranks))
    limit = "" if sweep.memory is None else f", of {sweep.memory / MIB:.0f} MiB each"
    return (
        f"{config.model_name}{f' ({options})' if options else ''}, {size} px, batches of {config.data.batch_size}, "
        f"{config.optimizer.optimizer}; {ranks} ranks{limit}, on {counted(cores, 'core')} in all, "
        f"threads of a rank: {threads}\nmedians of {counted(sweep.turns, 'turn')} of {counted(sweep.steps, 'step')}; "
        f"{allocator}, freed memory {freed}"
    )


if __name__ == "__main__":
    main()
