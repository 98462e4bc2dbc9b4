"""Costs of every unit on a rank of every stage, and so of the stages: the numbers that cuts and plans use.

          unit 0   unit 1   unit 2           forward and backward seconds of unit i on the tiles of stage s:
stage 0   1.1 2.0  0.4 0.9  0.3 0.5          timed there, or counted FLOPs over an assumed speed
stage 1   2.0 4.1  0.7 1.6  0.5 1.0
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import functional as F

from mpi4dl._progress import Tell
from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.comm.node import cores
from mpi4dl.parallel.blocks import blocks
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.costs.stage_traffic import NO_WAITS, StageTraffic, WaitSeconds
from mpi4dl.parallel.costs.timing import (
    Clock,
    Column,
    Remembered,
    Site,
    Units,
    UnitSeconds,
    cache_folder,
    clock_on,
    machine,
    sites_of,
    time_column,
    versions,
)
from mpi4dl.parallel.costs.units import UnitCounts, count_flops, count_units
from mpi4dl.parallel.inputs import input_dtype, of_tokens
from mpi4dl.parallel.pipeline.split import unfit
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.tables.simulator import Costs, Simulation, simulate
from mpi4dl.parallel.tensor.styles import Styles

# The link between ranks as a straight line: a message takes a latency, and so many seconds for each of its bytes.

SMALL_BYTES, LARGE_BYTES = 64, 1 << 21
LINK_REPEATS = {SMALL_BYTES: 40, LARGE_BYTES: 5}
LINK_TAG = 3


class Link(NamedTuple):
    """`latency_seconds` of a message without bytes, and the seconds that each byte adds."""

    latency_seconds: float
    byte_seconds: float

    def __str__(self) -> str:
        return f"{self.latency_seconds * 1e6:.0f} us and {self.byte_seconds * 2**20 * 1e3:.2g} ms/MiB a message"

    def machine(self, num_ranks: int) -> Machine:
        """One node of so many ranks, of which each two are joined by such a link."""
        rate = 1 / self.byte_seconds if self.byte_seconds else math.inf
        return Machine.of_link(self.latency_seconds, rate, num_ranks, message_seconds=MESSAGE_SECONDS)


ASSUMED = Link(20e-6, 1 / 4e9)  # between processes of one machine, which share memory


def measure_link(comm: Communicator, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Link:
    """The link between the first and the last rank, the fastest of a few messages. Collective; alike on all ranks."""
    if comm.size == 1:
        return ASSUMED
    small, large = (_one_way(comm, num_bytes, device, clock) for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    found = None
    if comm.rank == 0:
        found = Link(max(small, 1e-7), max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-13))
    link: Link = comm.broadcast_object(found)
    return link


def _one_way(comm: Communicator, num_bytes: int, device: torch.device, clock: Callable[[], float]) -> float:
    there, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
    for _ in range(LINK_REPEATS[num_bytes]):
        start = clock()
        if comm.rank == 0:
            comm.send(there, comm.size - 1, LINK_TAG)
            comm.recv(there, comm.size - 1, LINK_TAG)
        elif comm.rank == comm.size - 1:
            comm.recv(there, 0, LINK_TAG)
            comm.send(there, 0, LINK_TAG)
        seconds.append((clock() - start) / 2)
    return min(seconds)


BUDGET_SECONDS = 8.0  # for all tile shapes of a plan together
RANK_GFLOPS = 50.0
LINK = {"what": "link"}
TIMED = ("auto", "measured")  # what can be measured between ranks is timed where there are none

T = TypeVar("T")
TimeColumn = Callable[[Any, Site, torch.device, float], Column]


class Overhead(NamedTuple):
    """A rank's Python beside units: of each action, round of messages, parameter in a step, and rule of a tile.

    An action draws from a stream of random numbers, packs, posts and takes messages. Rounds of units, which are timed
    without any other rank, post and take theirs. A step looks for hooks, keeps buffers in case that it fails, and calls
    the optimizer. Streamed tiles run by rules, both ways, where the same rank without them has plain tensors. A
    gradient that ranks sum is sorted into its bucket. With ZeRO 3 functions look for parameters in each microbatch.
    """

    action_seconds: float = 0.0
    parameter_seconds: float = 0.0
    round_seconds: float = 0.0
    rule_seconds: float = 0.0
    summed_seconds: float = 0.0
    gathered_seconds: float = 0.0

    def of_parameters(self, count: int, ranks: int, zero: int, microbatches: int) -> float:
        """The seconds in a step of so many parameters, which so many ranks have, by this ZeRO stage."""
        each = self.parameter_seconds + (ranks > 1) * self.summed_seconds
        return count * (each + (zero == 3) * microbatches * self.gathered_seconds)


NO_OVERHEAD = Overhead()
# Python on a core of 2.6 GHz, beside plain PyTorch: 1.4 to 3.0 ms a step of models of 47 to 246 parameters on one rank,
# 0.5 ms for each further microbatch, on two tiles of AmoebaNet-D (3, 24) 14 ms for 204 rounds, on its streamed tiles
# of 80 px 0.5 s for 3,000 operators, with their part of the backward pass. Two replicas of models of 62 to 246
# parameters: 6 to 10 ms a step, and with ZeRO 3 5 to 24 ms more for each microbatch.
PYTHON = Overhead(3e-4, 1.6e-5, 5e-5, 1e-4, 6e-5, 8e-5)
MESSAGE_SECONDS = 1.5e-5  # in which a rank hands over a message


class StageSeconds(NamedTuple):
    """The seconds of a microbatch on a rank of a stage: what it computes, and its waits for others, both ways."""

    forward: float
    backward: float
    there: WaitSeconds
    back: WaitSeconds
    weight: float = 0.0  # of `backward`, what comes later where gradients are split; 0: half

    @property
    def both(self) -> tuple[float, float]:
        """Of the forward and the backward pass, all in all."""
        return self.forward + sum(self.there), self.backward + sum(self.back)


@dataclass(frozen=True)
class StageCosts:
    """`columns[s][i]` are the seconds of unit i on a rank of stage s, whose messages take what `stages[s]` says.

    `source` says in words where they come from.
    """

    columns: tuple[Column, ...]
    stages: tuple[StageTraffic, ...] = field(compare=False)
    source: str
    timed: bool
    overhead: Overhead = NO_OVERHEAD

    @cached_property
    def _units(self) -> tuple[tuple[StageSeconds, ...], ...]:
        each = self.overhead.round_seconds

        def seconds(unit: UnitSeconds, there: WaitSeconds, back: WaitSeconds) -> StageSeconds:
            forward, backward = (each * sum(found.times for found in way) for way in (unit.there, unit.back))
            return StageSeconds(unit.forward + forward, unit.backward + backward, there, back, unit.weight)

        found = []
        for stage, column in zip(self.stages, self.columns, strict=True):
            waits = (stage.waits_of([getattr(unit, way) for unit in column]) for way in ("there", "back"))
            found.append(tuple(map(seconds, column, *waits)))
        return tuple(found)

    @property
    def matrix(self) -> list[list[float]]:
        """The total cost of each unit on each stage, as `partition` takes it."""
        return [[sum(unit.both) for unit in units] for units in self._units]

    def of_stages(self, counts: Sequence[int]) -> tuple[StageSeconds, ...]:
        """Those of a microbatch on a rank of each stage, if the stages get so many units."""
        found = []
        for units, (start, stop) in zip(self._units, pairwise(accumulate(counts, initial=0)), strict=True):
            own = units[start:stop]
            there, back = (sum((getattr(unit, way) for unit in own), NO_WAITS) for way in ("there", "back"))
            forward, backward, weight = (
                sum(getattr(unit, way) for unit in own) for way in ("forward", "backward", "weight")
            )
            each = self.overhead.action_seconds
            found.append(StageSeconds(forward + each, backward + each, there, back, weight))
        return tuple(found)

    def simulated(self, plan: Plan, counts: Sequence[int]) -> Simulation:
        """A step of a replica whose stages have so many units; what it keeps is not counted."""
        return simulate(plan.table(), plan.placement, self.step(counts))

    def step(self, counts: Sequence[int], kept: Sequence[int] = ()) -> Costs:
        """The costs of a microbatch on each rank of stages of that many units, which keep `kept` bytes of it."""
        return costs_of(self.of_stages(counts), self.messages(counts), tuple(kept) or (0,) * len(counts))

    def messages(self, counts: Sequence[int]) -> tuple[float, ...]:
        """The seconds in which a stage of so many units hands on to the next one, each rank to whom it reaches."""
        ends = zip(self.columns, accumulate(counts), pairwise(self.stages), strict=False)
        return tuple(here.handing_seconds(there, column[end - 1].handed_bytes) for column, end, (here, there) in ends)


def costs_of(stages: Sequence[StageSeconds], messages: Sequence[float], kept: Sequence[int]) -> Costs:
    """The costs of stages with these seconds, as a table is simulated."""
    forward, backward = zip(*(stage.both for stage in stages), strict=True)
    later = tuple(stage.weight or stage.backward / 2 for stage in stages)
    return Costs(forward, backward, tuple(messages), tuple(kept), later)


class MissingTimings(LookupError):
    """A file of timings has none of a model's units, which are not to be timed, nor assumed, instead."""


