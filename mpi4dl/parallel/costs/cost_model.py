"""Costs of every unit on a rank of every stage, and so of the stages: the numbers that cuts and plans use.

          unit 0   unit 1   unit 2           forward and backward seconds of unit i on the tiles of stage s:
stage 0   1.1 2.0  0.4 0.9  0.3 0.5          timed there, or counts over rates
stage 1   2.0 4.1  0.7 1.6  0.5 1.0

Rates are those of a machine: FLOPs over those that a rank reaches, the bytes of all other operators over its memory's
rate, and a time for each operator to start (after Williams, Waterman and Patterson, "Roofline", 2009).
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.comm.node import cores
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.traffic import traffic_of
from mpi4dl.parallel.blocks import blocks
from mpi4dl.parallel.costs import GFLOPS
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.costs.meter import SECONDS, Column, UnitCosts
from mpi4dl.parallel.costs.sites import Fit, Site, Units, base_choices, extrapolate, on_one_rank, sites_of
from mpi4dl.parallel.costs.stage_traffic import NO_WAITS, StageTraffic, WaitSeconds
from mpi4dl.parallel.costs.store import Store, cache_folder, machine, versions
from mpi4dl.parallel.costs.timing import Clock, Seconds, clock_on, time_units
from mpi4dl.parallel.costs.units import BACKWARD, count_units
from mpi4dl.parallel.inputs import input_dtype, of_tokens
from mpi4dl.parallel.pipeline.checking import FAILING, UNSEEN
from mpi4dl.parallel.pipeline.split import unfit
from mpi4dl.parallel.pipeline.trace import reason_of
from mpi4dl.parallel.plan import Plan, grid_name
from mpi4dl.parallel.tables.simulator import Costs, Simulation, simulate
from mpi4dl.parallel.tensor.styles import Styles

# The link between ranks as a straight line: a message takes a latency, and so many seconds for each of its bytes.

SMALL_BYTES, LARGE_BYTES = 64, 4 << 20
LINK_REPEATS = 100, 8  # of messages up to 1 MiB, and of larger ones
LINK_TAG = 3


class Link(NamedTuple):
    """`latency_seconds` of a message without bytes, and the seconds that each byte adds."""

    latency_seconds: float
    byte_seconds: float

    def __str__(self) -> str:
        return f"{self.latency_seconds * 1e6:.0f} us and {self.byte_seconds * 2**20 * 1e3:.2g} ms/MiB a message"

    def machine(self, num_ranks: int, remark: str = "assumed") -> Machine:
        """One node of so many ranks, of which each two are joined by such a link."""
        rate = 1 / self.byte_seconds if self.byte_seconds else math.inf
        how: dict[str, Any] = {"message_seconds": MESSAGE_SECONDS, "source": f"{self}, {remark}"}
        return Machine.of_link(self.latency_seconds, rate, num_ranks, **how)


ASSUMED = Link(20e-6, 1 / 4e9)  # between processes of one machine, which share memory


def measure_link(
    comm: Communicator, device: torch.device, clock: Clock = time.perf_counter, apart: int | None = None
) -> Link:
    """The link between the first rank and one so far from it, or the last one. Collective; alike on all ranks."""
    if comm.size == 1:
        return ASSUMED
    apart = apart or comm.size - 1
    small, large = (one_way(comm, size, apart, 1, device, clock) for size in (SMALL_BYTES, LARGE_BYTES))
    return Link(max(small, 1e-7), max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-13))


def one_way(
    comm: Communicator,
    size: int,
    apart: int,
    pairs: int,
    device: torch.device,
    clock: Clock = time.perf_counter,
    collective: bool = False,
) -> float:
    """Seconds of a message of so many bytes from the first `pairs` ranks to those so far `apart`, the median.

    All pairs send at once, and the slowest one counts. Collective; the same on all ranks.
    """
    times = []
    first, second = comm.rank < pairs, apart <= comm.rank < apart + pairs
    other = comm.rank + apart if first else comm.rank - apart
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    for _ in range(LINK_REPEATS[size > 1 << 20] + 1):
        if pairs > 1:
            comm.barrier()
        start = clock()
        for sends in (first, second) if first or second else ():
            piece = [Piece(other, message)]
            comm.iexchange(piece if sends else [], [] if sends else piece, LINK_TAG, None, collective).wait()
        times.append((clock() - start) / 2)
    return max(comm.all_gather_object(float(np.median(times[1:])) if first else 0.0))


SITE_SECONDS = 4.0  # for the timing of a tile shape
LINK = {"what": "link"}
OF_PYTHON = (AttributeError, IndexError, KeyError, TypeError)  # which a model's own code raises
TIMED = ("auto", "measured")  # what can be measured between ranks is timed where there are none
TimeUnits = Callable[[Any, Site, torch.device, float], Seconds]


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

        def seconds(unit: UnitCosts, there: WaitSeconds, back: WaitSeconds) -> StageSeconds:
            forward, backward = (each * sum(found.times for found in way) for way in (unit.there, unit.back))
            both = unit.forward_seconds + forward, unit.backward_seconds + backward
            return StageSeconds(*both, there, back, unit.weight_seconds)

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
        costs = costs_of(self.of_stages(counts), self.messages(counts), (0,) * len(counts))
        return simulate(plan.table(), plan.placement, costs)

    def messages(self, counts: Sequence[int]) -> tuple[float, ...]:
        """The seconds in which a stage of so many units hands on to the next one, each rank to whom it reaches."""
        ends = zip(self.columns, accumulate(counts), pairwise(self.stages), strict=False)
        return tuple(here.handing_seconds(there, column[end - 1].output_bytes) for column, end, (here, there) in ends)


def costs_of(stages: Sequence[StageSeconds], messages: Sequence[float], kept: Sequence[int]) -> Costs:
    """The costs of stages with these seconds, as a table is simulated."""
    forward, backward = zip(*(stage.both for stage in stages), strict=True)
    later = tuple(stage.weight or stage.backward / 2 for stage in stages)
    return Costs(forward, backward, tuple(messages), tuple(kept), later)


class MissingTimings(LookupError):
    """A file of timings has none of a model's units, which are not to be timed, nor assumed, instead."""


