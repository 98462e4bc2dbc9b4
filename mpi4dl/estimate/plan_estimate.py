"""The estimate of a training by a plan, with as few memory savings as fit: speed, and bytes of a rank.

a plan's units, timed once for each shape of tile -> its cut -> its table, simulated -> its memory

    plain        as it is          the first of these that fits, each by the lowest ZeRO stage with which it does
    recompute    blocks keep their inputs
    streamed     the first stage streams tiles, as few as fit

Sums of gradients and the optimizer's step come behind the table (step_time).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from mpi4dl._wording import counted
from mpi4dl.estimate.memory import HEAP_KEPT, OF_TENSORS, Allocator, BuildOptimizer, PlanMemory, StageState, count_state
from mpi4dl.estimate.step_time import StepTime
from mpi4dl.geometry import ceil_div
from mpi4dl.options.build import flags_with, options_of_plan
from mpi4dl.options.sections.parallel import Parallel
from mpi4dl.parallel.costs.cost_model import (
    Group,
    Profiler,
    StageCosts,
    costs_for,
    groups_of,
    image_bytes,
    recomputed,
)
from mpi4dl.parallel.costs.meter import Column
from mpi4dl.parallel.costs.sites import Site, planned_cuts
from mpi4dl.parallel.costs.units import bytes_of_stages
from mpi4dl.parallel.cut import ChooseStream, partition
from mpi4dl.parallel.inputs import of_tokens
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.plan import ZERO_STAGES, Plan, grid_name
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, StreamOptions, choose_leading_part
from mpi4dl.parallel.streaming.margins import CannotStream
from mpi4dl.parallel.streaming.memory_limit import (
    ASSUMED_SPEEDS,
    Speeds,
    StreamChoice,
    StreamConstraints,
    StreamNeeds,
    choose_tiles,
    needs_of,
)
from mpi4dl.parallel.tensor.styles import Cutting, Styles


class Measurement(NamedTuple):
    """What a short training by a plan took, or why it failed."""

    samples_per_second: float
    num_bytes: int
    failure: str | None = None


class PlanEstimate(NamedTuple):
    """The estimate of a training by a plan: `num_bytes` are those of the rank that needs most.

    To save memory, blocks are computed again, or the first stage is streamed. Some plans are `measured` too.
    """

    plan: Plan
    samples_per_second: float
    num_bytes: int
    timed: bool
    recompute: bool = False
    stream: StreamOptions | None = None
    time: StepTime | None = None
    measured: Measurement | None = None

    def __str__(self) -> str:
        found = [self.plan.describe(), *["recompute"] * self.recompute]
        if self.stream is not None:
            number = self.stream.segments
            cut = "a segment for each norm" if number == EACH_NORM else counted(number, "segment")
            files = " in files" * self.stream.uses_files
            found.append(f"stream {grid_name(self.stream.counts)} in {cut}{files}")
        return ", ".join(found)

    def options(self, parallel: Parallel, accumulate: int) -> dict[str, Any]:
        """The values of all options that this choice decides, for a command that has these others.

        A balance by hand is for one number of stages, and gives way to the default.
        """
        by_hand = isinstance(parallel.balance, tuple)
        stream = self.stream
        return {
            **options_of_plan(self.plan, accumulate),
            "stream": None if stream is None else stream.counts,
            "stream_segments": None if stream is None else "norms" if stream.segments == EACH_NORM else stream.segments,
            "stream_until": None if stream is None else stream.until,
            "stream_norm": Parallel.stream_norm if stream is None else parallel.stream_norm,
            "stream_keep": "disk" if stream is not None and stream.uses_files else parallel.stream_keep,
            "memory_limit": None,
            "plan": None,
            "recompute": self.recompute,
            "balance": Parallel.balance if by_hand else parallel.balance,
        }

    def flags(self, given: Sequence[str] = ()) -> list[str]:
        """The flags of a training by this choice. Of `given`, flags of the command, those stay that it leaves open."""
        return flags_with(given, self.options)


class Step(NamedTuple):
    """A step of a plan whose stages have so many units: what it takes, with something to save memory or without.

    `needs` are those of streaming, where images are streamed.
    """

    counts: tuple[int, ...]
    costs: StageCosts
    memory: PlanMemory
    recompute: bool = False
    needs: StreamNeeds | None = None

    def time(self, plan: Plan) -> StepTime:
        """The time of the step, by this plan, which may have another ZeRO stage."""
        found, kept = self.costs, [stage.kept for stage in self.memory.stages]
        machine, states = found.stages[0].machine, self.memory.states
        seconds, messages = found.of_stages(self.counts), found.messages(self.counts)
        return StepTime(plan, machine, seconds, messages, kept, states, found.overhead)


class Uncut:
    """A model that cannot be traced, as one unit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return 1

    def unit(self, i: int) -> nn.Module:
        return self.model


