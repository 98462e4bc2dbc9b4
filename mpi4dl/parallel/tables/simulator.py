"""What a table would take: when each action runs, how long ranks stand idle, how much they keep. No ranks needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpi4dl.parallel.tables.checker import check, peak_kept
from mpi4dl.parallel.tables.table import Action, Placement, Table, needs


@dataclass(frozen=True)
class Costs:
    """What each stage costs for one microbatch, on each of its ranks.

    `forward_seconds`, `backward_seconds` and `activation_bytes` (kept from forward to backward) have one entry a
    stage; `communication_seconds[s]` is a message between stages s and s + 1, either way. Where a schedule splits the
    backward, its first half, the gradient of the input, takes `input_share` of it.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    communication_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    input_share: float = 0.5

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
        share = {"backward": 1.0, "input": self.input_share, "weight": 1.0 - self.input_share}[action.kind]
        return share * self.backward_seconds[action.stage]

    def require(self, num_stages: int) -> None:
        """Raise ValueError unless there is one entry a stage (a boundary between stages for communication)."""
        for name, values, expected in (
            ("forward_seconds", self.forward_seconds, num_stages),
            ("backward_seconds", self.backward_seconds, num_stages),
            ("communication_seconds", self.communication_seconds, num_stages - 1),
            ("activation_bytes", self.activation_bytes, num_stages),
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