class TimingStore(Protocol):
    """Keeps values of JSON by facts of JSON."""

    def get(self, facts: Mapping[str, Any]) -> Any: ...

    def put(self, facts: Mapping[str, Any], value: Any) -> None: ...


@dataclass(frozen=True)
class Profiler:
    """How units are timed on this machine: each site once, and remembered. Where they are not, a speed is assumed."""

    remembered: TimingStore
    time: TimeColumn = time_column
    budget_seconds: float = BUDGET_SECONDS
    site_seconds: float | None = None  # for each site, instead of its part of the budget
    rank_gflops: float = RANK_GFLOPS
    timed_on: str = ""  # where units were timed, if that was not here
    counts_at_once: ClassVar[bool] = False  # whether many samples are counted as quickly as few

    @classmethod
    def of_user(cls) -> "Profiler":
        return cls(Remembered(cache_folder()))

    def column(self, cuttable: Units, site: Site, device: torch.device, num_sites: int = 1) -> Column:
        facts = self.facts_of_seconds(cuttable, site, device)
        seconds = self.site_seconds or self.budget_seconds / num_sites
        return self._once(facts, UnitSeconds.of, lambda: self.time(cuttable, site, device, seconds))

    def prepare(self, cuttable: Units, sites: Iterable[Site], tell: Tell) -> None:
        """Do beforehand what many of these sites share: nothing, where each is looked at by itself."""

    @staticmethod
    def facts_of_seconds(cuttable: Units, site: Site, device: torch.device) -> dict[str, Any]:
        """What the seconds of units depend on."""
        return {"what": ["seconds of units", *UnitSeconds._fields], **_facts(cuttable, site), **machine(device)}

    def counts(self, cuttable: Units, site: Site) -> tuple[UnitCounts, ...]:
        """Memory and FLOPs of units on a rank at a site: counted once, and cached."""
        site = site._replace(splits=False)
        facts = {"what": ["counts of units", *UnitCounts._fields], **_facts(cuttable, site)}
        return self._once(facts, UnitCounts.of, lambda: count_units(cuttable, site))

    def _once(self, facts: dict[str, Any], kind: Callable[..., T], find: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        facts |= versions()
        known = self.remembered.get(facts)
        if known is not None:
            return tuple(kind(*unit) for unit in known)
        found = find()
        self.remembered.put(facts, found)
        return found

    def machine(self, num_ranks: int) -> tuple[Machine, str]:
        """This machine, with the link that the last job measured, and words about it.

        The link is assumed if there was none, or where `link_of` assumes it.
        """
        known = None if num_ranks > cores() else self.remembered.get(LINK)
        link, said = (ASSUMED, "assumed") if known is None else (Link(*known), "as in the last job")
        return link.machine(num_ranks), f"{link}, {said}"

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


def _facts(cuttable: Units, site: Site) -> dict[str, Any]:
    return {
        "model": print_of(cuttable),
        "image": list(site.image),
        "grid": list(site.shape),
        "modes": [site.tracks_batch, site.plain, *["splits"] * site.splits],
        "cuts": [repr(site.cutting), *site.arrangement],
    }


def print_of(cuttable: Units) -> str:
    """A word that differs for models that compute differently, as far as their modules tell."""
    model = cuttable.model
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict(keep_vars=True).items()]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    text = repr((repr(model), cuttable.names, tensors, frozen))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def timed_prices(
    cuttable: Units,
    plan: Plan,
    image: tuple[int, ...],
    device: torch.device,
    clockwork: Profiler,
    machine: tuple[Machine, str] | None = None,
    styles: Styles | None = None,
    sites: Sequence[Site] | None = None,
) -> StageCosts:
    """Times of units here, each on the tiles of its stage. Raises RuntimeError and the like."""
    sites = sites_of(cuttable, plan, image, styles) if sites is None else sites
    different = dict.fromkeys(sites)
    columns: Mapping[Site, Column] = {
        site: clockwork.column(cuttable, site, device, len(different)) for site in different
    }
    found, said = clockwork.machine(plan.num_ranks) if machine is None else machine
    threads = torch.get_num_threads()
    on = f"{threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else "a GPU"
    source = f"{clockwork.timed_on or f'units timed on their tiles, on {on} here'}; {said}"
    beside = PYTHON if device.type == "cpu" else NO_OVERHEAD
    return StageCosts(tuple(columns[site] for site in sites), stages_on(found, plan), source, True, beside)


