"""The output of the planning command: an overview of one plan; the fastest plans for a number of ranks, or for several.

None needs MPI, nor the model's values; what a training would refuse is refused as far as one process can see it.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from mpi4dl._files import unwritable
from mpi4dl._memory import keep_freed_memory
from mpi4dl._wording import Tell, counted, quietly, to_install
from mpi4dl.comm.node import asked_threads, cores
from mpi4dl.engine.engine import is_of_whole_batch, require_one_batch
from mpi4dl.engine.recompute import recompute_stages
from mpi4dl.estimate.dry_run import look_ahead, require_rules, stream_of
from mpi4dl.estimate.machine_file import load_machine
from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate
from mpi4dl.estimate.plan_options import OnMachine, Searched
from mpi4dl.estimate.scaling import draw_scaling, numbers_of_ranks, scaling_lines, scaling_points
from mpi4dl.estimate.search import candidates, degrees_of, ranked, search
from mpi4dl.estimate.summary import PlanSummary, count_work, told_of
from mpi4dl.estimate.workload import Workload
from mpi4dl.options.build import options_of_plan
from mpi4dl.options.declare import ConfigError, saying
from mpi4dl.options.models import without_rules
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.store import Store, machine
from mpi4dl.parallel.pipeline.split import unfit
from mpi4dl.parallel.plan import Plan

FEW = 64  # ranks of this machine, up to which each shape of tile is looked at as it is


def profiler_of(on: OnMachine) -> Profiler:
    """What finds costs on the machine that is planned for.

    Raises ConfigError, or ValueError, for files that cannot be read, or describe no machine or no timings.
    """
    found = Profiler.of_user(machine=None if on.machine is None else load_machine(on.machine))
    if on.timings is None:
        return found
    with saying(f"--timings {on.timings}", OSError):
        return replace(found, store=Store.load(on.timings), small=True)


def planned(work: Workload, profiler: Profiler, flags: Sequence[str], tell: Tell = quietly) -> PlanSummary:
    """The overview of what `flags` would train, of which `work` was made.

    Raises ValueError for what the training would refuse, as far as that can be seen without its ranks.
    """
    plan = work.plan()
    if profiler.machine is not None and plan.num_ranks > profiler.machine.num_ranks:
        raise ConfigError(
            f"{plan} = {plan.num_ranks} ranks, but the machine of --machine has {profiler.machine.num_ranks}: raise "
            "`nodes` in its file, or plan for fewer ranks"
        )
    if work.patch is not None and profiler.store.path is not None:
        raise ConfigError(
            f"`patches` {work.patch}: --timings is for models of whole images: leave it out, to time layers "
            "here or count them by the rates of --machine"
        )
    work.require_training(work.num_batches)
    if work.task is not None:
        require_one_batch(work.task.objective, plan)
    if work.training.recompute and plan.num_stages == 1:
        recompute_stages([work.model()], stages=False)
    tell("looking for operators without a rule", 0, 0)
    with without_rules(work.parallel):
        require_rules(work, plan)
    tell("counting what each stage computes and keeps, and timing it", 0, 0)
    with as_a_rank(work.parallel, plan.num_ranks) as device:
        return look_ahead(
            work,
            plan,
            device,
            stream_of(work, plan, device),
            balance=work.parallel.balance,
            profiler=profiler,
            command=shlex.join(["mpirun", "-n", str(plan.num_ranks), "python", "-m", "mpi4dl.train", *flags]),
        )


class Candidates(NamedTuple):
    """What is searched: plans of up to `num_ranks` ranks for a training, of which each has `most_bytes`."""

    work: Workload
    estimator: Estimator
    num_ranks: int
    ranks_per_node: int | None
    most_bytes: float

    @property
    def described(self) -> list[str]:
        """A line about the other machine, if there is one."""
        machine = self.estimator.profiler.machine
        return [] if machine is None else [machine.describe()]

    def plans(self, num_ranks: int, batch_size: int | None = None) -> list[Plan]:
        """Those that a training by them would take; `batch_size` is another one than that of the options."""
        work = self.work if batch_size is None else self.work.of_batches(batch_size)
        found, accumulate = self.estimator, work.training.accumulate
        neighbours = min(num_ranks, self.ranks_per_node or num_ranks)
        degrees = degrees_of(found.cuttable.model, num_ranks, neighbours, found.styles, work.parallel.moe == "expert")
        kept = {name: getattr(work.parallel, name) for name in Plan.not_searched()}
        image = (batch_size or found.image[0], *found.image[1:])
        plans = []
        for each in candidates(num_ranks, len(found.cuttable), image, degrees, kept, accumulate):
            with suppress(ConfigError):  # images of their own sizes share no microbatch
                plans.append(work.plan(**options_of_plan(each, accumulate)))
        # Batch norm of few pixels may not take a single sample.
        one = (1, *found.image[1:])
        alone = unfit(found.cuttable.model, one) is None
        plans = [each for each in plans if alone or each.microbatch(image) != one]
        whole = work.task is not None and is_of_whole_batch(work.task.objective)
        return [each for each in plans if not whole or each.num_microbatches_of_all == 1]


@contextmanager
def searching(work: Workload, asked: Searched, profiler: Profiler, tell: Tell) -> Iterator[Candidates]:
    """Search in here, on this machine or another one, as a rank would compute.

    Raises ValueError, also for what a training by any plan would refuse, as `planned`.
    """
    machine, num_ranks = profiler.machine, require_ranks(asked, profiler)
    profiler = replace(profiler, small=profiler.small or machine is not None or num_ranks > FEW)
    limit, ranks_per_node = asked.memory, asked.ranks_per_node
    if machine is not None:
        limit, ranks_per_node = limit or machine.memory, ranks_per_node or machine.ranks_per_node
    work.require_training(work.num_batches)
    tell("building the model", 0, 0)
    with as_a_rank(work.parallel, num_ranks) as device:
        found = work.estimator(None, device, profiler)
        with told_of(work.name, found.cuttable.model, found.image):
            count_work(found.cuttable, [len(found.cuttable)], found.image, work.require_loss)
        yield Candidates(work, found, num_ranks, ranks_per_node, float("inf") if limit is None else limit)


def searched(
    work: Workload,
    asked: Searched,
    profiler: Profiler,
    flags: Sequence[str],
    tell: Tell = quietly,
    measured: Callable[[Sequence[PlanEstimate]], Sequence[PlanEstimate]] = tuple,
) -> list[str]:
    """A table of the fastest plans, some of them `measured`, and the command that starts each. Raises ValueError."""
    with searching(work, asked, profiler, tell) as found:
        ranking = search(found.estimator, found.plans(found.num_ranks), found.most_bytes, tell)
        how = (work.source.tokens, profiler.machine, found.estimator.profiler.source(found.estimator.device))
        ranking = ranking._replace(best=tuple(measured(ranking.best)))
        return [*found.described, *ranked(ranking, found.num_ranks, found.most_bytes, flags, *how)]


def scaled(work: Workload, asked: Searched, on: OnMachine, profiler: Profiler, tell: Tell = quietly) -> list[str]:
    """Curves of the fastest plans from one rank on, as a table, and as a picture. Raises ValueError."""
    picture = Path(f"scaling-{on.scaling}.png")
    with searching(work, asked, profiler, tell) as found:
        numbers, limit = numbers_of_ranks(found.num_ranks), found.most_bytes
        points = scaling_points(found.estimator, found.plans, numbers, on.scaling == "weak", limit, tell)
    tokens = work.source.tokens
    lines = [*found.described, *scaling_lines(points, found.ranks_per_node, tokens, limit)]
    size = f"{tokens} tokens" if tokens else f"{'x'.join(map(str, found.estimator.image[2:]))} px"
    title = f"{work.name}, {size}: {on.scaling} scaling"
    try:
        with saying(f"{picture} cannot be written", OSError):
            draw_scaling(points, title, picture, tokens)
    except ImportError:
        return [*lines, f"the curves are not drawn: install matplotlib by {to_install('matplotlib')}"]
    return [*lines, f"curves: {picture}"]


def time_layers(work: Workload, asked: Searched, path: str, profiler: Profiler, tell: Tell = quietly) -> list[str]:
    """Time the layers of a model on the small tiles that plans for up to so many ranks need, and write the file."""
    problem = unwritable("--time-only", path)
    if problem is not None:  # before minutes are spent
        raise ConfigError(problem)
    store = Store()
    with searching(work, asked, replace(profiler, store=store, small=True), tell) as found:
        estimator = found.estimator
        on = machine(estimator.device)["on"]
        store.measured_on = on if isinstance(on, str) else f"{on[0]}, {counted(on[1], 'thread')}"
        plans = (plan for ranks in numbers_of_ranks(found.num_ranks) for plan in found.plans(ranks))
        sites, refused = {site: None for plan in plans for site in estimator.sites(plan)}, []
        for number, site in enumerate(sites):
            tell("shapes of tiles that were timed", number, len(sites))
            try:
                estimator.profiler.costs(estimator.cuttable, site, estimator.device)
            except (RuntimeError, ValueError, AssertionError) as error:  # as a search leaves such plans out
                refused.append(str(error).partition("\n")[0])
        if len(refused) == len(sites):
            why = refused[0] if refused else "there is no plan for so many ranks and such batches"
            raise ConfigError(f"{work.name} cannot be timed: {why}")
    with saying(f"--time-only {path}", OSError):
        store.save(path)
    return [f"timings of the layers of {work.name} on small tiles: {path}"]


def require_ranks(asked: Searched, profiler: Profiler) -> int:
    """For how many ranks to search, of those that a machine has. Raises ConfigError where that cannot be."""
    most = None if profiler.machine is None else profiler.machine.num_ranks
    ranks = asked.ranks or most
    if ranks is None:
        raise ConfigError("--search, --scaling and --time-only need --ranks: for how many ranks to look")
    if most is not None and ranks > most:
        raise ConfigError(
            f"--ranks {ranks} are more than the machine has: {most}; raise `nodes` in the file of --machine, or choose "
            "fewer ranks"
        )
    if ranks % (asked.ranks_per_node or ranks):
        raise ConfigError(
            f"--ranks {ranks} are no multiple of --ranks-per-node {asked.ranks_per_node}: all nodes must have as many"
        )
    return ranks


@contextmanager
def as_a_rank(parallel: Parallel, num_ranks: int) -> Iterator[torch.device]:
    """Compute in here as a rank of the training would: on which device, with the threads and the memory that it has.

    Ranks are taken to share this machine. Where a GPU was asked for and is not here, it cannot be timed.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(parallel.threads or asked_threads() or max(1, cores() // num_ranks))
    keep_freed_memory(parallel.keep_freed_memory)
    try:
        yield torch.device("cuda" if parallel.device != "cpu" and torch.cuda.is_available() else "cpu")
    finally:
        torch.set_num_threads(before)
