"""`--plan auto`: the fastest plan that fits into memory, for the ranks that mpirun started.

It is searched as by `mpi4dl plan --ranks N`; the times of layers are kept for the next start. Where batch norm sees a
microbatch, their number stays as it is: a plan never changes what is trained.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from mpi4dl.options.config import ConfigError
from mpi4dl.options.sections.parallel import Parallel

SEARCH_SECONDS = 50.0  # of a minute: the timing at hand is ended
CHOSEN = (
    *("tiles", "stages", "batch_ways", "data", "schedule", "bidirectional", "chunks", "tensor", "experts"),
    *("stream", "stream_until", "stream_segments", "memory_limit"),
)

FastestPlan = tuple[dict[str, Any], str]  # the options that ask for it, and a line about it


def fastest_plan(parallel: Parallel, comm: Communicator, work: Callable[[], Workload]) -> FastestPlan:
    """The fastest plan for all ranks. `work` makes what is estimated; rank 0 calls it. Collective.

    Raises Refusal where none fits, or where options say already what is chosen.
    """
    with comm.together((ValueError,)):
        require_open(parallel)
        device = comm.node.device(parallel.device)
    places = comm.all_gather_object(place_of(device))
    return comm.from_first(lambda: choose(work(), places, comm.node.local_size))


def require_open(parallel: Parallel) -> None:
    """Raise ConfigError where options say already what `plan` auto chooses."""
    if taken := chosen_by(parallel):
        raise ConfigError(f"`plan` auto chooses {taken}, too, or does without: leave out one or the other")


def chosen_by(parallel: Parallel) -> str:
    """The options that say what a search for plans chooses, in words; nothing if there are none."""
    cuts = any(n > 1 for tiles in parallel.tiles for n in tiles)  # a volume and a text have other axes than a picture
    asked = parallel if cuts else replace(parallel, tiles=Parallel().tiles)
    return ", ".join(f"`{name}`" for name in CHOSEN if getattr(asked, name) != getattr(Parallel(), name))


def choose(work: Workload, places: Sequence[NodeMemory], ranks_per_node: int) -> FastestPlan:
    """The fastest plan for ranks at these places. Raises ValueError where none fits.

    Plans that are simple are looked at first, since the time may be over before others are.
    """
    until = time.monotonic() + SEARCH_SECONDS
    limit = int(min(each.num_bytes / places.count(each) for each in places) / REFUSED)
    asked = Searched(ranks=len(places), ranks_per_node=ranks_per_node, memory=limit)
    given = work.plan().num_microbatches
    with ProgressLine() as tell, searching(work, asked, profiler_of(OnMachine()), tell) as found:
        plans = found.plans(found.num_ranks)
        couples = any(isinstance(each, _BatchNorm) for each in found.estimator.cuttable.model.modules())
        if couples or work.parallel.microbatches > 1:
            plans = [each for each in plans if each.num_microbatches == given]
        found.estimator.streams = False
        plans.sort(key=lambda plan: (plan.num_stages, -plan.data))
        ranking = search(found.estimator, plans, found.most_bytes, tell, until)
    if not ranking.best:
        raise ConfigError(
            f"no plan for {counted(len(places), 'rank')} fits into {mebibytes(limit)} of each: the smallest needs "
            f"{mebibytes(ranking.smallest.num_bytes)} ({ranking.smallest}); start more ranks, lower `batch_size`, or "
            "choose `stream` auto"
        )
    best, fitting = ranking.best[0], counted(len(ranking.best), "plan")
    told = f"`plan` auto: {best}, the fastest of {fitting} that fit"
    told += " and were looked at in a minute" if time.monotonic() > until else ""
    return best.options(work.parallel, work.training.accumulate), told