class OutOfTime(Exception):
    """The time of a `Profiler` is over."""


@dataclass(frozen=True)
class Profiler:
    """Finds the costs of units at sites: counts by dry runs, and seconds timed here, from a file, or by rates.

    What was found is kept in the `store`; timings of one that was loaded from a file are not replaced by others.

    Args:
        site_seconds: for the timing of each site.
        gflops: the assumed speed of a rank, for costs by FLOPs alone.
        machine: another one than this. Its links count, and if it has `flops_per_second`, nothing is timed.
        small: large sites follow from few small ones, so that thousands of plans can be looked at.
        until: by `time.monotonic`, when to raise `OutOfTime` rather than to count or time what is not known.
    """

    store: Store = field(default_factory=Store)
    time: TimeUnits = time_units
    site_seconds: float = SITE_SECONDS
    gflops: float = GFLOPS
    machine: Machine | None = None
    small: bool = False
    until: float = math.inf

    @classmethod
    def of_user(cls, **options: Any) -> "Profiler":
        return cls(Store(cache_folder()), **options)

    def costs(self, cuttable: Units, site: Site, device: torch.device) -> Column:
        """The costs of all units on a rank at a site."""
        rates, there = None, self.machine
        if there is not None and there.flops_per_second is not None:
            rates = there.flops_per_second, there.bytes_per_second, there.operator_seconds
        key = (cuttable, site, device, self.small, rates)
        if key not in self.store.found:
            if rates is not None:
                column = tuple(by_rates(unit, *rates) for unit in self.counts(cuttable, site))
            else:
                fit = self._fit(cuttable, site._replace(norms_bring_halos=device.type == "cuda"))
                bases = [base._replace(splits=site.splits) for base in (fit.bases if self.small else (site,))]
                timed = [self._timed(cuttable, base, device, self.site_seconds / len(bases)) for base in bases]
                rows = np.asarray(extrapolate(bases, timed, site)).tolist()
                column = tuple(
                    unit._replace(**dict(zip(SECONDS, row, strict=True)))
                    for unit, row in zip(fit.at(site), rows, strict=True)
                )
            self.store.found[key] = column
        return self.store.found[key]

    def counts(self, cuttable: Units, site: Site, exact: bool = False) -> Column:
        """The costs without seconds. Unless they shall be `exact`, they follow from few samples, or small sites.

        Raises:
            RuntimeError: an operator has no rule; `exact` then has an even part of what one rank would take.
        """
        if not exact:
            key = (cuttable, site, self.small)
            known: Column = self.store.found.get(key) or self._fit(cuttable, site).at(site)
            self.store.found[key] = known
            return known
        try:
            return self._counted(cuttable, site)
        except RuntimeError:
            whole, parts = on_one_rank(site.image), site.shape.batch * math.prod(site.shape.space)
            return tuple(unit.part(parts) for unit in self._counted(cuttable, whole))

    def _fit(self, cuttable: Units, site: Site) -> Fit:
        """By the first base sites that the model takes. Raises what it raises at the site itself if it takes none."""
        problem: Exception | None = None
        for bases in base_choices(site._replace(splits=False), self.small):
            key = (cuttable, bases)
            if key not in self.store.found:
                try:
                    self.store.found[key] = Fit(bases, [self._counted(cuttable, base) for base in bases])
                except (RuntimeError, ValueError, AssertionError) as error:
                    self.store.found[key] = error
            found = self.store.found[key]
            if isinstance(found, Fit):
                return found
            problem = found
        assert problem is not None
        raise problem

    def _counted(self, cuttable: Units, site: Site) -> Column:
        site = site._replace(splits=False)
        facts = {"what": ["counts of units", *UnitCosts._fields], **_facts(cuttable, site), **versions()}
        known = self.store.get(facts)
        if known is None:
            self._require_time()
            found = count_units(cuttable, site)
            self.store.put(facts, found)
            return found
        column = (UnitCosts(*unit) for unit in known)
        return tuple(unit._replace(there=traffic_of(unit.there), back=traffic_of(unit.back)) for unit in column)

    def _timed(self, cuttable: Units, site: Site, device: torch.device, budget_seconds: float) -> Seconds:
        facts = {"what": ["seconds of units", *SECONDS], **_facts(cuttable, site), **machine(device), **versions()}
        known = self.store.get(facts)
        if known is None:
            self._require_time()
            if self.store.path is not None:
                raise MissingTimings(
                    f"--timings {self.store.path} has no timings of this model on {grid_name(site.shape.space)} tiles: "
                    "make the file by --time-only with the same model and options, and at least as many --ranks"
                )
            known = np.asarray(self.time(cuttable, site, device, budget_seconds)).tolist()
            self.store.put(facts, known)
        return np.array(known)

    def _require_time(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTime

    def source(self, device: torch.device) -> str:
        """Where the seconds of units come from, in words."""
        if self.store.path is not None:
            return f"units timed on {self.store.measured_on}, by {self.store.path.name}"
        if self.machine is not None and self.machine.flops_per_second is not None:
            return f"by the rates of {self.machine.name}"
        threads = torch.get_num_threads()
        on = "a GPU" if device.type == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
        return f"units timed on {'small' if self.small else 'their'} tiles, on {on} here"

    def machine_of(self, num_ranks: int) -> Machine:
        """The other machine, or this one, with the link that the last job measured.

        The link is assumed if there was none, or where `link_of` assumes it.
        """
        if self.machine is not None:
            return self.machine
        known = None if num_ranks > cores() else self.store.get(LINK)
        return ASSUMED.machine(num_ranks) if known is None else Link(*known).machine(num_ranks, "as in the last job")

    def link_of(self, comm: Communicator, device: torch.device) -> Link:
        """Measured between the ranks once, and remembered, so that the same job is cut alike again. Collective.

        With more ranks than cores, where a message waits for a core, it is assumed.
        """
        if comm.all_reduce(torch.tensor([comm.node.oversubscribed]).int(), "max"):
            return ASSUMED
        facts = {**LINK, "device": device.type, "ranks": comm.size, "on one machine": comm.node.local_size}
        known = comm.broadcast_object(self.store.get(facts) if comm.rank == 0 else None)
        if known is not None:
            return Link(*known)
        link = measure_link(comm, device)
        if comm.rank == 0 and comm.size > 1:
            self.store.put(facts, link)
            self.store.put(LINK, link)
        return link


def _facts(cuttable: Units, site: Site) -> dict[str, Any]:
    return {
        "model": fingerprint(cuttable),
        "image": list(site.image),
        "grid": list(site.shape),
        "modes": [site.tracks_batch, site.plain, site.splits, site.norms_bring_halos],
        "cuts": [repr(site.cutting), *site.arrangement],
    }


def fingerprint(cuttable: Units) -> str:
    """A word that differs for models that compute differently, as far as their modules tell."""
    model = cuttable.model
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict(keep_vars=True).items()]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    text = repr((repr(model), cuttable.names, tensors, frozen))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def by_rates(
    unit: UnitCosts, flops_per_second: float, bytes_per_second: float = math.inf, operator_seconds: float = 0.0
) -> UnitCosts:
    """The unit with seconds of its FLOPs, its bytes and the start of its operators, one after the other."""
    flops = unit.flops / flops_per_second
    forward = flops + unit.touched_bytes / bytes_per_second + unit.operators * operator_seconds
    # Gradients of inputs take as many FLOPs as the forward pass, and those of weights that are trained as many again.
    times = unit.backward_flops / unit.flops if unit.flops else BACKWARD
    weights = flops * min(1.0, max(0.0, times - 1))
    return unit._replace(forward_seconds=forward, backward_seconds=times * forward, weight_seconds=weights)


