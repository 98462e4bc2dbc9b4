"""`--plan auto`: the fastest plan that fits into memory, for the ranks that mpirun started.

It is searched as by `mpi4dl plan --ranks N`; the times of layers are kept for the next start. Where batch norm sees a
microbatch, their number stays as it is: a plan never changes what is trained.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from mpi4dl._memory import NodeMemory, place_of
from mpi4dl._progress import ProgressLine
from mpi4dl._wording import counted, mebibytes
from mpi4dl.comm import Communicator
from mpi4dl.estimate.dry_run import REFUSED
from mpi4dl.estimate.plan_options import OnMachine, Searched
from mpi4dl.estimate.planning import profiler_of, searching
from mpi4dl.estimate.search import search
from mpi4dl.estimate.workload import Workload
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import flags_for, value_of, with_values

SEARCH_SECONDS = 60.0
CHOSEN = ("tiles", "stages", "batch_ways", "data", "schedule", "bidirectional", "chunks", "tensor", "experts")


@dataclass(frozen=True)
class Choice:
    """The options of a plan, and a line about it."""

    options: dict[str, Any]
    told: str


def with_fastest_plan(config: Config, comm: Communicator, work: Callable[[], Workload]) -> tuple[Config, list[str]]:
    """The configuration by the fastest plan, and a remark. Collective. Raises Refusal where none fits, or is asked for.

    `work` makes what is estimated; rank 0 calls it.
    """
    with comm.together((ValueError,)):
        require_open(config)
        device = comm.node.device(config.parallel.device)
    places, choice = comm.all_gather_object(place_of(device)), None
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            choice = choose(work(), places, comm.node.local_size)
    found: Choice = comm.broadcast_object(choice)
    return with_values(config, found.options), [found.told]


def require_open(config: Config) -> None:
    """Raise ConfigError where options say already what `plan` auto chooses."""
    taken = [name for name in CHOSEN if value_of(config, name) != value_of(Config(), name)]
    if taken:
        names = ", ".join(f"`{name}`" for name in taken)
        raise ConfigError(f"`plan` auto chooses {names}, too: leave out one or the other")


def choose(work: Workload, places: Sequence[NodeMemory], ranks_per_node: int) -> Choice:
    """The fastest plan for ranks at these places. Raises ValueError where none fits."""
    limit = int(min(each.num_bytes / places.count(each) for each in places) / REFUSED)
    asked = Searched(ranks=len(places), ranks_per_node=ranks_per_node, memory=limit)
    given = work.plan().num_microbatches
    with ProgressLine() as tell, searching(work, asked, profiler_of(OnMachine()), tell) as found:
        plans = found.plans(found.num_ranks)
        couples = any(isinstance(each, _BatchNorm) for each in found.estimator.cuttable.model.modules())
        if couples or work.parallel.microbatches > 1:
            plans = [each for each in plans if each.num_microbatches == given]
        found.estimator.streams = False
        ranking = search(found.estimator, plans, found.most_bytes, tell, SEARCH_SECONDS)
    if not ranking.best:
        raise ConfigError(
            f"no plan for {counted(len(places), 'rank')} fits into {mebibytes(limit)} of each: the smallest needs "
            f"{mebibytes(ranking.smallest.num_bytes)} ({ranking.smallest}); start more ranks, lower "
            "`batch_size`, or choose `stream` auto"
        )
    best = ranking.best[0]
    options = best.options(work.parallel, work.training.accumulate)
    flags = flags_for(with_values(work.config, {"plan": None}), options)
    fitting = counted(len(ranking.best), "plan")
    told = f"`plan` auto: {best}, the fastest of {fitting} that fit"
    return Choice(options, f"{told}; to keep it, replace --plan auto by {shlex.join(flags) or 'nothing'}")
