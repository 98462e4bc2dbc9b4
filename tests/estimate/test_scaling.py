"""Curves over numbers of ranks: which plans are looked at, and what is reported where none fits."""

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from mpi4dl import models
from mpi4dl.estimate.plan_estimate import Estimator
from mpi4dl.estimate.scaling import ALL, KINDS, Point, near, numbers_of_ranks, scaling_lines, scaling_points
from mpi4dl.estimate.search import candidates, estimates, promising
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.machine import LinkLevel, Machine
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.support.tiny import tiny_resnet

GIB = 1 << 30
LINKS = (LinkLevel("node", 1e-5, 5e10, ranks=4), LinkLevel("network", 2e-5, 2e10, shared_by=4))
MACHINE = Machine("a cluster", 512, 4, LINKS, 2 * GIB, "GPU", 8e12, 7e11, operator_seconds=1e-5)


@pytest.fixture(scope="module")
def cuttable() -> Cuttable:
    return Cuttable(outline(partial(models.build, "small_resnet", 10)).train())


@pytest.fixture(scope="module")
def tiny() -> Cuttable:
    return Cuttable(outline(partial(tiny_resnet, 10)).train())


@pytest.fixture(scope="module")
def profiler() -> Profiler:
    return Profiler(machine=MACHINE, small=True)


def estimator_of(cuttable: Cuttable, profiler: Profiler, side: int, images: int = 8) -> Estimator:
    optimizer = partial(torch.optim.SGD, lr=0.01)
    image = (images, 3, side, side)
    return Estimator(cuttable, image, profiler, torch.device("cpu"), optimizer, streams=False)


def plans_of(estimator: Estimator, num_ranks: int, batch_size: int) -> list[Plan]:
    return list(candidates(num_ranks, len(estimator.cuttable), (batch_size, *estimator.image[1:])))


def best_of(estimator: Estimator, plans: list[Plan], limit: float) -> float:
    found = promising(estimator, plans, limit)
    return max(each.samples_per_second for each in found if each.num_bytes <= limit)