def stages_on(machine: Machine, plan: Plan) -> tuple[StageTraffic, ...]:
    """The stages of a plan, where they are on a machine."""
    return tuple(StageTraffic(machine, plan, stage) for stage in range(plan.num_stages))


def costs_by_site(
    cuttable: Units, plan: Plan, sites: Sequence[Site], device: torch.device, profiler: Profiler
) -> StageCosts:
    """Costs of units, each on the tiles of its stage. Raises RuntimeError and the like."""
    there = profiler.machine_of(plan.num_ranks)
    columns = tuple(profiler.costs(cuttable, site, device) for site in sites)
    links = f"the links of {there.name}{f': {there.source}' if there.source else ''}"
    overhead = PYTHON if device.type == "cpu" else NO_OVERHEAD
    return StageCosts(columns, stages_on(there, plan), f"{profiler.source(device)}; {links}", True, overhead)


def costs_by_flops(cuttable: Units, plan: Plan, image: tuple[int, ...], profiler: Profiler) -> StageCosts:
    """Costs if only FLOPs take time, of which each rank of a stage has an even part, the same everywhere.

    Another machine has rates of its own, also of bytes and operators, if it has any, and its links for what follows.
    """
    there = profiler.machine
    rates: tuple[float, ...] = (profiler.gflops * 1e9,)
    if there is not None and there.flops_per_second is not None:
        rates = there.flops_per_second, there.bytes_per_second, there.operator_seconds
    frozen = not all(p.requires_grad for p in cuttable.model.parameters())
    whole = count_units(cuttable, on_one_rank(image), backward=frozen)
    columns = tuple(
        tuple(by_rates(unit.part(plan.shape(stage).size), *rates) for unit in whole) for stage in range(plan.num_stages)
    )
    left_out = "messages" if there is None else "halos"
    there = there or Machine.of_link(0.0, math.inf, plan.num_ranks, message_seconds=0.0)
    backward = "backward without gradients of frozen weights" if frozen else "a backward as two forwards"
    source = f"{rates[0] / 1e9:g} GFLOP/s a rank, {backward}; {left_out} take no time"
    return StageCosts(columns, stages_on(there, plan), source, timed=False)


