"""The time of a training step by a plan on a machine, and what it is spent on.

    of each group of ranks that do the same        its row of the table, simulated
    | F0 F1 F2 | idle | B0 F3 B1 F4 B2 | idle | B3 B4 | sums of gradients | optimizer |

Of the actions, some seconds are arithmetic, and some are waits for halos, statistics, features and experts. Left out:
reading the data, evaluation and checkpoints, and what links carry for others than this job.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from mpi4dl.estimate.memory import StageState, StateBytes
from mpi4dl.parallel.costs.cost_model import NO_OVERHEAD, Overhead, StageSeconds, costs_of
from mpi4dl.parallel.costs.machine import CollectiveCost, Machine
from mpi4dl.parallel.costs.stage_traffic import NO_WAITS
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.schedules import Action
from mpi4dl.parallel.tables.simulator import Simulation, simulate

LEAST = 0.005  # share of a step that is told
DIRECT_UP_TO = 2  # ranks, as in comm.allreduce


class StepParts(NamedTuple):
    """The seconds of a step of the ranks that compute longest. `idle` is time without work by the schedule,
    `messages` more of it since stages hand on.
    """

    arithmetic: float
    halos: float
    statistics: float
    features: float
    experts: float
    messages: float
    idle: float
    gradients: float
    optimizer: float

    def words(self) -> str:
        """The shares of the step, in percent, from the largest on."""
        total = sum(self) or 1.0
        shares = sorted(zip(self._fields, self, strict=True), key=lambda each: -each[1])
        told = (f"{name} {100 * seconds / total:.0f} %" for name, seconds in shares if seconds >= LEAST * total)
        return ", ".join(told)


class StepTime:
    """The time of a step whose stages have costs `seconds`, and hand on in `messages`.

    For each microbatch a stage keeps `kept` bytes, and `states` are those of its parameters. `overhead` is the Python
    beside the optimizer's own.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        seconds: Sequence[StageSeconds],
        messages: Sequence[float],
        kept: Sequence[int],
        states: Sequence[StageState],
        overhead: Overhead = NO_OVERHEAD,
    ) -> None:
        self.overhead = overhead
        self.plan, self.machine, self.stages, self.states = plan, machine, tuple(seconds), tuple(states)
        self.costs = costs_of(self.stages, messages, kept)

    @cached_property
    def simulation(self) -> Simulation:
        """The table, with a row for each group of ranks that do the same."""
        return simulate(self.plan.merged_table(), self.plan.placement.merged, self.costs)

    @cached_property
    def _behind(self) -> tuple[list[float], list[float]]:
        """The seconds of sums of gradients, and of the optimizer, of each group of ranks."""
        stages = range(self.plan.num_stages)
        states = self.states or [()] * len(stages)
        last = self.costs.backward_seconds
        sums = [
            sum(gradient_seconds(self.plan, self.machine, stage, each, last[stage]) for each in states[stage])
            for stage in stages
        ]
        updates = [sum(self._update(stage, each) for each in states[stage]) for stage in stages]
        held = [{stage for _, stage in self.plan.held_by(ranks[0])} for ranks in self.plan.placement.alike]
        return [sum(sums[s] for s in own) for own in held], [sum(updates[s] for s in own) for own in held]

    def _update(self, stage: int, state: StateBytes) -> float:
        ranks = state.num_holders(self.plan, stage)
        zero, _ = self.plan.zero_at(stage) if ranks > 1 else (0, 1)
        touched = 3 * state.parameters + 2 * state.update
        python = self.overhead.of_parameters(state.tensors, ranks, zero, self.plan.num_microbatches)
        return touched / (ranks if zero else 1) / self.machine.bytes_per_second + python

    @cached_property
    def seconds(self) -> float:
        """From the first action to the end of the optimizer's step, of the group that ends last."""
        ends = [max((span.end_seconds for span in row), default=0.0) for row in self.simulation.rows]
        return max(sum(of_group) for of_group in zip(ends, *self._behind, strict=True))

    @cached_property
    def _busy(self) -> list[list[tuple[float, ...]]]:
        """The seconds of each action of each group of ranks."""
        return [[self._of_action(span.action) for span in row] for row in self.simulation.rows]

    @property
    def work(self) -> list[float]:
        """The seconds of each rank of a replica in which it computes."""
        found: dict[int, float] = {}
        for ranks, row, optimizer in zip(self.plan.placement.alike, self._busy, self._behind[1], strict=True):
            found |= dict.fromkeys(ranks, sum(arithmetic for arithmetic, *_ in row) + optimizer)
        return [found[rank] for rank in sorted(found)]

    @cached_property
    def parts(self) -> StepParts:
        busy = self._busy
        totals = [sum(sum(each) for each in row) for row in busy]
        group = totals.index(max(totals))
        arithmetic, halos, statistics, features, experts = (sum(each) for each in zip(*busy[group], strict=True))
        gradients, optimizer = (seconds[group] for seconds in self._behind)
        idle = max(0.0, self.seconds - totals[group] - gradients - optimizer)
        at_once = replace(self.costs, communication_seconds=(0.0,) * len(self.costs.communication_seconds))
        without = simulate(self.plan.merged_table(), self.plan.placement.merged, at_once).makespan_seconds
        messages = min(idle, self.simulation.makespan_seconds - without)
        waits = halos, statistics, features, experts
        return StepParts(arithmetic, *waits, messages, idle - messages, gradients, optimizer)

    def _of_action(self, action: Action) -> tuple[float, ...]:
        """The seconds of an action: of arithmetic, and waits by purpose."""
        found = self.stages[action.stage]
        if action.kind == "forward":
            return found.forward, *found.there
        if action.kind == "backward":
            return found.backward, *found.back
        later = self.costs.weight_seconds[action.stage]
        return (later, *NO_WAITS) if action.kind == "weight" else (found.backward - later, *found.back)


