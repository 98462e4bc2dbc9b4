"""The memory of a rank by purpose: parameters, gradients, optimizer, activations, buffers; for every ZeRO stage.

For p parameters, of which N ranks hold copies, with k bytes each and s bytes of masters and optimizer state:

    ZeRO 0: k p + k p + s p      1: k p + k p + s p / N      2: k p + k p / N + s p / N      3: (k p + k p + s p) / N

(Rajbhandari et al., SC 2020), and to each what autograd keeps for the backward pass, which is counted. Of parameters
that are cut by features p is what a rank has of them, and N are the ranks that have the same part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from mpi4dl.comm.transport import LOW_PRECISION
from mpi4dl.engine.precision import lower_precision
from mpi4dl.options.optimizers import state_bytes
from mpi4dl.parallel.costs.units import StageBytes
from mpi4dl.parallel.plan import ZERO_STAGES, Plan
from mpi4dl.parallel.replicas.buckets import BUCKET_BYTES
from mpi4dl.parallel.replicas.gathering import KEPT
from mpi4dl.parallel.tables.simulator import peak_kept
from mpi4dl.parallel.tensor.cutting import largest_part
from mpi4dl.parallel.tensor.styles import Cutting, Degrees

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
UNDER_WAY = 2  # buckets whose gradients ranks are just adding up
AHEAD = 1  # bucket that is being gathered before it is needed


class StateBytes(NamedTuple):
    """The state of one stage on a rank during training, in bytes, of so many parameters.

    `update` are masters, their average, and the optimizer's state; `fixed` are frozen parameters and buffers, `bucket`
    is the largest of the flat buckets. It is that of what all holders of the stage have, or of what those have who have
    the largest part along these `axes`.
    """

    parameters: int
    update: int
    fixed: int
    bucket: int
    axes: tuple[str, ...] = ()
    tensors: int = 0

    def num_holders(self, plan: Plan, stage: int) -> int:
        """How many ranks have the same."""
        return len(plan.holders(stage, part=dict.fromkeys(self.axes, 0)))


StageState = tuple[StateBytes, ...]


class Allocator(NamedTuple):
    """The memory of a process besides its tensors: idle memory in its heap, and a fixed number of bytes.

    Those are code that libraries make for the shapes that they see, and buffers of libraries and MPI. The heap is cut
    to pieces: holes that are too small stay where some of the largest tensors were. They have a multiple of the bytes
    of the largest tensor: `whole` times for one microbatch at a time, `tiles` times if that is cut, since halos give
    tensors of two sizes, and `under_way` times where a microbatch ends while others are kept, or features are cut, of
    which ranks have parts and sums. Half of what a stage uses to compute lies in them. Of streamed tiles, which differ
    in size, the share `streamed` of all activations is idle.
    """

    whole: float
    tiles: float
    under_way: float
    streamed: float
    fixed_bytes: int

    def beside(self, largest: int, working: int, cut: bool, several: bool) -> int:
        """The bytes beside tensors of a rank that computes with `working`, of which the largest has `largest`."""
        times = self.under_way if several else self.tiles if cut else self.whole
        return max(0, round(times * largest - working / 2)) + self.fixed_bytes

    def beside_streamed(self, activations: int) -> int:
        return round(self.streamed * activations) + self.fixed_bytes


# As found on CPUs, for freed memory that is kept and returned (see _memory.py); on a GPU tensors alone count.
HEAP_KEPT, HEAP_RETURNED = Allocator(10.0, 12.0, 19.5, 0.58, 8 << 20), Allocator(0.5, 0.5, 0.5, 0.05, 8 << 20)
OF_TENSORS = Allocator(0.0, 0.0, 0.0, 0.0, 0)


class Share(NamedTuple):
    """The memory of one rank by purpose, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    together: int  # at most at one time


def count_state(
    modules: Iterable[nn.Module],
    build_optimizer: BuildOptimizer,
    low_precision: torch.dtype | None = None,
    cutting: Cutting | None = None,
    degrees: Degrees | None = None,
    averaged: bool = False,
) -> StageState:
    """Count what training a stage of these modules on the meta device would keep; what they share counts once.

    Their weights are of the type `low_precision`, if there is one. Of parameters that `cutting` names each rank has one
    of many parts. `averaged`: there is an average of them too.
    """
    modules, cutting, degrees = tuple(modules), cutting or Cutting(), degrees or Degrees()
    if low_precision is not None:
        modules = deepcopy(modules)
        for module in modules:
            lower_precision(module, low_precision)
    everything = {id(value): value for module in modules for value in (*module.parameters(), *module.buffers())}
    named = {id(p): (name, p) for module in modules for name, p in module.named_parameters() if p.requires_grad}
    fixed = sum(value.nbytes for value in everything.values()) - sum(p.nbytes for _, p in named.values())
    alike: dict[tuple[str, ...], list[nn.Parameter]] = {(): []}
    for name, p in named.values():
        shape = largest_part(cutting.parameters.get(name, ()), p.shape, degrees)
        part = p if shape == tuple(p.shape) else nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"))
        alike.setdefault(cutting.axes(name), []).append(part)
    return tuple(_state(parts, build_optimizer, 0 if axes else fixed, axes, averaged) for axes, parts in alike.items())