def costs_for(
    cuttable: Units, plan: Plan, sites: Sequence[Site], balance: str, device: torch.device, profiler: Profiler
) -> StageCosts:
    """Costs of units on each stage, at its site: by "auto" timed, or by rates, where that can be done; else by FLOPs.

    Raises:
        ValueError: the model cannot take the images, or its parts what a trace gives them.
        MissingTimings: the file of timings is of another model.
    """
    if balance in TIMED:
        # It may look at values, or take no smaller images; what else is wrong with it is found where it is counted.
        with suppress(RuntimeError, AssertionError, ValueError, MemoryError, *OF_PYTHON):
            return costs_by_site(cuttable, plan, sites, device, profiler)
    try:
        return costs_by_flops(cuttable, plan, sites[0].image, profiler)
    except (RuntimeError, AssertionError, *OF_PYTHON) as error:
        reason = unfit(cuttable.model, sites[0].image)
        if reason is None and isinstance(error, OF_PYTHON):
            reason = f"{FAILING}: {reason_of(error)}; {UNSEEN}"
        if reason is None:
            raise
        raise ValueError(reason) from error


# Seconds of units as all ranks take them together: each stage's on its own ranks and tiles, all stages at once.
#
# That is a rehearsal of the first steps, with throw-away copies: random states and the model stay as they are, and what
# is trained then is trained as if it had been cut so from the beginning.


