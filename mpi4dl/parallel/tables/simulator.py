"""Can a table be run, and what would it take: deadlocks and gaps, times, idle ranks, memory. No ranks needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from mpi4dl.parallel.tables.schedules import Action, Kind, Placement, Table, needs, precedence

# Can this table be run at all? Finds what is missing, doubled, out of order or waits for itself, before anyone starts.
#
# The world that a table must survive: a rank does its actions in order, at any speed; sending never blocks, receiving
# does; ranks that share a stage do its actions together.


class TableError(ValueError):
    """A table that cannot be run; `rank` and `action` are where the fault was found."""

    def __init__(self, rank: int, action: Action | None, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.action = action


@dataclass(frozen=True)
class Report:
    """The result of simulating a valid table.

    `order` is one order in which all actions can happen, `num_microbatches` how many each direction takes, and
    `peak_live` how many each rank keeps at most: forward done, backward (or weight) not yet, each stage counted.
    """

    order: tuple[Action, ...]
    num_microbatches: tuple[int, ...]
    peak_live: tuple[int, ...]


def check(table: Table, placement: Placement) -> Report:
    """Raise TableError unless every rank can do its whole row, whatever the speeds, and to the right result.

    Every microbatch passes forward, and in a table with any backward also back, through every stage of its direction,
    on every rank that holds it, once. Each stage takes the microbatches in order, as a plain loop would: running
    statistics and sums of gradients depend on it, and messages arrive in the order in which they are awaited.
    """
    if len(table) != placement.num_ranks:
        missing = min(len(table), placement.num_ranks)
        raise TableError(missing, None, f"the table has {len(table)} rows for {placement.num_ranks} ranks")
    kinds = _kinds(table)
    for rank, row in enumerate(table):
        _check_each(rank, row, placement, kinds)
    num_microbatches = tuple(
        1 + max((action.microbatch for row in table for action in row if action.direction == direction), default=-1)
        for direction in range(placement.num_directions)
    )
    for rank, row in enumerate(table):
        _check_all_there(rank, row, table, placement, kinds, num_microbatches)
    for rank, row in enumerate(table):
        _check_row_order(rank, row, placement.num_stages)
    sizes = [1] * placement.num_stages
    peak_live = tuple(peak_kept(row, sizes) for row in table)
    return Report(_common_order(table, placement.num_stages), num_microbatches, peak_live)


def peak_kept(row: Sequence[Action], sizes: Sequence[int]) -> int:
    """The most that a rank keeps at a time, if a microbatch's activations in stage s take `sizes[s]`."""
    ends = _kinds((tuple(row),))[-1]
    kept = peak = 0
    for kind, _, stage, _ in row:
        if kind == "forward":
            kept += sizes[stage]
            peak = max(peak, kept)
        if kind == ends:
            kept -= sizes[stage]
    return peak


def _kinds(table: Table) -> tuple[Kind, ...]:
    """The kinds of action that every microbatch needs in this table; the last one frees its activations."""
    found = {action.kind for row in table for action in row}
    if "input" in found or "weight" in found:
        return ("forward", "input", "weight")
    return ("forward", "backward") if "backward" in found else ("forward",)


def _check_each(rank: int, row: Sequence[Action], placement: Placement, kinds: tuple[Kind, ...]) -> None:
    held = placement.held_by(rank)
    seen = set()
    for action in row:
        if action.kind not in kinds:
            raise TableError(rank, action, f"{action} is in a table of {', '.join(kinds)}")
        if (action.direction, action.stage) not in held:
            pairs = ", ".join(f"{stage} of direction {direction}" for direction, stage in held)
            raise TableError(rank, action, f"{action} is not its to do, for it holds stage {pairs}")
        if action.microbatch < 0:
            raise TableError(rank, action, f"{action}: microbatches are numbered from 0")
        if action in seen:
            raise TableError(rank, action, f"{action} comes twice")
        seen.add(action)


def _check_all_there(
    rank: int,
    row: Sequence[Action],
    table: Table,
    placement: Placement,
    kinds: tuple[Kind, ...],
    num_microbatches: Sequence[int],
) -> None:
    there = set(row)
    for direction, stage in placement.held_by(rank):
        for microbatch in range(num_microbatches[direction]):
            for kind in kinds:
                action = Action(kind, direction, stage, microbatch)
                if action not in there:
                    raise TableError(rank, action, f"{action} is missing{_who_waits(rank, action, table, placement)}")


def _who_waits(rank: int, missing: Action, table: Table, placement: Placement) -> str:
    for other, row in enumerate(table):
        for action in row:
            if action == missing:
                return f", and rank {other}, which shares the stage, waits in it for ever"
            if other != rank and missing in needs(action, placement.num_stages):
                return f", and rank {other} waits for ever to receive from it for {action}"
    return ""


def _check_row_order(rank: int, row: Sequence[Action], num_stages: int) -> None:
    """Each stage's microbatches in turn, and nothing before what it needs from the same rank."""
    there, done = set(row), set()
    next_microbatch: dict[tuple[Kind, int, int], int] = {}
    for action in row:
        late = [need for need in needs(action, num_stages) if need in there and need not in done]
        if late:
            raise TableError(rank, action, f"{action} comes before {late[0]}, which it needs")
        due = next_microbatch.get(action[:3], 0)
        if action.microbatch != due:
            raise TableError(rank, action, f"{action} comes where microbatch {due} is due, as in a plain loop")
        next_microbatch[action[:3]] = due + 1
        done.add(action)


