"""Plans drawn at random: their tables can be run, and training and validation by them equal plain PyTorch."""

from dataclasses import replace
from random import Random

import pytest

from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables import simulator
from mpi4dl.parallel.tables.schedules import SCHEDULES
from tests.pool.ranks import Ranks
from tests.support.short_runs import SKIPPING, Task, check

GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2))
SIZES = ((13, 10), (11, 7), (8, 15), (9, 9))
NUM_TABLES, NUM_RUNS = 200, 4


def draw(random: Random, max_places: int = 4) -> Plan:
    """Any plan that can be, most of all with one schedule as often as another."""
    schedule = random.choice(sorted(SCHEDULES))
    places = random.randint(1, max_places)
    mirrors = schedule != "interleaved" and places > 1
    return Plan(
        tiles=tuple(random.choice(GRIDS) for _ in range(places)),
        batch_ways=tuple(random.choice((1, 1, 2)) for _ in range(places)),
        data=random.randint(1, 2),
        microbatches=random.randint(1, 5),
        schedule=schedule,
        bidirectional=random.randint(0, 2) if mirrors else 0,
        chunks=random.randint(2, 3) if schedule == "interleaved" else 1,
    )


@pytest.mark.parametrize("seed", range(NUM_TABLES))
def test_every_plan_has_a_table_that_can_be_run(seed: int) -> None:
    plan = draw(Random(seed))
    report = simulator.check(plan.table(), plan.placement)
    assert sum(report.num_microbatches) == plan.num_microbatches
    assert len(report.num_microbatches) == plan.num_directions
    sharing = plan.num_microbatches * plan.data * max(plan.batch_ways)
    assert plan.problem(plan.num_ranks, (64, 64), sharing) is None
    divided = plan.divide(sharing)
    numbers = [sorted(m.number for m in divided if m.direction == d) for d in range(plan.num_directions)]
    assert numbers == [list(range(count)) for count in report.num_microbatches]
    assert len(simulator.check(plan.evaluation_table(3), plan.placement.only(0)).order) == 3 * plan.num_stages


def small_cases(seed: int) -> list[tuple[Task, Plan]]:
    """Plans of at most 8 ranks and 6 stages, images of odd sizes, batches that mostly cannot be shared evenly."""
    random, found = Random(seed), []
    while len(found) < NUM_RUNS:
        plan = draw(random, max_places=3)
        if plan.num_ranks <= 8 and plan.num_stages <= 6:
            batch = plan.num_microbatches * plan.data * max(plan.batch_ways) + random.randint(0, 2)
            found.append((replace(SKIPPING, batch=batch, size=random.choice(SIZES), num_steps=2), plan))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 18))])
def test_training_and_validating_by_any_plan_equals_plain_pytorch(ranks: Ranks, seed: int) -> None:
    for task, plan in sorted(small_cases(seed), key=lambda case: case[1].num_ranks):
        check(ranks, task, plan)