def measured_costs(
    cuttable: Units,
    plan: Plan,
    comm: Communicator,
    image: tuple[int, ...],
    device: torch.device,
    clock: Clock | None = None,
    styles: Styles | None = None,
) -> StageCosts:
    """Costs of units on each stage, with the mean of the times of its ranks. Collective; the same on all ranks."""
    oversubscribed = bool(comm.all_reduce(torch.tensor([comm.node.oversubscribed]).int(), "max"))
    link = ASSUMED if oversubscribed else measure_link(comm, device)  # with too few cores a message waits for one
    if clock is None:
        alone = torch.get_num_threads() == 1 and device.type == "cpu"
        clock = comm.node.work_seconds if alone else clock_on(device)
    found = {}
    with comm.together((ValueError, NotImplementedError)):  # there may be no rule for what the model calls
        for stage, site in enumerate(sites_of(cuttable, plan, image, styles)):
            ranks = plan.partners(comm.rank, 0, stage)
            if comm.rank in ranks:
                seconds = time_units(cuttable, site, device, SITE_SECONDS, clock, comm.subset(ranks))
                found[stage] = count_units(cuttable, site), seconds
    of_ranks = comm.all_gather_object(found)
    columns = []
    for stage in range(plan.num_stages):
        counted, timed = zip(*(known[stage] for known in of_ranks if stage in known), strict=True)
        rows = zip(counted[0], np.mean(timed, axis=0).tolist(), strict=True)
        columns.append(tuple(u._replace(there=(), back=(), **dict(zip(SECONDS, row, strict=True))) for u, row in rows))
    source = f"units timed on their ranks before the first step; {link}"
    return StageCosts(tuple(columns), stages_on(link.machine(plan.num_ranks), plan), source, True)


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


def recomputed(column: Column, groups: Sequence[Group], image_bytes: int) -> Column:
    """The costs of units on a rank whose part of the images has so many bytes.

    The forward pass of a group comes again among its backward pass.
    """
    found = list(column)
    for first, end in groups:
        given = column[first - 1].output_bytes if first else image_bytes
        again = sum(unit.kept_bytes for unit in column[first:end])
        for i in range(first, end):
            unit = column[i]
            found[i] = unit._replace(
                kept_bytes=given if i == first else 0,
                unsaved_output_bytes=unit.output_bytes,
                backward_bytes=unit.backward_bytes + (again if i == end - 1 else 0),
                back=(*unit.there, *unit.back),
                backward_seconds=unit.backward_seconds + unit.forward_seconds,
                weight_seconds=0.0,  # what is recomputed has its gradients at once
            )
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