def stages_on(machine: Machine, plan: Plan) -> tuple[StageTraffic, ...]:
    """The stages of a plan, where they are on a machine."""
    return tuple(StageTraffic(machine, plan, stage) for stage in range(plan.num_stages))


def counted_prices(
    cuttable: Units,
    plan: Plan,
    image: tuple[int, ...],
    rank_gflops: float = RANK_GFLOPS,
    machine: Machine | None = None,
) -> StageCosts:
    """Times of units if a rank computes this many GFLOP a second, and only FLOPs take time.

    Another `machine` has rates of its own, if it has any, and its links for what follows the units.
    """
    if machine is not None and machine.flops_per_second is not None:
        rank_gflops = machine.flops_per_second / 1e9
    flops = count_flops(cuttable, image)
    columns = []
    for stage in range(plan.num_stages):
        forward = [each / plan.shape(stage).size / (rank_gflops * 1e9) for each in flops]
        columns.append(tuple(UnitSeconds(seconds, 2 * seconds) for seconds in forward))
    free = Machine.of_link(0.0, math.inf, plan.num_ranks, message_seconds=0.0)
    there = free if machine is None else machine
    left_out = "messages" if machine is None else "halos"
    source = f"{rank_gflops:g} GFLOP/s a rank, a backward as two forwards; {left_out} take no time"
    return StageCosts(tuple(columns), stages_on(there, plan), source, timed=False)


