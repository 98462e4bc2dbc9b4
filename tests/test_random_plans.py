"""Plans drawn at random: their tables can be run, and training and validation by them equal plain PyTorch."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.engine import Engine, Evaluation
from mpi4dl.parallel.pipeline.local_stages import LocalStages, split
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tables.schedules import SCHEDULES
from mpi4dl.parallel.tables.simulator import check
from tests.pool.ranks import Ranks
from tests.short_runs import (
    EXACT,
    SKIPPING,
    Task,
    assert_close,
    batch_of,
    build,
    evaluate,
    model_of,
    optimizer_of,
    tiles_of,
)

GRIDS = ((1, 1), (1, 2), (2, 1), (2, 2))
SIZES = ((13, 10), (11, 7), (8, 15), (9, 9))
NUM_TABLES, NUM_RUNS = 200, 12


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


def small_cases(seed: int) -> list[tuple[Task, Plan]]:
    """Plans of at most 8 ranks and 6 stages, images of odd sizes, batches that mostly cannot be shared evenly."""
    random, found = Random(seed), []
    while len(found) < NUM_RUNS:
        plan = draw(random, max_places=3)
        if plan.num_ranks <= 8 and plan.num_stages <= 6:
            batch = plan.num_microbatches * plan.data * max(plan.batch_ways) + random.randint(0, 2)
            found.append((replace(SKIPPING, batch=batch, size=random.choice(SIZES)), plan))
    return found


def validation_counts(task: Task) -> list[int]:
    """Sizes of validation batches: a whole one, a smaller one, and one of fewer images than ranks or microbatches."""
    return [task.batch, max(1, task.batch - 1), 1]


class Found(NamedTuple):
    """Losses of both steps, the validation between them, and on rank 0 the state in the end."""

    losses: list[float]
    evaluation: Evaluation
    state: dict[str, Tensor]


def all_by_ranks(comm: Communicator, cases: list[tuple[Task, Plan]]) -> list[Found]:
    return [by_ranks(comm, task, plan) for task, plan in cases]


def by_ranks(comm: Communicator, task: Task, plan: Plan) -> Found:
    torch.manual_seed(0)
    if plan.num_stages > 1:
        held = split(lambda: model_of(task), plan, comm, image=(task.batch, 3, *task.size))
    else:
        held = LocalStages.whole(model_of(task), plan, comm)
    engine = Engine(held, plan, optimizer_of(task, held), F.cross_entropy, comm=comm)

    def step(number: int) -> float:
        images, targets = batch_of(task, number)
        return engine.step(tiles_of(images, engine), targets, task.size).loss

    losses = [step(0)]
    batches = [batch_of(task, 50 + i, count) for i, count in enumerate(validation_counts(task))]
    tiles = [(tiles_of(images, engine, training=False), targets) for images, targets in batches]
    held.eval()
    evaluation = engine.evaluate(tiles, task.size)
    held.train()
    losses.append(step(1))
    return Found(losses, evaluation, engine.gather_state() or {})


@cache
def by_plain_pytorch(task: Task, num_microbatches: int) -> Found:
    model, optimizer = build(task)

    def step(number: int) -> float:
        optimizer.zero_grad()
        images, targets = batch_of(task, number)
        cuts = [task.batch * i // num_microbatches for i in range(1, num_microbatches)]
        total = 0.0
        for some, wanted in zip(images.tensor_split(cuts), targets.tensor_split(cuts), strict=True):
            loss = F.cross_entropy(model(some), wanted) * (len(some) / task.batch)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    losses = [step(0)]
    counts = validation_counts(task)
    evaluation = evaluate(model.eval(), [batch_of(task, 50 + i, count) for i, count in enumerate(counts)])
    model.train()
    losses.append(step(1))
    return Found(losses, evaluation, model.state_dict())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 6))])
def test_training_and_validating_by_any_plan_equals_plain_pytorch(ranks: Ranks, seed: int) -> None:
    by_size: dict[int, list[tuple[Task, Plan]]] = defaultdict(list)
    for task, plan in small_cases(seed):
        by_size[plan.num_ranks].append((task, plan))
    for num_ranks, cases in sorted(by_size.items()):
        results = ranks(num_ranks, timeout=600.0).run(all_by_ranks, cases)
        for number, (task, plan) in enumerate(cases):
            found, expected = results[0][number], by_plain_pytorch(task, plan.num_microbatches)
            for rank in results:
                assert (rank[number].losses, rank[number].evaluation) == (found.losses, found.evaluation), plan
            assert found.losses == pytest.approx(expected.losses, rel=EXACT), plan
            assert found.evaluation.loss == pytest.approx(expected.evaluation.loss, rel=EXACT), plan
            assert found.evaluation == replace(expected.evaluation, loss=found.evaluation.loss), plan
            for name, value in expected.state.items():
                assert_close(found.state[name], value, EXACT, f"{name} by {plan.describe()}")