def _state(
    trained: Sequence[nn.Parameter],
    build_optimizer: BuildOptimizer,
    fixed: int,
    axes: tuple[str, ...],
    averaged: bool,
) -> StateBytes:
    masters = [nn.Parameter(p.detach().float() if p.dtype in LOW_PRECISION else p.detach()) for p in trained]
    own = sum(m.nbytes for p, m in zip(trained, masters, strict=True) if p.dtype in LOW_PRECISION)
    size = sum(p.nbytes for p in trained)
    largest = max((p.nbytes for p in trained), default=0)
    update = own + (state_bytes(build_optimizer(masters)) if masters else 0) + averaged * sum(m.nbytes for m in masters)
    return StateBytes(size, update, fixed, min(size, max(largest, BUCKET_BYTES)), axes, len(trained))


def share(plan: Plan, rank: int, stages: Sequence[StageState], activations: int) -> Share:
    """The memory of a rank of one replica, with at most this many bytes of activations."""
    parameters = gradients = passing = optimizer = gathered = summed = 0
    numbers = sorted({stage for _, stage in plan.held_by(rank)})
    for stage, state in [(number, state) for number in numbers for state in stages[number]]:
        num_ranks = state.num_holders(plan, stage)
        zero, copies = plan.zero_at(stage) if num_ranks > 1 else (0, 1)
        parameters += state.fixed + (state.parameters * copies // num_ranks if zero == 3 else state.parameters)
        own = state.parameters // num_ranks if zero > 1 else state.parameters
        gradients += own
        passing += own * (zero > 1 or (num_ranks == 1 and plan.num_microbatches == 1))
        optimizer += state.update // num_ranks if zero else state.update
        if num_ranks > 1:
            gathered += min(state.bucket * (KEPT + AHEAD), state.parameters) * (zero == 3)
            summed += state.bucket * UNDER_WAY * (zero > 1)
    # Under ZeRO 2 and 3, and where nobody has the same parameters, gradients are let go of before the next forward, and
    # come as activations go; others stay.
    together = parameters + optimizer + gathered + gradients - passing + max(activations, passing + summed)
    return Share(parameters, gradients, optimizer, activations, gathered + summed, together)


@dataclass(frozen=True)
class PlanMemory:
    """The memory of the ranks of a replica, of `stages` and their `states`; `streams`: the first by tiles."""

    plan: Plan
    stages: tuple[StageBytes, ...]
    states: tuple[StageState, ...]
    allocator: Allocator
    streams: bool

    @cached_property
    def activations(self) -> list[int]:
        """The most bytes that each group of ranks that do the same has of activations, and of what it computes with."""
        kept, found = [stage.kept for stage in self.stages], []
        for ranks, row in zip(self.plan.placement.alike, self.plan.merged_table(), strict=True):
            own = {stage for _, stage in self.plan.held_by(ranks[0])}
            found.append(peak_kept(row, kept) + max(self.stages[stage].working for stage in own))
        return found

    @cached_property
    def group_of(self) -> list[int]:
        """The group of each rank of a replica."""
        found = {rank: number for number, ranks in enumerate(self.plan.placement.alike) for rank in ranks}
        return [found[rank] for rank in range(self.plan.ranks_per_replica)]

    def share(self, rank: int, zero: int) -> Share:
        """The memory of a rank, by this ZeRO stage."""
        return share(self.plan.with_zero(zero), rank, self.states, self.activations[self.group_of[rank]])

    def process(self, rank: int) -> int:
        """The memory of the process of a rank beside its tensors."""
        group, held = self.group_of[rank], {stage for _, stage in self.plan.held_by(rank)}
        if self.streams and 0 in held:
            return self.allocator.beside_streamed(self.activations[group])
        under_way = peak_kept(self.plan.merged_table()[group], [1] * len(self.stages))
        largest, working = (max(getattr(self.stages[s], name) for s in held) for name in ("largest", "working"))
        cut = any(prod(self.plan.shape(stage).space) > 1 for stage in held)
        return self.allocator.beside(largest, working, cut, under_way > 1 or self.plan.tensor > 1)

    def of_ranks(self, zero: int, offloaded: bool = False) -> list[int]:
        """The memory of each rank; `offloaded`: its masters and optimizer state are elsewhere."""
        of_groups = []
        for rank, *_ in self.plan.placement.alike:
            part = self.share(rank, zero)
            of_groups.append(part.together + self.process(rank) - offloaded * part.optimizer)
        return [of_groups[group] for group in self.group_of]

    def breakdown(self) -> Iterator[tuple[int, int, Share]]:
        """For each ZeRO stage the rank that needs most, and its share."""
        for zero in ZERO_STAGES:
            shares = {rank: self.share(rank, zero) for rank, *_ in self.plan.placement.alike}
            rank = max(shares, key=lambda rank: shares[rank].together)
            yield zero, rank, shares[rank]
