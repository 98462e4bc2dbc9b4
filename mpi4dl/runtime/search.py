"""Which plan trains most images a second on so many ranks, of those that fit into their memory: all are simulated.

    candidates   tiles x stages x schedules x GEMS x replicas x microbatches, but for those that others make pointless
    outlook      a plan's atoms, timed once for each shape of tile -> its cut -> its table, simulated -> its memory
    search       the best, by images a second; each by the lowest ZeRO stage with which it fits

What a step takes beside its table, summing gradients and the optimizer's step, is estimated from bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import torch
from torch import nn

from mpi4dl.parallel.costs.memory import AtomBytes, bytes_of_stages
from mpi4dl.parallel.costs.prices import Clockwork, Prices, prices_for
from mpi4dl.parallel.costs.timing import Site
from mpi4dl.parallel.pipeline.balance import partition
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import ZERO_STAGES, Plan, grid_name
from mpi4dl.parallel.replicas.buckets import BUCKET_BYTES
from mpi4dl.parallel.tables.simulator import Costs, simulate
from mpi4dl.runtime.anatomy import Allocator, BuildOptimizer, StateBytes, count_state, share

MOST_STAGES = 8
MOST_MICROBATCHES = 16
CHUNKS = 2
COUNTED_SAMPLES = 2  # batch norm of a single value is refused
TIMING_SECONDS = 40.0  # for all shapes of tiles together
LEAST_SECONDS = 0.4  # for one of them
BYTE_SECONDS = 1 / 8e9  # of memory that the optimizer reads or writes


def candidates(num_ranks: int, num_atoms: int, image: Sequence[int]) -> Iterator[Plan]:
    """The plans for so many ranks and batches of this shape, (N, C, H, W).

    Left out is what is no faster than another one in the same memory (gpipe, and layer but for one microbatch, beside
    1f1b), and uneven numbers of tiles other than many first and few last, all of one shape each.
    """
    batch_size, _, *size = image
    for data in _divisors(num_ranks):
        for places in _places(num_ranks // data, min(num_atoms, MOST_STAGES), len(size)):
            for microbatches in (m for m in map(lambda e: 2**e, range(10)) if m <= min(batch_size, MOST_MICROBATCHES)):
                for options in _schedules(len(places), microbatches, num_atoms):
                    with suppress(ValueError):
                        plan = Plan(places, data=data, microbatches=microbatches, **options)  # type: ignore[arg-type]
                        if batch_size % plan.num_microbatches == 0 and not plan.problem(num_ranks, size, batch_size):
                            yield plan


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _places(num_ranks: int, most_stages: int, dims: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Grids of the stages of one replica: the first few on many tiles, the others on fewer."""
    for stages in range(1, min(num_ranks, most_stages) + 1):
        seen = set()
        for first in range(1, stages + 1):
            for few in range(1, num_ranks // stages + 1):
                many, rest = divmod(num_ranks - few * (stages - first), first)
                numbers = (many,) * first + (few,) * (stages - first)
                if rest == 0 and many >= few and numbers not in seen:
                    seen.add(numbers)
                    yield tuple(_grid(number, dims) for number in numbers)


def _grid(number: int, dims: int) -> tuple[int, ...]:
    """So many tiles, as square as can be; of volumes the depth stays whole, of sequences there is but one way."""
    if dims == 1:
        return (number,)
    rows = max(n for n in _divisors(number) if n * n <= number)
    return (*(1,) * (dims - 2), rows, number // rows)


def _schedules(stages: int, microbatches: int, num_atoms: int) -> Iterator[dict[str, object]]:
    yield {}
    if stages > 1:
        yield {"bidirectional": 1}
    if stages > 1 and microbatches > 1:
        yield {"schedule": "zero-bubble"}
        if CHUNKS * stages <= num_atoms:
            yield {"schedule": "interleaved", "chunks": CHUNKS}


class Outlook(NamedTuple):
    """What training by a plan would come to: `num_bytes` are those of the rank that needs most."""

    plan: Plan
    images_per_second: float
    num_bytes: int
    timed: bool

    @property
    def flags(self) -> list[str]:
        """The flags of a training by this plan."""
        plan = self.plan
        grids = [grid_name(tiles) for tiles in plan.tiles]
        flags = {
            "--stages": str(plan.num_stages),
            "--tiles": grids[0] if len(set(grids)) == 1 else ",".join(grids),
            "--data": str(plan.data),
            "--microbatches": str(plan.microbatches),
            "--schedule": plan.schedule,
            "--bidirectional": str(plan.bidirectional),
            "--chunks": str(plan.chunks),
            "--zero": str(plan.zero),
        }
        usual = {"--schedule": "1f1b", "--bidirectional": "0", "--zero": "0"}
        return [word for name, value in flags.items() if value != usual.get(name, "1") for word in (name, value)]


@dataclass
class Forecaster:
    """Foresees plans for one model and batches of one shape; what is found for a shape of tile is used again."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    clockwork: Clockwork
    device: torch.device
    optimizer: BuildOptimizer
    allocator: Allocator
    low_precision: torch.dtype | None = None
    _bytes: dict[Site, tuple[AtomBytes, ...]] = field(default_factory=dict)
    _prices: dict[tuple[Site, ...], Prices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cuttable = Cuttable(outline(self.build).train())
        lowered = Cuttable(outline(self.build).train())
        self._states = [
            count_state(lowered.atom(i), self.optimizer, self.low_precision) for i in range(len(self.cuttable))
        ]

    def sites(self, plan: Plan) -> tuple[Site, ...]:
        microbatch = (self.image[0] // plan.num_microbatches, *self.image[1:])
        return tuple(Site.of(plan, stage, microbatch) for stage in range(plan.num_stages))

    def outlook(self, plan: Plan, most_bytes: float) -> Outlook:
        """Under the lowest ZeRO stage with which it fits, or else the one that needs least."""
        sites = self.sites(plan)
        if sites not in self._prices:
            self._prices[sites] = prices_for(self.cuttable, plan, sites[0].image, "auto", self.device, self.clockwork)
        prices = self._prices[sites]
        counts = partition(prices.matrix)
        sizes = [site.shape.size for site in sites]
        memory = bytes_of_stages(counts, [self._bytes_at(site) for site in sites])
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        states = [_together(self._states[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        handed = [self._bytes_at(site)[end - 1].handed for site, end in zip(sites, ends, strict=True)]
        messages = (
            prices.link.seconds(1, num_bytes * pair[0] / min(pair))
            for num_bytes, pair in zip(handed, pairwise(sizes), strict=False)
        )
        costs = Costs(*prices.of_stages(counts), tuple(messages), tuple(stage.kept for stage in memory))
        found = simulate(plan.table(), plan.placement, costs)
        fitting = []
        for zero in ZERO_STAGES:
            chosen = replace(plan, zero=zero)
            needed = max(
                self._needed(chosen, rank, states, kept + max(memory[stage].working for _, stage in plan.held_by(rank)))
                for rank, kept in enumerate(map(int, found.peak_bytes))
            )
            seconds = found.makespan_seconds + max(
                beside_seconds(chosen, stage, state, prices.link.byte_seconds) for stage, state in enumerate(states)
            )
            fitting.append(Outlook(chosen, self.image[0] / seconds, needed, prices.timed))
            if needed <= most_bytes or len(plan.holders(0)) == 1 == max(
                len(plan.holders(s)) for s in range(len(sizes))
            ):
                break
        return next((each for each in fitting if each.num_bytes <= most_bytes), min(fitting, key=lambda o: o.num_bytes))

    def _needed(self, plan: Plan, rank: int, states: Sequence[StateBytes], activations: int) -> int:
        beside = self.allocator.beside(activations, plan.num_microbatches)
        return share(plan, rank, states, activations).together + beside

    def _bytes_at(self, site: Site) -> tuple[AtomBytes, ...]:
        """Counted for a few samples on each way, of which a microbatch is a multiple."""
        few = site._replace(image=(min(site.image[0], COUNTED_SAMPLES * site.shape.batch), *site.image[1:]))
        if few not in self._bytes:
            self._bytes[few] = self.clockwork.bytes(self.cuttable, few)
        times = site.image[0] / few.image[0]
        return tuple(AtomBytes(*(ceil(times * number) for number in atom)) for atom in self._bytes[few])


def _together(atoms: Sequence[StateBytes]) -> StateBytes:
    """That of a stage of these atoms."""
    parameters, update, fixed, _ = (sum(each) for each in zip(*atoms, strict=True))
    largest = max(atom.bucket for atom in atoms)
    return StateBytes(parameters, update, fixed, min(parameters, max(largest, BUCKET_BYTES)))


def beside_seconds(plan: Plan, stage: int, state: StateBytes, byte_seconds: float) -> float:
    """What a step takes on a rank of a stage beside its table: gradients and parameters that travel, and the optimizer.

    Of n ranks each sends (n - 1) / n of all bytes in every reduce-scatter and every all-gather. ZeRO 2 sums gradients
    after each microbatch, and ZeRO 3 gathers parameters before each forward and backward too.
    """
    ranks, times = len(plan.holders(stage)), plan.num_microbatches
    zero, _ = plan.zero_at(stage)
    rounds = {0: 2, 1: 2, 2: times + 1, 3: 3 * times}[zero]
    travels = rounds * state.parameters * (ranks - 1) / ranks * byte_seconds
    touched = 3 * state.parameters + 2 * state.update
    return travels + touched / (ranks if zero else 1) * BYTE_SECONDS


class Ranking(NamedTuple):
    """The plans that fit, the best first, and how many were looked at."""

    best: tuple[Outlook, ...]
    num_plans: int
    num_too_large: int
    smallest: Outlook


def search(forecaster: Forecaster, plans: Iterable[Plan], most_bytes: float = float("inf")) -> Ranking:
    """All plans by images a second; of those that are equally fast, the one that needs less memory first."""
    asked = list(plans)
    shapes = {site for plan in asked for site in forecaster.sites(plan)}
    seconds = max(LEAST_SECONDS, TIMING_SECONDS / max(1, len(shapes)))
    forecaster.clockwork = replace(forecaster.clockwork, site_seconds=seconds)
    found = []
    for plan in asked:
        with suppress(ValueError, RuntimeError):  # a schedule, or batch norm, that cannot be
            found.append(forecaster.outlook(plan, most_bytes))
    if not found:
        raise ValueError("no plan is for so many ranks and such batches: raise --batch-size, or choose fewer --ranks")
    fitting = sorted(
        (each for each in found if each.num_bytes <= most_bytes), key=lambda o: (-o.images_per_second, o.num_bytes)
    )
    return Ranking(tuple(fitting), len(found), len(found) - len(fitting), min(found, key=lambda o: o.num_bytes))