@pytest.mark.parametrize(
    ("most", "weak"),
    [(4, False), (16, False), (2048, False), (2048, True)],
)
@pytest.mark.exhaustive
def test_plans_near_the_best_of_fewer_ranks_have_the_best(
    cuttable: Cuttable, profiler: Profiler, most: int, weak: bool
) -> None:
    """As fast, within 2 %, as the best of all plans."""
    estimator = estimator_of(cuttable, profiler, 16384, 1 if weak else 16)
    numbers, limit = numbers_of_ranks(most), (12 if most == 4 else 6) * GIB
    batches = {}

    def plans_for(num_ranks: int, batch_size: int) -> list[Plan]:
        batches[num_ranks] = batch_size
        return plans_of(estimator, num_ranks, batch_size)

    points = [p for p in scaling_points(estimator, plans_for, numbers, weak, limit) if p.kind == ALL]
    fitting = [point for point in points if point.best is not None]
    assert len(fitting) >= 3
    for point in (fitting[-1], fitting[len(fitting) // 2]):
        estimator.image = (batches[point.num_ranks], *estimator.image[1:])
        everything = plans_of(estimator, point.num_ranks, batches[point.num_ranks])
        assert point.speed >= 0.98 * best_of(estimator, everything, limit)


def test_near_plans_are_those_of_one_kind_and_like_good_ones() -> None:
    good = Plan.of(tiles=[(2, 4)], data=4)
    twice = [Plan.of(tiles=[(4, 4)], data=4), Plan.of(tiles=[(2, 4)], data=8)]
    stages = Plan.of(stages=2, tiles=[(2, 4)], data=4, microbatches=2)
    of_a_kind = [Plan.of(tiles=[(8, 8)]), Plan.of(data=64)]
    far = [Plan.of(tiles=[(1, 2)], data=32), Plan.of(stages=8, tiles=[(1, 4)], data=2, microbatches=8)]
    assert near([*twice, stages, *of_a_kind, *far], [good], 1.0) == [*twice, stages, *of_a_kind]
    assert near(far, [], 1.0) == []


def test_what_does_not_fit_lacks_memory(tiny: Cuttable, profiler: Profiler) -> None:
    estimator = estimator_of(tiny, profiler, 16384, images=1)
    points = scaling_points(estimator, partial(plans_of, estimator), [1, 2], False, GIB / 8)
    assert {point.best for point in points} == {None}
    (last,) = (point for point in points if (point.kind, point.num_ranks) == (ALL, 2))
    assert last.smallest is not None
    plans = plans_of(estimator, 2, 1)
    assert last.smallest.num_bytes == min(each.num_bytes for each in estimates(estimator, plans, GIB / 8) if each)
    lines = list(scaling_lines(points, 4, most_bytes=GIB / 8))
    lacks = (last.smallest.num_bytes - GIB / 8) / 2**20
    assert lines[0] == "no plan fits on any of these numbers of ranks"
    assert f"{lacks:,.0f} MiB more than the 128 MiB of a rank: {last.smallest}" in lines[1]


def test_where_nothing_fits_few_schedules_are_looked_at(tiny: Cuttable, profiler: Profiler) -> None:
    estimator = estimator_of(tiny, profiler, 4096)
    plans = [*islice(cycle(plans_of(estimator, 2, 8)), 1001)]
    found = promising(estimator, plans, 1.0)
    plain = sum(plan.schedule == "1f1b" and not plan.bidirectional for plan in plans)
    assert plain <= len(found) < len(plans)


@pytest.mark.exhaustive
def test_progress_names_ranks_tiles_and_plans(cuttable: Cuttable) -> None:
    told: list[str] = []
    estimator = estimator_of(cuttable, Profiler(machine=MACHINE, small=True), 512, 2)
    tell: Any = lambda doing, done=0, total=0: told.append(doing)  # noqa: E731
    scaling_points(estimator, partial(plans_of, estimator), [1, 2], False, tell=tell)
    assert {words.partition(": ")[0] for words in told} == {"1 of 2 ranks", "2 of 2 ranks"}
    doings = {words.partition(": ")[2] for words in told}
    assert doings == {"listing plans", "plans that were timed and simulated"}


def test_every_point_has_the_smallest_plan_beside_the_best(tiny: Cuttable, profiler: Profiler) -> None:
    estimator = estimator_of(tiny, profiler, 2048, 4)
    points = scaling_points(estimator, partial(plans_of, estimator), [1, 2], False, 8 * GIB)
    assert [(point.kind, point.num_ranks) for point in points] == [(kind, n) for n in (1, 2) for kind in KINDS]
    for point in points:
        if point.best is not None:
            assert point.smallest is not None
            assert point.smallest.num_bytes <= point.best.num_bytes
    assert Point("tiles", 1, None).speed == 0.0


@pytest.mark.exhaustive
def test_waits_of_many_units_are_those_of_each(cuttable: Cuttable, profiler: Profiler) -> None:
    """Exchanges are priced together, and sums are remembered for the same ranks."""
    estimator = estimator_of(cuttable, profiler, 2048, 4)
    for plan in (Plan.of(tiles=[(2, 4)], data=2), Plan.of(stages=2, tiles=[(2, 2), (1, 2)], microbatches=2)):
        costs = estimator.costs(plan)
        alone = replace(MACHINE)  # which remembers nothing yet
        for stage, column in zip(costs.stages, costs.columns, strict=True):
            ways = [unit.there for unit in column]
            fresh = type(stage)(alone, plan, costs.stages.index(stage))
            for together, way in zip(stage.waits_of(ways), ways, strict=True):
                assert together == pytest.approx(fresh.waits(way))
            assert sum(map(sum, stage.waits_of(ways))) > 0
