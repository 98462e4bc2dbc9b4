"""What was foreseen beside what was measured: by literal equality."""

import math
from typing import Any

from mpi4dl.parallel.costs.cost_model import StageCosts, stages_on
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.costs.meter import UnitCosts
from mpi4dl.parallel.plan import Plan
from mpi4dl.training.report import Forecast, Worked, WorkMeter, compared

PLAN = Plan.of(stages=2, tiles=[(1, 2), (1, 1)], microbatches=2)
# On stage 0 a unit takes 1 s forward and 2 s backward, on stage 1 twice as long.
COLUMNS = tuple((UnitCosts(forward_seconds=n, backward_seconds=2 * n),) * 3 for n in (1.0, 2.0))
COSTS = StageCosts(COLUMNS, stages_on(Machine.of_link(0.0, math.inf, 3, message_seconds=0.0), PLAN), "", True)


def test_shares_of_work_and_idle_time_follow_from_the_table() -> None:
    """F0 to 1 s, F1 to 2 s; the last stage works from 1 s to 25 s; then the last backward, to 27 s."""
    found = Forecast.of(PLAN, COSTS, (1, 2))
    assert found.work == (6 / 36, 6 / 36, 24 / 36)
    assert found.idle == (1 - 6 / 27, 1 - 6 / 27, 1 - 24 / 27)


def test_a_prediction_that_holds_is_said_as_it_is() -> None:
    forecast = Forecast((0.25, 0.75), (0.6, 0.1))
    of_ranks = [Worked(1.0, 8.0), Worked(3.0, 8.0), Worked(1.2, 8.0), Worked(3.1, 8.0)]  # of two replicas
    assert compared(forecast, of_ranks, crowded=False) == [
        "each rank's share of the work, and how long it idled, as predicted and as measured:",
        "  rank 0: work 25.0 % and 26.5 %, idle 60 % and 86 %",
        "  rank 1: work 75.0 % and 73.5 %, idle 10 % and 62 %",
    ]


def test_a_prediction_that_is_far_off_is_called_so() -> None:
    *_, last = compared(Forecast((0.5, 0.5), (0.0, 0.0)), [Worked(4.0, 5.0), Worked(1.0, 5.0)], crowded=True)
    assert last == (
        "the prediction of rank 1's work is off by 150 %: `balance` measured cuts by what the ranks themselves take"
    )


def test_work_is_counted_within_steps_only() -> None:
    class Node:
        work = 0.0

        def work_seconds(self) -> float:
            return self.work

    node: Any = Node()
    clock = iter([1.0, 5.0, 100.0, 102.0])
    meter = WorkMeter(node, lambda: next(clock))
    for seconds in (3.0, 1.0):
        with meter:
            node.work += seconds
        node.work += 50.0
    assert meter.worked == Worked(4.0, 6.0)