def units_of(model: nn.Module, image: tuple[int, ...], cut: bool) -> Any:
    """A model's units, for samples of this shape; of one that cannot be traced one, if it need not be `cut`."""
    try:
        return Cuttable(model, image=image)
    except ValueError:
        if cut:
            raise
        return Uncut(model)


@dataclass
class Estimator:
    """Estimates plans for one model and batches of one shape; what is found for a shape of tile is used again.

    `cuttable` is a Cuttable, or Uncut, whose costs `profiler` finds. `optimizer` makes one for some parameters; without
    it nothing is counted of these and their state. Weights are of `low_precision`, if it is given, and `averaged`
    beside. `constraints` are the options of streaming that the user fixed, `styles` those in which parameters are cut.
    Without `streams` nothing is streamed to save memory.
    """

    cuttable: Any
    image: tuple[int, ...]
    profiler: Profiler
    device: torch.device
    optimizer: BuildOptimizer | None = None
    allocator: Allocator = HEAP_KEPT
    low_precision: torch.dtype | None = None
    averaged: bool = False
    constraints: StreamConstraints = field(default_factory=StreamConstraints)
    speeds: Speeds = ASSUMED_SPEEDS
    styles: Styles | None = None
    streams: bool = True
    _found: dict[Any, Any] = field(default_factory=dict)

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        """What was found before for the same key, or what `find` finds."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def sites(self, plan: Plan) -> tuple[Site, ...]:
        """The site of each stage."""
        image, cuts = plan.microbatch(self.image), self._cuts_of(plan)
        return tuple(Site.of(plan, stage, image, cuts) for stage in range(plan.num_stages))

    def _cuts_of(self, plan: Plan) -> Cutting:
        degrees = plan.degrees if plan.num_ranks > 1 else None
        return self._once(("cuts", degrees), lambda: planned_cuts(self.cuttable.model, plan, self.styles))

    def estimate(self, plan: Plan, most_bytes: float) -> PlanEstimate:
        """With the first that fits of these, or else what needs least: as it is, blocks recomputed, streamed.

        Each under the lowest ZeRO stage with which it fits, the plan's own or a higher one.
        """
        costs = self.costs(plan)
        counts = partition(costs.matrix)
        self._once(("shared", counts), lambda: self.cuttable.shared(counts))  # raises ValueError
        shared = any(len(plan.holders(stage)) > 1 for stage in range(plan.num_stages))
        smallest: tuple[int, Plan, Step] | None = None
        for recompute, needs in self.ways(plan, counts, most_bytes):
            step = self.step(plan, counts, costs, recompute, needs)
            for zero in ZERO_STAGES[plan.zero :] if shared else ZERO_STAGES[:1]:
                needed = max(step.memory.of_ranks(zero))
                if needed <= most_bytes:
                    return self._estimate(plan.with_zero(zero), needed, step)
                if smallest is None or needed < smallest[0]:
                    smallest = needed, plan.with_zero(zero), step
        assert smallest is not None
        needed, chosen, step = smallest
        return self._estimate(chosen, needed, step)

    def costs(self, plan: Plan) -> StageCosts:
        sites, found = self.sites(plan), self.profiler
        key = sites, plan.chunks, plan.num_ranks  # on which it depends where the ranks of each site are
        return self._once(key, lambda: costs_for(self.cuttable, plan, sites, "auto", self.device, found))

    def step(
        self,
        plan: Plan,
        counts: tuple[int, ...],
        costs: StageCosts,
        recompute: bool = False,
        needs: StreamNeeds | None = None,
        exact: bool = False,
    ) -> Step:
        """A step of stages that have so many units, of which `costs` are those without anything to save memory."""
        memory = self.memory(plan, counts, recompute, needs, exact)
        if recompute:
            costs = replace(costs, columns=self._recomputed(plan, counts, costs.columns))
        if needs is not None:
            costs = needs.costs(costs, plan.shape(0).size)
        return Step(counts, costs, memory, recompute, needs)

    def memory(
        self,
        plan: Plan,
        counts: tuple[int, ...],
        recompute: bool = False,
        needs: StreamNeeds | None = None,
        exact: bool = False,
    ) -> PlanMemory:
        """The memory of stages of that many units; `exact`: counted for all samples of a microbatch.

        Raises:
            RuntimeError: an operator has no rule; `exact` then has an even part of what one rank would take.
        """
        columns = self._counted(plan, exact)
        if recompute:
            columns = self._recomputed(plan, counts, columns)
        stages = bytes_of_stages(counts, columns)
        if needs is not None:
            stages = (needs.stage(columns[0], counts[0]), *stages[1:])
        return PlanMemory(plan, stages, self.states(plan, counts), self._allocator, needs is not None)

    def streaming(self, plan: Plan, counts: Sequence[int], stream: StreamOptions | ChooseStream) -> StreamNeeds:
        """Memory and time of streaming the first of these stages. Raises CannotStream."""
        options = stream(self.cuttable, counts) if callable(stream) else stream
        image, grid = plan.microbatch(self.image), plan.shape(0)

        def find() -> StreamNeeds:
            leading = choose_leading_part(self.cuttable, counts[0], options, grid, image)
            return needs_of(leading, self.cuttable.model, grid, image)

        return self._once((image, grid, counts[0], options), find)

    def ways(
        self, plan: Plan, counts: tuple[int, ...], most_bytes: float, any_zero: bool = True
    ) -> Iterator[tuple[bool, StreamNeeds | None]]:
        """What may save memory: nothing, blocks that are computed again, or a first stage that is streamed.

        With so many bytes at most; `any_zero` is that of `choose_tiles`.
        """
        yield False, None
        if most_bytes == float("inf"):
            return
        if self._groups(counts):
            yield True, None
        streams = plan.schedule == "1f1b" and not plan.bidirectional and not plan.cuts_parameters
        if streams and self.streams and not of_tokens(self.image):
            with suppress(CannotStream):
                yield False, self.choose_tiles(plan, counts, most_bytes, any_zero).needs

    def _estimate(self, plan: Plan, num_bytes: int, step: Step) -> PlanEstimate:
        stream = None if step.needs is None else step.needs.options
        time = step.time(plan)
        speed = self.image[0] / time.seconds
        return PlanEstimate(plan, speed, num_bytes, step.costs.timed, step.recompute, stream, time)

    def choose_tiles(self, plan: Plan, counts: Sequence[int], most_bytes: float, any_zero: bool = True) -> StreamChoice:
        """How the first stage is streamed within so many bytes; `any_zero`: by any ZeRO stage. Raises CannotStream."""
        states, columns = self.states(plan, counts), self._counted(plan)
        _, *others = bytes_of_stages(counts, columns)

        def bytes_of(needs: StreamNeeds) -> int:
            stages = (needs.stage(columns[0], counts[0]), *others)
            memory = PlanMemory(plan, stages, states, self._allocator, streams=True)
            return min(max(memory.of_ranks(zero)) for zero in (ZERO_STAGES if any_zero else (plan.zero,)))

        _, _, *size = self.image
        sides = [ceil_div(pixels, parts) for pixels, parts in zip(size, plan.shape(0).space, strict=True)]
        how = partial(self.streaming, plan, counts), bytes_of, most_bytes
        seconds_of = partial(self.speeds.of_step, num_ranks=plan.shape(0).size)
        key = replace(plan, zero=0), plan.zero * (not any_zero), tuple(counts), most_bytes
        return self._once(key, lambda: choose_tiles(sides, self.constraints, *how, seconds_of))

    def states(self, plan: Plan, counts: Sequence[int]) -> tuple[StageState, ...]:
        if self.optimizer is None:
            return ()
        build, how = self.optimizer, (self.low_precision, self._cuts_of(plan), plan.degrees, self.averaged)

        def state(start: int, end: int) -> StageState:
            return count_state([self.cuttable.unit(i) for i in range(start, end)], build, *how)

        bounds = pairwise(accumulate(counts, initial=0))
        return tuple(self._once((*each, plan.degrees), partial(state, *each)) for each in bounds)

    @property
    def _allocator(self) -> Allocator:
        machine = self.profiler.machine
        return OF_TENSORS if machine is not None and machine.has_gpus else self.allocator

    def _groups(self, counts: Sequence[int]) -> tuple[Group, ...]:
        """The units that recomputation runs again as a whole: blocks of a single stage, or each of several stages."""
        if len(counts) == 1:
            return self._once("blocks", lambda: groups_of(self.cuttable))
        return tuple(pairwise(accumulate(counts, initial=0)))

    def _recomputed(self, plan: Plan, counts: Sequence[int], columns: Sequence[Column]) -> tuple[Column, ...]:
        groups = self._groups(counts)
        both = zip(columns, self.sites(plan), strict=True)
        return tuple(recomputed(column, groups, image_bytes(self.cuttable, site)) for column, site in both)

    def _counted(self, plan: Plan, exact: bool = False) -> tuple[Column, ...]:
        """The counts of units on a rank of each stage."""
        return tuple(self.profiler.counts(self.cuttable, site, exact) for site in self.sites(plan))
