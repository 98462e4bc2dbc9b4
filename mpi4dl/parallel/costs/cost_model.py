"""Costs of every unit on a rank of every stage, and so of the stages: the numbers that cuts and plans use.

          atom 0   atom 1   atom 2           forward and backward seconds of atom i on the tiles of stage s:
stage 0   1.1 2.0  0.4 0.9  0.3 0.5          timed there, or counted FLOPs over an assumed speed
stage 1   2.0 4.1  0.7 1.6  0.5 1.0
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.comm.node import cores
from mpi4dl.parallel.blocks import blocks
from mpi4dl.parallel.costs.link import ASSUMED, Link, measure_link
from mpi4dl.parallel.costs.memory import AtomBytes, count_atoms
from mpi4dl.parallel.costs.timing import (
    AtomSeconds,
    Clock,
    Column,
    Remembered,
    Site,
    cache_folder,
    clock_on,
    machine,
    sites_of,
    time_column,
    versions,
)
from mpi4dl.parallel.inputs import input_dtype, of_tokens, shape_only
from mpi4dl.parallel.pipeline.balance import count_flops
from mpi4dl.parallel.pipeline.split import Cuttable, unfit
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.tensor.styles import Styles

BUDGET_SECONDS = 8.0  # for all tile shapes of a plan together
RANK_GFLOPS = 50.0
LINK = {"what": "link"}
TIMED = ("auto", "measured")  # what can be measured between ranks is timed where there are none

TimeColumn = Callable[[Cuttable, Site, torch.device, float], Column]


@dataclass(frozen=True)
class StageCosts:
    """`columns[s][i]` are the seconds of atom i on a rank of stage s. `source` says in words where they come from."""

    columns: tuple[Column, ...]
    link: Link
    source: str
    timed: bool

    @property
    def matrix(self) -> list[list[float]]:
        """The total cost of each unit on each stage, as `partition` takes it."""
        return [[sum(self._seconds(atom)) for atom in column] for column in self.columns]

    def of_stages(self, counts: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Forward and backward seconds of a microbatch on a rank of each stage, if those get so many atoms."""
        bounds = pairwise(accumulate(counts, initial=0))
        forward, backward = [], []
        for column, (start, stop) in zip(self.columns, bounds, strict=True):
            seconds = [self._seconds(atom) for atom in column[start:stop]]
            forward.append(sum(f for f, _ in seconds))
            backward.append(sum(b for _, b in seconds))
        return tuple(forward), tuple(backward)

    def _seconds(self, atom: AtomSeconds) -> tuple[float, float]:
        waits = self.link.seconds(atom.messages, atom.num_bytes)
        return atom.forward + waits, atom.backward + waits


@dataclass(frozen=True)
class Profiler:
    """How atoms are timed on this machine: each site once, and remembered. Where they are not, a speed is assumed."""

    remembered: Remembered
    time: TimeColumn = time_column
    budget_seconds: float = BUDGET_SECONDS
    site_seconds: float | None = None  # for each site, instead of its part of the budget
    rank_gflops: float = RANK_GFLOPS

    @classmethod
    def of_user(cls) -> "Profiler":
        return cls(Remembered(cache_folder()))

    def column(self, cuttable: Cuttable, site: Site, device: torch.device, num_sites: int = 1) -> Column:
        facts = {"what": "seconds", **_facts(cuttable, site), **machine(device), **versions()}
        known = self.remembered.get(facts)
        if known is not None:
            return tuple(AtomSeconds(*atom) for atom in known)
        found = self.time(cuttable, site, device, self.site_seconds or self.budget_seconds / num_sites)
        self.remembered.put(facts, found)
        return found

    def bytes(self, cuttable: Cuttable, site: Site) -> tuple[AtomBytes, ...]:
        """Memory of units on a rank at a site: counted once, and cached."""
        facts = {"what": "bytes", **_facts(cuttable, site), **versions()}
        known = self.remembered.get(facts)
        if known is not None:
            return tuple(AtomBytes(*atom) for atom in known)
        found = count_atoms(cuttable, site)
        self.remembered.put(facts, found)
        return found

    def link(self, num_ranks: int) -> tuple[Link, str]:
        """The link that the last job measured here; assumed if there was none, or where `link_of` assumes it."""
        known = None if num_ranks > cores() else self.remembered.get(LINK)
        return (ASSUMED, "assumed") if known is None else (Link(*known), "as in the last job")

    def link_of(self, comm: Communicator, device: torch.device) -> Link:
        """Measured between the ranks once, and remembered, so that the same job is cut alike again. Collective.

        With more ranks than cores, where a message waits for a core, it is assumed.
        """
        if comm.all_reduce(torch.tensor([comm.node.oversubscribed]).int(), "max"):
            return ASSUMED
        facts = {**LINK, "device": device.type, "ranks": comm.size, "on one machine": comm.node.local_size}
        known = comm.broadcast_object(self.remembered.get(facts) if comm.rank == 0 else None)
        if known is not None:
            return Link(*known)
        link = measure_link(comm, device)
        if comm.rank == 0 and comm.size > 1:
            self.remembered.put(facts, link)
            self.remembered.put(LINK, link)
        return link


