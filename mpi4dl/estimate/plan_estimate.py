"""The estimate of a training by a plan, with as few memory savings as fit: speed, and bytes of a rank.

a plan's atoms, timed once for each shape of tile -> its cut -> its table, simulated -> its memory

    plain        as it is          the first of these that fits, each by the lowest ZeRO stage with which it does
    recompute    blocks keep their inputs
    streamed     the first stage visits tiles, as few as fit

The time besides the table, for sums of gradients and the optimizer's step, is estimated from bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import nn

from mpi4dl._wording import counted
from mpi4dl.estimate.memory import Allocator, BuildOptimizer, StageState, StateBytes, activations_of, count_state, share
from mpi4dl.geometry import ceil_div
from mpi4dl.options.build import options_of_plan
from mpi4dl.options.config import Config, parse
from mpi4dl.options.declare import flags_for, options_of, without_flags
from mpi4dl.parallel.costs.cost_model import (
    Profiler,
    StageCosts,
    bytes_recomputed,
    groups_in,
    groups_of,
    image_bytes,
    prices_for,
    seconds_recomputed,
)
from mpi4dl.parallel.costs.memory import AtomBytes, StageBytes, bytes_of_stages
from mpi4dl.parallel.costs.timing import Site, planned_cuts, sites_of
from mpi4dl.parallel.inputs import of_tokens, shape_only
from mpi4dl.parallel.pipeline.balance import count_flops, partition
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import ZERO_STAGES, Plan, grid_name
from mpi4dl.parallel.streaming.leading_part import StreamOptions, choose
from mpi4dl.parallel.streaming.margins import CannotStream
from mpi4dl.parallel.streaming.memory_limit import StreamNeeds, Visiting, Wanted, choose_visits, needs_of
from mpi4dl.parallel.tables.simulator import Costs, simulate
from mpi4dl.parallel.tensor.styles import Degrees, Styles

COUNTED_SAMPLES = 2  # batch norm of a single value is refused
MOST_TILES = 6  # along an axis, of a part of an image that is looked at instead of the whole
BYTE_SECONDS = 1 / 8e9  # of memory that the optimizer reads or writes


class PlanEstimate(NamedTuple):
    """The estimate of a training by a plan: `num_bytes` are those of the rank that needs most.

    To save memory, blocks are computed again, or the first stage is streamed.
    """

    plan: Plan
    samples_per_second: float
    num_bytes: int
    timed: bool
    recompute: bool = False
    stream: StreamOptions | None = None

    def __str__(self) -> str:
        found = [self.plan.describe(), *["recompute"] * self.recompute]
        if self.stream is not None:
            found.append(f"stream {grid_name(self.stream.counts)} in {counted(self.stream.segments, 'segment')}")
        return ", ".join(found)

    def options(self, config: Config) -> dict[str, Any]:
        """The values of all options that this choice decides, for a command whose other options are those of `config`.

        A balance by hand is for one number of stages, and gives way to the default.
        """
        by_hand = isinstance(config.parallel.balance, tuple)
        stream = self.stream
        return {
            **options_of_plan(self.plan, config.training.accumulate),
            "stream": None if stream is None else stream.counts,
            "stream_segments": None if stream is None else stream.segments,
            "stream_until": None if stream is None else stream.until,
            "memory_limit": None,
            "recompute": self.recompute,
            "balance": Config().parallel.balance if by_hand else config.parallel.balance,
        }

    def flags(self, given: Sequence[str] = ()) -> list[str]:
        """The flags of a training by this choice. Of `given`, flags of the command, those stay that it leaves open."""
        decided = self.options(Config())
        others = without_flags(Config, given, (name for name in decided if name != "balance"))
        config = parse(others)
        return [*others, *flags_for(config, self.options(config))]

    @property
    def saving(self) -> list[str]:
        """The flags of what saves memory beside the plan."""
        usual, plan = Config(), Plan.options()
        return flags_for(usual, {name: each for name, each in self.options(usual).items() if name not in plan})


def plan_flags(plan: Plan) -> dict[str, str]:
    """The text of every flag by which the training command takes this plan; of switches those that are on."""
    options = options_of(Config)
    words = [options[name].words(value) for name, value in options_of_plan(plan).items() if value is not False]
    return {word[0]: "".join(word[1:]) for word in words}


class _Way(NamedTuple):
    """Memory of stages and time of units, with or without a saving of memory."""

    memory: tuple[StageBytes, ...]
    prices: StageCosts
    recompute: bool = False
    stream: StreamOptions | None = None


@dataclass
class Estimator:
    """Foresees plans for one model and batches of one shape; what is found for a shape of tile is used again."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    clockwork: Profiler
    device: torch.device
    optimizer: BuildOptimizer
    allocator: Allocator
    low_precision: torch.dtype | None = None
    averaged: bool = False
    wanted: Wanted = field(default_factory=Wanted)
    styles: Styles | None = None
    _states: dict[tuple[int, int, Degrees], StageState] = field(default_factory=dict)
    _bytes: dict[Site, tuple[AtomBytes, ...]] = field(default_factory=dict)
    _prices: dict[tuple[Site, ...], StageCosts] = field(default_factory=dict)
    _visits: dict[Any, Visiting] = field(default_factory=dict)
    _needs: dict[Any, StreamNeeds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cuttable = Cuttable(outline(self.build).train(), image=self.image)
        self._groups = groups_of(self.cuttable)
        self._lowered = Cuttable(outline(self.build).train(), image=self.image)

    def sites(self, plan: Plan) -> tuple[Site, ...]:
        microbatch = (self.image[0] // plan.num_microbatches, *self.image[1:])
        return sites_of(self.cuttable, plan, microbatch, self.styles)

    def outlook(self, plan: Plan, most_bytes: float) -> PlanEstimate:
        """With the first that fits of these, or else what needs least: as it is, blocks recomputed, streamed.

        Each under the lowest ZeRO stage with which it fits, the plan's own or a higher one.
        """
        prices = self.prices(plan)
        counts = partition(prices.matrix)
        self.cuttable.stage(counts, 0)  # raises ValueError where two stages would need the same parameter
        found: list[PlanEstimate] = []
        for way in self._ways(plan, counts, prices, most_bytes):
            found += self._by_zero(plan, counts, way, most_bytes)
            if found[-1].num_bytes <= most_bytes:
                return found[-1]
        return min(found, key=lambda outlook: outlook.num_bytes)

    def prices(self, plan: Plan) -> StageCosts:
        sites = self.sites(plan)
        if sites not in self._prices:
            self._prices[sites] = prices_for(
                self.cuttable, plan, sites[0].image, "auto", self.device, self.clockwork, styles=self.styles
            )
        return self._prices[sites]

    def _ways(self, plan: Plan, counts: Sequence[int], prices: StageCosts, most_bytes: float) -> Iterator["_Way"]:
        sites = self.sites(plan)
        columns = [self._bytes_at(site) for site in sites]
        memory = bytes_of_stages(counts, columns)
        yield _Way(memory, prices)
        groups = self._groups if plan.num_stages == 1 else groups_in(self.cuttable, counts)
        if groups and most_bytes < float("inf"):
            again = [
                bytes_recomputed(column, groups, image_bytes(self.cuttable, site))
                for site, column in zip(sites, columns, strict=True)
            ]
            slower = tuple(seconds_recomputed(column, groups) for column in prices.columns)
            yield _Way(bytes_of_stages(counts, again), replace(prices, columns=slower), recompute=True)
        streams = plan.schedule == "1f1b" and not plan.bidirectional and plan.tensor == 1
        if most_bytes < float("inf") and streams and not of_tokens(self.image):
            with suppress(CannotStream):
                options, needs, _ = self.visits(plan, counts, most_bytes)
                streamed = (needs.stage(columns[0], counts[0]), *memory[1:])
                yield _Way(streamed, needs.prices(prices, self._flops(sites[0].image)), stream=options)

    def _by_zero(self, plan: Plan, counts: Sequence[int], way: "_Way", most_bytes: float) -> Iterator[PlanEstimate]:
        states = self._states_of(plan, counts)
        sites = self.sites(plan)
        sizes = [site.shape.size for site in sites]
        ends = list(accumulate(counts))
        handed = [self._bytes_at(site)[end - 1].handed for site, end in zip(sites, ends, strict=True)]
        link = way.prices.link
        messages = (
            link.seconds(1, num_bytes * pair[0] / min(pair))
            for num_bytes, pair in zip(handed, pairwise(sizes), strict=False)
        )
        costs = Costs(*way.prices.of_stages(counts), tuple(messages), tuple(stage.kept for stage in way.memory))
        found = simulate(plan.table(), plan.placement, costs)
        shared = any(len(plan.holders(stage)) > 1 for stage in range(len(sizes)))
        for zero in ZERO_STAGES[plan.zero :] if shared else ZERO_STAGES[:1]:
            chosen = replace(plan, zero=zero)
            needed = self._needed(chosen, states, way.memory, found.peak_bytes, way.stream is not None)
            seconds = found.makespan_seconds + max(
                sum(beside_seconds(chosen, stage, each, link.byte_seconds) for each in state)
                for stage, state in enumerate(states)
            )
            speed = self.image[0] / seconds
            yield PlanEstimate(chosen, speed, needed, way.prices.timed, way.recompute, way.stream)
            if needed <= most_bytes:
                return

    def visits(self, plan: Plan, counts: Sequence[int], most_bytes: float, any_zero: bool = True) -> Visiting:
        """How the first stage is streamed within so many bytes; `any_zero`: by any ZeRO stage. Raises CannotStream."""
        sites = self.sites(plan)
        key = (replace(plan, zero=0), plan.zero * (not any_zero), tuple(counts), most_bytes)
        if key not in self._visits:
            states, columns = self._states_of(plan, counts), [self._bytes_at(site) for site in sites]
            memory = bytes_of_stages(counts, columns)
            plans = [replace(plan, zero=zero) for zero in ZERO_STAGES] if any_zero else [plan]

            def bytes_of(needs: StreamNeeds) -> int:
                streamed = (needs.stage(columns[0], counts[0]), *memory[1:])
                nought = (0.0,) * len(sites)
                costs = Costs(nought, nought, nought[1:], tuple(stage.kept for stage in streamed))
                peaks = simulate(plan.table(), plan.placement, costs).peak_bytes
                return min(self._needed(each, states, streamed, peaks, True) for each in plans)

            _, _, *size = self.image
            sides = [ceil_div(pixels, parts) for pixels, parts in zip(size, plan.shape(0).space, strict=True)]
            needs_for = partial(self._needs_for, sites[0], counts[0])
            self._visits[key] = choose_visits(sides, self.wanted, needs_for, bytes_of, most_bytes)
        return self._visits[key]

    def _needs_for(self, site: Site, num_atoms: int, options: StreamOptions) -> StreamNeeds:
        """Found for one image on each way, and for a part of it with tiles of the same size, but few of them."""
        key, few = (site.shape, num_atoms, options), site.shape.batch
        space, (_, channels, *size) = site.shape.space, site.image
        counts = tuple(min(n, max(1, MOST_TILES // ranks)) for n, ranks in zip(options.counts, space, strict=True))
        if key not in self._needs:
            smaller = (
                side if n == all_of_them else ceil_div(side, ranks * all_of_them) * ranks * n
                for side, ranks, n, all_of_them in zip(size, space, counts, options.counts, strict=True)
            )
            image = (few, channels, *smaller)
            opening = choose(self.cuttable, num_atoms, replace(options, counts=counts), site.shape, image)
            self._needs[key] = needs_of(opening, self.cuttable.model, site.shape, image)
        found = self._needs[key].times(ceil_div(site.image[0], few), prod(options.counts) / prod(counts))
        return replace(found, options=options)

    def _needed(
        self,
        plan: Plan,
        states: Sequence[StageState],
        memory: Sequence[StageBytes],
        peaks: Sequence[float],
        streaming: bool,
    ) -> int:
        """The bytes of the rank that needs most, if ranks keep at most so many bytes of activations."""
        found = []
        for rank, activations in enumerate(activations_of(plan, peaks, memory)):
            largest = max(memory[stage].largest for _, stage in plan.held_by(rank))
            beside = self.allocator.beside(activations, plan.num_microbatches, streaming, largest)
            found.append(share(plan, rank, states, activations).together + beside)
        return max(found)

    def _states_of(self, plan: Plan, counts: Sequence[int]) -> list[StageState]:
        cuts = planned_cuts(self.cuttable.model, plan, self.styles)
        found = []
        for start, end in pairwise(accumulate(counts, initial=0)):
            key = (start, end, plan.degrees)
            if key not in self._states:
                atoms = [self._lowered.atom(i) for i in range(start, end)]
                how = (self.low_precision, cuts, plan.degrees, self.averaged)
                self._states[key] = count_state(atoms, self.optimizer, *how)
            found.append(self._states[key])
        return found

    def _flops(self, image: tuple[int, ...]) -> list[float]:
        return count_flops(self.cuttable, shape_only(self.cuttable.model, image))

    def _bytes_at(self, site: Site) -> tuple[AtomBytes, ...]:
        """Counted for a few samples on each way, of which a microbatch is a multiple."""
        few = site._replace(image=(min(site.image[0], COUNTED_SAMPLES * site.shape.batch), *site.image[1:]))
        if few not in self._bytes:
            self._bytes[few] = self.clockwork.bytes(self.cuttable, few)
        times = site.image[0] / few.image[0]
        return tuple(AtomBytes(*(ceil(times * number) for number in atom)) for atom in self._bytes[few])


def beside_seconds(plan: Plan, stage: int, state: StateBytes, byte_seconds: float) -> float:
    """The time of a step on a rank of a stage besides its table: messages of gradients and parameters, and the
    optimizer.

    Of n ranks each sends (n - 1) / n of all bytes in every reduce-scatter and every all-gather. ZeRO 2 sums gradients
    after each microbatch, and ZeRO 3 gathers parameters before each forward and backward too.
    """
    ranks, times = state.num_holders(plan, stage), plan.num_microbatches
    zero, _ = plan.zero_at(stage) if ranks > 1 else (0, 1)
    rounds = {0: 2, 1: 2, 2: times + 1, 3: 3 * times}[zero]
    travels = rounds * state.parameters * (ranks - 1) / ranks * byte_seconds
    touched = 3 * state.parameters + 2 * state.update
    return travels + touched / (ranks if zero else 1) * BYTE_SECONDS
