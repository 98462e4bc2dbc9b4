"""Plans drawn at random: their tables can be run, and a step by them equals a step of plain PyTorch."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine
from mpi4dl.parallel.pipeline.checker import check
from mpi4dl.parallel.pipeline.held import Held, split
from mpi4dl.parallel.pipeline.schedules import SCHEDULES
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks
from tests.training import EXACT, SKIPPING, Task, assert_close, batch_of, build, model_of, optimizer_of, tiles_of

GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2))
NUM_TABLES, NUM_RUNS = 200, 50


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
    report = check(plan.table(), plan.placement)
    assert sum(report.num_microbatches) == plan.num_microbatches
    assert len(report.num_microbatches) == plan.num_directions
    sharing = plan.num_microbatches * plan.data * max(plan.batch_ways)
    assert plan.problem(plan.num_ranks, (64, 64), sharing) is None
    divided = plan.divide(sharing)
    numbers = [sorted(m.number for m in divided if m.direction == d) for d in range(plan.num_directions)]
    assert numbers == [list(range(count)) for count in report.num_microbatches]
    assert len(check(plan.evaluation_table(3), plan.placement.only(0)).order) == 3 * plan.num_stages


def small_plans() -> list[tuple[Task, Plan]]:
    """Those of at most 8 ranks and 6 stages, with batches that they can share, mostly not evenly."""
    random, found = Random(0), []
    while len(found) < NUM_RUNS:
        plan = draw(random, max_places=3)
        if plan.num_ranks <= 8 and plan.num_stages <= 6:
            batch = plan.num_microbatches * plan.data * max(plan.batch_ways) + random.randint(0, 2)
            found.append((replace(SKIPPING, batch=batch), plan))
    return found


def steps(comm: Communicator, cases: list[tuple[Task, Plan]]) -> list[tuple[float, dict[str, Tensor]]]:
    return [one_step(comm, task, plan) for task, plan in cases]


def one_step(comm: Communicator, task: Task, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """The loss of one step, and on rank 0 the state after it."""
    torch.manual_seed(0)
    if plan.num_stages > 1:
        held = split(lambda: model_of(task), plan, comm, image=(task.batch, 3, *task.size))
    else:
        held = Held.whole(model_of(task), plan, comm)
    engine = Engine(held, plan, optimizer_of(task, held), F.cross_entropy, comm=comm)
    images, targets = batch_of(task, 0)
    return engine.step(tiles_of(images, engine), targets, task.size).loss, engine.gather_state() or {}


@cache
def plain_step(task: Task, num_microbatches: int) -> tuple[float, dict[str, Tensor]]:
    model, optimizer = build(task)
    images, targets = batch_of(task, 0)
    cuts = [task.batch * i // num_microbatches for i in range(1, num_microbatches)]
    total = 0.0
    for some, wanted in zip(images.tensor_split(cuts), targets.tensor_split(cuts), strict=True):
        loss = F.cross_entropy(model(some), wanted) * (len(some) / task.batch)
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total, model.state_dict()


def test_a_step_by_any_plan_equals_plain_pytorch(ranks: Ranks) -> None:
    by_size: dict[int, list[tuple[Task, Plan]]] = defaultdict(list)
    for task, plan in small_plans():
        by_size[plan.num_ranks].append((task, plan))
    for num_ranks, cases in sorted(by_size.items()):
        results = ranks(num_ranks, timeout=120.0).run(steps, cases)
        for number, (task, plan) in enumerate(cases):
            loss, state = plain_step(task, plan.num_microbatches)
            assert {rank[number][0] for rank in results} == {results[0][number][0]}, plan
            assert results[0][number][0] == pytest.approx(loss, rel=EXACT), plan
            for name, value in state.items():
                assert_close(results[0][number][1][name], value, EXACT, f"{name} by {plan.describe()}")