def _facts(cuttable: Cuttable, site: Site) -> dict[str, Any]:
    return {
        "model": print_of(cuttable),
        "image": list(site.image),
        "grid": list(site.shape),
        "modes": [site.tracks_batch, site.plain],
        "cuts": [repr(site.cutting), *site.arrangement],
    }


def print_of(cuttable: Cuttable) -> str:
    """A word that differs for models that compute differently, as far as their modules tell."""
    model = cuttable.model
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict(keep_vars=True).items()]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    text = repr((repr(model), cuttable.names, tensors, frozen))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def timed_prices(
    cuttable: Cuttable,
    plan: Plan,
    image: tuple[int, ...],
    device: torch.device,
    clockwork: Profiler,
    link: tuple[Link, str] | None = None,
    styles: Styles | None = None,
) -> StageCosts:
    """Times of units on this machine, each on the tiles of its stage. Raises RuntimeError and the like."""
    sites = sites_of(cuttable, plan, image, styles)
    different = dict.fromkeys(sites)
    columns: Mapping[Site, Column] = {
        site: clockwork.column(cuttable, site, device, len(different)) for site in different
    }
    found, said = clockwork.link(plan.num_ranks) if link is None else link
    threads = torch.get_num_threads()
    on = f"{threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else "a GPU"
    source = f"units timed on their tiles, on {on} here; {found}, {said}"
    return StageCosts(tuple(columns[site] for site in sites), found, source, timed=True)


def counted_prices(
    cuttable: Cuttable, plan: Plan, image: tuple[int, ...], rank_gflops: float = RANK_GFLOPS
) -> StageCosts:
    """Times of units if a rank computes this many GFLOP a second, and only FLOPs take time."""
    flops = count_flops(cuttable, shape_only(cuttable.model, image))
    columns = []
    for stage in range(plan.num_stages):
        forward = [each / plan.shape(stage).size / (rank_gflops * 1e9) for each in flops]
        columns.append(tuple(AtomSeconds(seconds, 2 * seconds) for seconds in forward))
    return StageCosts(tuple(columns), Link(0.0, 0.0), assumed(rank_gflops), timed=False)


def assumed(rank_gflops: float) -> str:
    return f"{rank_gflops:g} GFLOP/s a rank, a backward as two forwards; messages take no time"


def prices_for(
    cuttable: Cuttable,
    plan: Plan,
    image: tuple[int, ...],
    balance: str,
    device: torch.device,
    clockwork: Profiler | None = None,
    link: tuple[Link, str] | None = None,
    styles: Styles | None = None,
) -> StageCosts:
    """By "auto" timed, where that can be done; else counted. Raises ValueError if the model cannot take the images."""
    clockwork = clockwork or Profiler.of_user()
    if balance in TIMED:
        # It may look at values, or take no smaller images; what else is wrong with it is found where it is counted.
        with suppress(RuntimeError, AssertionError, ValueError, MemoryError):
            return timed_prices(cuttable, plan, image, device, clockwork, link, styles)
    try:
        return counted_prices(cuttable, plan, image, clockwork.rank_gflops)
    except (RuntimeError, AssertionError) as error:
        reason = unfit(cuttable.model, image)
        if reason is None:
            raise
        raise ValueError(reason) from error


# Seconds of atoms as all ranks take them together: each stage's on its own ranks and tiles, all stages at once.
#
# That is a rehearsal of the first steps, with throw-away copies: random states and the model stay as they are, and what
# is trained then is trained as if it had been cut so from the beginning.

STAGE_BUDGET_SECONDS = 4.0  # for each stage that a rank has


def measured_prices(
    cuttable: Cuttable,
    plan: Plan,
    comm: Communicator,
    image: tuple[int, ...],
    device: torch.device,
    clock: Clock | None = None,
    styles: Styles | None = None,
) -> StageCosts:
    """Times of units on each stage, the mean of its ranks. Collective; the same on all ranks."""
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
    return StageCosts(
        tuple(map(_mean, columns)), link, f"units timed on their ranks before the first step; {link}", True
    )