def prices_for(
    cuttable: Units,
    plan: Plan,
    image: tuple[int, ...],
    balance: str,
    device: torch.device,
    clockwork: Profiler | None = None,
    machine: tuple[Machine, str] | None = None,
    styles: Styles | None = None,
    sites: Sequence[Site] | None = None,
) -> StageCosts:
    """By "auto" timed, where that can be done; else counted. `sites` are those of the stages, if they are known.

    Raises:
        ValueError: the model cannot take the images.
        MissingTimings: the file of timings is of another model.
    """
    clockwork = clockwork or Profiler.of_user()
    if balance in TIMED:
        # It may look at values, or take no smaller images; what else is wrong with it is found where it is counted.
        with suppress(RuntimeError, AssertionError, ValueError, MemoryError):
            return timed_prices(cuttable, plan, image, device, clockwork, machine, styles, sites)
    try:
        return counted_prices(cuttable, plan, image, clockwork.rank_gflops, None if machine is None else machine[0])
    except (RuntimeError, AssertionError) as error:
        reason = unfit(cuttable.model, image)
        if reason is None:
            raise
        raise ValueError(reason) from error


# Seconds of units as all ranks take them together: each stage's on its own ranks and tiles, all stages at once.
#
# That is a rehearsal of the first steps, with throw-away copies: random states and the model stay as they are, and what
# is trained then is trained as if it had been cut so from the beginning.

STAGE_BUDGET_SECONDS = 4.0  # for each stage that a rank has


