"""Seconds of atoms as all ranks take them together: each stage's on its own ranks and tiles, all stages at once.

That is a rehearsal of the first steps, with throw-away copies: random states and the model stay as they are, and what
is trained then is trained as if it had been cut so from the beginning.
"""

from collections.abc import Callable
from functools import partial

import torch

from mpi4dl.comm import Communicator
from mpi4dl.parallel.costs.link import ASSUMED, measure_link
from mpi4dl.parallel.costs.prices import Prices
from mpi4dl.parallel.costs.timing import AtomSeconds, Clock, Column, Site, clock_on, sites_of, time_column
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.tensor.styles import Styles

BUDGET_SECONDS = 4.0  # for each stage that a rank has


def measured_prices(
    cuttable: Cuttable,
    plan: Plan,
    comm: Communicator,
    image: tuple[int, ...],
    device: torch.device,
    clock: Clock | None = None,
    styles: Styles | None = None,
) -> Prices:
    """What atoms take on each stage, the mean of its ranks. Collective; the same on all ranks."""
    crowded = bool(comm.all_reduce(torch.tensor([comm.node.oversubscribed]).int(), "max"))
    link = ASSUMED if crowded else measure_link(comm, device)  # with too few cores a message waits for one
    if clock is None:
        alone = torch.get_num_threads() == 1 and device.type == "cpu"
        clock = comm.node.work_seconds if alone else clock_on(device)
    found = {}
    with comm.together((ValueError, NotImplementedError)):  # there may be no rule for what the model calls
        for stage, site in enumerate(sites_of(cuttable, plan, image, styles)):
            ranks = plan.ranks(0, stage)
            if comm.rank in ranks:
                found[stage] = _column(cuttable, site, comm.subset(ranks), device, clock)
    of_ranks = comm.all_gather_object(found)
    columns = [[known[stage] for known in of_ranks if stage in known] for stage in range(plan.num_stages)]
    return Prices(tuple(map(_mean, columns)), link, f"atoms timed on their ranks before the first step; {link}", True)


def _column(cuttable: Cuttable, site: Site, comm: Communicator, device: torch.device, clock: Clock) -> Column:
    def grid_of(smaller: Site) -> Grid:
        return Grid.of(comm, smaller.shape, smaller.tracks_batch)

    most: Callable[[float], float] = partial(_most, comm)
    return time_column(cuttable, site, device, BUDGET_SECONDS, clock, grid_of, most)


def _most(comm: Communicator, seconds: float) -> float:
    return float(comm.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def _mean(columns: list[Column]) -> Column:
    return tuple(
        AtomSeconds(*(sum(each) / len(atoms) for each in zip(*atoms, strict=True)))
        for atoms in zip(*columns, strict=True)
    )
