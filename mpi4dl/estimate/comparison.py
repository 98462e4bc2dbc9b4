"""A step as estimated beside the step as measured: the work of each rank, its share of all, and its idle time.

predicted    the prices of the units of its stages, through the table of the plan
measured     seconds for which a rank's thread was on a core in its steps, but for those in which it only waited
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from mpi4dl.comm.node import Node
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.simulator import Simulation, simulate

if TYPE_CHECKING:
    from mpi4dl.parallel.costs.cost_model import StageCosts

FAR_OFF = 0.15  # of what was measured


def shares(seconds: Sequence[float]) -> tuple[float, ...]:
    """Of each the share of the sum."""
    total = sum(seconds) or 1.0
    return tuple(each / total for each in seconds)


def foreseen(plan: Plan, prices: "StageCosts", counts: Sequence[int]) -> Simulation:
    """A step of a replica by the prices of its stages, which have so many units; what it keeps is not counted."""
    return simulate(plan.table(), plan.placement, prices.step(plan, counts))


@dataclass(frozen=True)
class Forecast:
    """Of each rank of a replica, in one step: the share of all work that it does, and of the time that it idles."""

    work: tuple[float, ...]
    idle: tuple[float, ...]

    @classmethod
    def of(cls, plan: Plan, prices: "StageCosts", counts: Sequence[int]) -> "Forecast":
        found = foreseen(plan, prices, counts)
        busy = [sum(span.end_seconds - span.start_seconds for span in row) for row in found.rows]
        return cls(shares(busy), found.bubbles)


class Worked(NamedTuple):
    """How long a rank worked in its steps, and how long those took."""

    work_seconds: float
    seconds: float


class WorkMeter:
    """Within `with meter:`, how long this rank works, and how long that takes."""

    def __init__(self, node: Node, clock: Callable[[], float] = perf_counter) -> None:
        self._node, self._clock = node, clock
        self._begun = Worked(0.0, 0.0)
        self.worked = Worked(0.0, 0.0)

    def __enter__(self) -> None:
        self._begun = Worked(self._node.work_seconds(), self._clock())

    def __exit__(self, *_: object) -> None:
        now = Worked(self._node.work_seconds(), self._clock())
        self.worked = Worked(*(a + b - c for a, b, c in zip(self.worked, now, self._begun, strict=True)))


def compared(forecast: Forecast, of_ranks: Sequence[Worked], crowded: bool) -> list[str]:
    """Lines that say, for each rank of a replica, the estimate and the measurement.

    `of_ranks` are those of all ranks, replicas one after the other, of which sums are taken. `crowded`: there are more
    ranks than cores, so ranks also wait for a core, which no estimate includes.
    """
    number = len(forecast.work)
    ranks = [Worked(*map(sum, zip(*of_ranks[rank::number], strict=True))) for rank in range(number)]
    measured = shares([rank.work_seconds for rank in ranks])
    idle = [max(0.0, 1 - rank.work_seconds / rank.seconds) if rank.seconds else 0.0 for rank in ranks]
    why = "; with more ranks than cores, ranks also wait for a core" if crowded else ""
    lines = [f"each rank's share of the work, and how long it idled, as predicted and as measured{why}:"]
    for rank in range(number):
        work = f"work {100 * forecast.work[rank]:.1f} % and {100 * measured[rank]:.1f} %"
        lines.append(f"  rank {rank}: {work}, idle {100 * forecast.idle[rank]:.0f} % and {100 * idle[rank]:.0f} %")
    off = [abs(guess / found - 1) if found else 0.0 for guess, found in zip(forecast.work, measured, strict=True)]
    worst = max(off)
    if worst > FAR_OFF:
        lines.append(
            f"the prediction of rank {off.index(worst)}'s work is off by {100 * worst:.0f} %: `balance` measured cuts "
            "by what the ranks themselves take"
        )
    return lines