def measured_prices(
    cuttable: Units,
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
            ranks = plan.partners(comm.rank, 0, stage)
            if comm.rank in ranks:
                found[stage] = _column(cuttable, site, comm.subset(ranks), device, clock)
    of_ranks = comm.all_gather_object(found)
    columns = [[known[stage] for known in of_ranks if stage in known] for stage in range(plan.num_stages)]
    source = f"units timed on their ranks before the first step; {link}"
    return StageCosts(tuple(map(_mean, columns)), stages_on(link.machine(plan.num_ranks), plan), source, True)


def _column(cuttable: Units, site: Site, comm: Communicator, device: torch.device, clock: Clock) -> Column:
    def grid_of(smaller: Site) -> Grid:
        return Grid.of(comm, smaller.shape, smaller.tracks_batch)

    most: Callable[[float], float] = partial(_most, comm)
    return time_column(cuttable, site, device, STAGE_BUDGET_SECONDS, clock, grid_of, most)


def _most(comm: Communicator, seconds: float) -> float:
    return float(comm.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def _mean(columns: list[Column]) -> Column:
    def mean(units: Sequence[UnitSeconds], name: str) -> float:
        return sum(getattr(unit, name) for unit in units) / len(units)

    return tuple(
        UnitSeconds(
            mean(units, "forward"),
            mean(units, "backward"),
            handed_bytes=round(mean(units, "handed_bytes")),
            weight=mean(units, "weight"),
        )
        for units in zip(*columns, strict=True)
    )


# Costs of units if blocks of them keep only their inputs, and run again in the backward pass.
#
# units        0   1 [2  3] [4  5] 6       groups (2, 4) and (4, 6): of each its inputs are kept, and nothing of what is
# kept         k0  k1 in  -  in  - k6      within it, but while it is run again, when all of that is there

Group = tuple[int, int]


def groups_of(cuttable: Units) -> tuple[Group, ...]:
    """The first unit of each block of a model, and the one behind its last."""
    chosen = {id(block) for block in blocks(cuttable.model)}
    paths = [path for path, module in cuttable.model.named_modules() if id(module) in chosen]
    found = []
    for path in paths:
        own = [i for i, name in enumerate(cuttable.names) if name == path or name.startswith(f"{path}.")]
        if own and own[-1] - own[0] + 1 == len(own):
            found.append((own[0], own[-1] + 1))
    return tuple(sorted(found))


def image_bytes(cuttable: Units, site: Site) -> int:
    """The bytes of a rank's part of the images, or tokens, of a microbatch."""
    channels = 1 if of_tokens(site.image) else site.image[1]
    return site.pixels * channels * input_dtype(cuttable.model, site.image).itemsize


def counts_recomputed(
    column: Sequence[UnitCounts], groups: Sequence[Group], image_bytes: int
) -> tuple[UnitCounts, ...]:
    """The bytes of units on a rank whose part of the images has so many."""
    found = list(column)
    for first, end in groups:
        given = column[first - 1].handed if first else image_bytes
        again = sum(unit.kept for unit in column[first:end])
        for i in range(first, end):
            unit = column[i]
            kept, back = (given if i == first else 0), (again if i == end - 1 else 0)
            found[i] = unit._replace(kept=kept, unkept=unit.handed, backward=unit.backward + back)
    return tuple(found)


def seconds_recomputed(column: Column, groups: Sequence[Group]) -> Column:
    """The seconds of units on a rank, that of the forward pass which comes again among those of the backward pass."""
    found = list(column)
    for first, end in groups:
        for i in range(first, end):
            unit = column[i]
            # What is recomputed has its gradients at once.
            found[i] = unit._replace(backward=unit.backward + unit.forward, back=(*unit.there, *unit.back), weight=0.0)
    return tuple(found)


CHANNELS, SIDE, SPEED_REPEATS = 32, 160, 5


def flop_seconds(device: torch.device) -> float:
    """The seconds of a FLOP of a convolution, the mean of its forward and its backward pass of twice as many."""
    clock, seconds = clock_on(device), []
    with torch.enable_grad(), forked((device,)):
        x = torch.rand(1, CHANNELS, SIDE, SIDE, device=device, requires_grad=True)
        weight = torch.rand(CHANNELS, CHANNELS, 3, 3, device=device, requires_grad=True)
        for _ in range(SPEED_REPEATS + 1):
            start = clock()
            F.conv2d(x, weight, padding=1).sum().backward()
            seconds.append(clock() - start)
    return min(seconds) / (3 * 2 * x.numel() * weight[0].numel())