def _common_order(table: Table, num_stages: int) -> tuple[Action, ...]:
    """One order that follows every row and every need; there is none exactly if the ranks can wait in a circle."""
    try:
        return tuple(TopologicalSorter(precedence(table, num_stages)).static_order())
    except CycleError as error:
        circle = list(_circle(error.args[1], table))
    rank, action = next((rank, action) for rank, action, _ in circle if rank is not None)
    raise TableError(rank, action, "waits in a circle: " + "; ".join(text for *_, text in circle))


def _circle(actions: Sequence[Action], table: Table) -> Iterator[tuple[int | None, Action, str]]:
    """Each step of a circle in words, with the rank that takes it (None for a message) and what it waits in."""
    place = [{action: position for position, action in enumerate(row)} for row in table]
    steps: list[tuple[int | None, Action, Action]] = []
    for first, then in pairwise(actions):
        ranks = [rank for rank, at in enumerate(place) if first in at and at.get(then) == at[first] + 1]
        if steps and steps[-1][0] in ranks:
            steps[-1] = (*steps[-1][:2], then)
        else:
            steps.append((ranks[0] if ranks else None, first, then))
    for rank, first, then in steps:
        yield rank, first, f"{then} needs {first}" if rank is None else f"rank {rank} does {first} before {then}"


@dataclass(frozen=True)
class Costs:
    """The costs of each stage for one microbatch, on each of its ranks.

    `forward_seconds`, `backward_seconds` and `activation_bytes` (kept from forward to backward) have one entry a
    stage; `communication_seconds[s]` is a message between stages s and s + 1, either way. Where a schedule splits the
    backward, its second part, the gradients of weights, takes `weight_seconds` of it: half, if they are left out.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    communication_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    weight_seconds: tuple[float, ...] = ()

    @classmethod
    def equal(
        cls,
        num_stages: int,
        forward_seconds: float = 1.0,
        backward_seconds: float = 2.0,
        communication_seconds: float = 0.0,
        activation_bytes: int = 1,
    ) -> "Costs":
        """The same for every stage."""
        return cls(
            (forward_seconds,) * num_stages,
            (backward_seconds,) * num_stages,
            (communication_seconds,) * (num_stages - 1),
            (activation_bytes,) * num_stages,
        )

    def seconds(self, action: Action) -> float:
        if action.kind == "forward":
            return self.forward_seconds[action.stage]
        whole = self.backward_seconds[action.stage]
        later = self.weight_seconds[action.stage] if self.weight_seconds else whole / 2
        return {"backward": whole, "input": whole - later, "weight": later}[action.kind]

    def require(self, num_stages: int) -> None:
        """Raise ValueError unless there is one entry a stage (a boundary between stages for communication)."""
        for name, values, expected in (
            ("forward_seconds", self.forward_seconds, num_stages),
            ("backward_seconds", self.backward_seconds, num_stages),
            ("communication_seconds", self.communication_seconds, num_stages - 1),
            ("activation_bytes", self.activation_bytes, num_stages),
            ("weight_seconds", self.weight_seconds, num_stages if self.weight_seconds else 0),
        ):
            if len(values) != expected:
                raise ValueError(f"{num_stages} stages need {expected} {name}, but there are {len(values)}: {values}")


class TimeSpan(NamedTuple):
    """When an action runs."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """The timeline of a table: the spans of every rank, and the most bytes of activations that it keeps."""

    rows: tuple[tuple[TimeSpan, ...], ...]
    peak_bytes: tuple[int, ...]

    @property
    def makespan_seconds(self) -> float:
        return max((span.end_seconds for row in self.rows for span in row), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan for which each rank stands idle."""
        makespan = self.makespan_seconds
        busy = (sum(span.end_seconds - span.start_seconds for span in row) for row in self.rows)
        return tuple(1.0 - seconds / makespan if makespan else 0.0 for seconds in busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        return sum(self.bubbles) / len(self.bubbles)


def simulate(table: Table, placement: Placement, costs: Costs) -> Simulation:
    """Start every action as soon as all its ranks are free and what it needs has come. Raises TableError, ValueError.

    Messages pass while ranks compute, each in its own time, and between the same ranks in none.
    """
    costs.require(placement.num_stages)
    free = [0.0] * placement.num_ranks
    ends: dict[Action, float] = {}
    rows: list[list[TimeSpan]] = [[] for _ in table]
    for action in check(table, placement).order:
        ranks = placement.ranks_of(action)
        arrivals = (_arrival(need, action, ends, placement, costs) for need in needs(action, placement.num_stages))
        start = max([free[rank] for rank in ranks] + list(arrivals))
        ends[action] = start + costs.seconds(action)
        for rank in ranks:
            free[rank] = ends[action]
            rows[rank].append(TimeSpan(action, start, ends[action]))
    peaks = tuple(peak_kept(row, costs.activation_bytes) for row in table)
    return Simulation(tuple(tuple(row) for row in rows), peaks)


def _arrival(need: Action, action: Action, ends: Mapping[Action, float], placement: Placement, costs: Costs) -> float:
    if set(placement.ranks_of(need)) == set(placement.ranks_of(action)):
        return ends[need]
    return ends[need] + costs.communication_seconds[min(need.stage, action.stage)]
