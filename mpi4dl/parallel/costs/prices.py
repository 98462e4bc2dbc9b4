"""What every atom costs on a rank of every stage, and so what the stages cost: the numbers that cuts and plans go by.

          atom 0   atom 1   atom 2           forward and backward seconds of atom i on the tiles of stage s:
stage 0   1.1 2.0  0.4 0.9  0.3 0.5          timed there, or counted FLOPs over an assumed speed
stage 1   2.0 4.1  0.7 1.6  0.5 1.0
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.node import cores
from mpi4dl.parallel.costs.link import ASSUMED, Link, measure_link
from mpi4dl.parallel.costs.memory import AtomBytes, count_atoms
from mpi4dl.parallel.costs.remembered import Remembered, cache_folder, machine, versions
from mpi4dl.parallel.costs.timing import AtomSeconds, Column, Site, sites_of, time_column
from mpi4dl.parallel.inputs import shape_only
from mpi4dl.parallel.pipeline.balance import count_flops
from mpi4dl.parallel.pipeline.split import Cuttable, unfit
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tensor.styles import Styles

BUDGET_SECONDS = 8.0  # for all tile shapes of a plan together
RANK_GFLOPS = 50.0
LINK = {"what": "link"}
TIMED = ("auto", "measured")  # what can be measured between ranks is timed where there are none

TimeColumn = Callable[[Cuttable, Site, torch.device, float], Column]


@dataclass(frozen=True)
class Prices:
    """`columns[s][i]` are the seconds of atom i on a rank of stage s. `source` says in words where they come from."""

    columns: tuple[Column, ...]
    link: Link
    source: str
    timed: bool

    @property
    def matrix(self) -> list[list[float]]:
        """What each atom costs in all on each stage, as `partition` takes it."""
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
class Clockwork:
    """How atoms are timed on this machine: each site once, and remembered. Where they are not, a speed is assumed."""

    remembered: Remembered
    time: TimeColumn = time_column
    budget_seconds: float = BUDGET_SECONDS
    site_seconds: float | None = None  # for each site, instead of its part of the budget
    rank_gflops: float = RANK_GFLOPS

    @classmethod
    def of_user(cls) -> "Clockwork":
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
        """What atoms take of a rank's memory at a site: counted once, and remembered."""
        facts = {"what": "bytes", **_facts(cuttable, site), **versions()}
        known = self.remembered.get(facts)
        if known is not None:
            return tuple(AtomBytes(*atom) for atom in known)
        found = count_atoms(cuttable, site)
        self.remembered.put(facts, found)
        return found

    def link(self, num_ranks: int) -> tuple[Link, str]:
        """What the last job found here; assumed if there was none, or where `link_of` would, of so many ranks."""
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
    clockwork: Clockwork,
    link: tuple[Link, str] | None = None,
    styles: Styles | None = None,
) -> Prices:
    """What atoms take on this machine, each on the tiles that it would have. Raises RuntimeError and the like."""
    sites = sites_of(cuttable, plan, image, styles)
    different = dict.fromkeys(sites)
    columns: Mapping[Site, Column] = {
        site: clockwork.column(cuttable, site, device, len(different)) for site in different
    }
    found, said = clockwork.link(plan.num_ranks) if link is None else link
    threads = torch.get_num_threads()
    on = f"{threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else "a GPU"
    source = f"atoms timed on their tiles, on {on} here; {found}, {said}"
    return Prices(tuple(columns[site] for site in sites), found, source, timed=True)


def counted_prices(cuttable: Cuttable, plan: Plan, image: tuple[int, ...], rank_gflops: float = RANK_GFLOPS) -> Prices:
    """What atoms would take if a rank made so many GFLOP a second, and nothing but FLOPs took time."""
    flops = count_flops(cuttable, shape_only(cuttable.model, image))
    columns = []
    for stage in range(plan.num_stages):
        forward = [each / plan.shape(stage).size / (rank_gflops * 1e9) for each in flops]
        columns.append(tuple(AtomSeconds(seconds, 2 * seconds) for seconds in forward))
    return Prices(tuple(columns), Link(0.0, 0.0), assumed(rank_gflops), timed=False)


def assumed(rank_gflops: float) -> str:
    return f"{rank_gflops:g} GFLOP/s a rank, a backward as two forwards; messages take no time"


def prices_for(
    cuttable: Cuttable,
    plan: Plan,
    image: tuple[int, ...],
    balance: str,
    device: torch.device,
    clockwork: Clockwork | None = None,
    link: tuple[Link, str] | None = None,
    styles: Styles | None = None,
) -> Prices:
    """By "auto" timed, where that can be done; else counted. Raises ValueError if the model cannot take the images."""
    clockwork = clockwork or Clockwork.of_user()
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