def gradient_seconds(
    plan: Plan, machine: Machine, stage: int, state: StateBytes, backward_seconds: float = 0.0
) -> float:
    """The time in which the ranks that have the same parameters of a stage sum gradients, and gather parameters.

    Buckets follow each other. The last backward pass, of so many seconds, fills one after the other, and ranks sum them
    meanwhile (Li et al., "PyTorch Distributed", VLDB 2020); only the time behind the pass counts. ZeRO 2 sums after
    each microbatch, and ZeRO 3 also gathers before each forward and backward pass; of that nothing is hidden.
    """
    parts = [range({"features": plan.tensor, "experts": plan.experts}[axis]) for axis in state.axes]
    groups = [plan.holders(stage, part=dict(zip(state.axes, each, strict=True))) for each in product(*parts)]
    if len(groups[0]) == 1 or not state.parameters:
        return 0.0
    shortest = min(map(len, groups))
    alike = machine.slots([ranks[:shortest] for ranks in groups], plan.num_ranks)
    cost = CollectiveCost(machine, alike)
    zero, _ = plan.zero_at(stage)
    buckets = max(1.0, state.parameters / max(1, state.bucket))
    size = state.parameters / buckets
    if zero == 0:
        each = cost.all_reduce_seconds(size, "direct" if shortest <= DIRECT_UP_TO else "library")
        return behind_backward(buckets, each, backward_seconds)
    times, each = plan.num_microbatches, cost.reduce_scatter_seconds(size)
    if zero == 1:
        return behind_backward(buckets, each, backward_seconds) + buckets * each
    return {2: times + 1, 3: 3 * times}[zero] * buckets * each


def behind_backward(buckets: float, each: float, backward_seconds: float) -> float:
    """How long sums of buckets, each of so many seconds, take longer than the backward pass that fills them.

    One is under way at a time: either the last one alone is left, or all of them take longer than the pass.
    """
    first = backward_seconds / buckets
    return max(each, buckets * each + first - backward_seconds)