def _column(cuttable: Cuttable, site: Site, comm: Communicator, device: torch.device, clock: Clock) -> Column:
    def grid_of(smaller: Site) -> Grid:
        return Grid.of(comm, smaller.shape, smaller.tracks_batch)

    most: Callable[[float], float] = partial(_most, comm)
    return time_column(cuttable, site, device, STAGE_BUDGET_SECONDS, clock, grid_of, most)


def _most(comm: Communicator, seconds: float) -> float:
    return float(comm.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def _mean(columns: list[Column]) -> Column:
    return tuple(
        AtomSeconds(*(sum(each) / len(atoms) for each in zip(*atoms, strict=True)))
        for atoms in zip(*columns, strict=True)
    )


# Costs of units if blocks of them keep only their inputs, and run again in the backward pass.
#
# atoms        0   1 [2  3] [4  5] 6       groups (2, 4) and (4, 6): of each its inputs are kept, and nothing of what is
# kept         k0  k1 in  -  in  - k6      within it, but while it is run again, when all of that is there

Group = tuple[int, int]


def groups_of(cuttable: Cuttable) -> tuple[Group, ...]:
    """The first atom of each block of a model, and the one behind its last."""
    chosen = {id(block) for block in blocks(cuttable.model)}
    paths = [path for path, module in cuttable.model.named_modules() if id(module) in chosen]
    found = []
    for path in paths:
        own = [i for i, name in enumerate(cuttable.names) if name == path or name.startswith(f"{path}.")]
        if own and own[-1] - own[0] + 1 == len(own):
            found.append((own[0], own[-1] + 1))
    return tuple(sorted(found))


def groups_in(cuttable: Cuttable, counts: Sequence[int]) -> tuple[Group, ...]:
    """The groups of units that recomputation runs again as a whole: the blocks of a single stage, or each stage."""
    return groups_of(cuttable) if len(counts) == 1 else tuple(pairwise(accumulate(counts, initial=0)))


def image_bytes(cuttable: Cuttable, site: Site) -> int:
    """The bytes of a rank's part of the images, or tokens, of a microbatch."""
    channels = 1 if of_tokens(site.image) else site.image[1]
    return site.pixels * channels * input_dtype(cuttable.model, site.image).itemsize


def bytes_recomputed(column: Sequence[AtomBytes], groups: Sequence[Group], image_bytes: int) -> tuple[AtomBytes, ...]:
    """The bytes of atoms on a rank whose part of the images has so many."""
    found = list(column)
    for first, end in groups:
        given = column[first - 1].handed if first else image_bytes
        again = sum(atom.kept for atom in column[first:end])
        for i in range(first, end):
            atom = column[i]
            kept, back = (given if i == first else 0), (again if i == end - 1 else 0)
            found[i] = AtomBytes(
                kept, atom.handed, atom.handed, atom.forward, atom.backward + back, atom.largest, atom.summed
            )
    return tuple(found)


def seconds_recomputed(column: Column, groups: Sequence[Group]) -> Column:
    """The seconds of atoms on a rank, that of the forward pass which comes again among those of the backward pass."""
    found = list(column)
    for first, end in groups:
        for i in range(first, end):
            found[i] = column[i]._replace(backward=column[i].backward + column[i].forward)
    return tuple(found)


CHANNELS, SIDE, SPEED_REPEATS = 32, 160, 5


def compute_seconds(device: torch.device, dtype: torch.dtype, clock: Clock) -> tuple[float, ...]:
    """The seconds of a FLOP of a convolution, of a byte that is touched, and of an operator, forward and backward."""
    with torch.enable_grad(), forked((device,)):
        x = torch.rand(1, CHANNELS, SIDE, SIDE, dtype=dtype, device=device, requires_grad=True)
        weight = torch.rand(CHANNELS, CHANNELS, 3, 3, dtype=dtype, device=device, requires_grad=True)
        flops = 2 * x.numel() * weight[0].numel()
        of_flops = _least(clock, lambda: F.conv2d(x, weight, padding=1)) / flops
        of_bytes = _least(clock, lambda: x * 2.0) / (2 * x.nbytes)
        tiny = torch.rand(1, dtype=dtype, device=device, requires_grad=True)
        of_operators = _least(clock, lambda: tiny * 2.0)
    return of_flops, of_bytes, of_operators


def _least(clock: Clock, run: Callable[[], Tensor]) -> float:
    """The least seconds of a forward and a backward pass."""
    seconds, gradient = [], torch.ones_like(run())
    for _ in range(SPEED_REPEATS):
        start = clock()
        run().backward(gradient)
        seconds.append(clock() - start)
    return min(seconds)
