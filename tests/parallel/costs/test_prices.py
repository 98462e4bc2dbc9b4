"""Prices: timed once and remembered, counted where nothing can be timed; what stages cost, recomputed ones too."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.comm import Communicator
from mpi4dl.comm.traffic import Round
from mpi4dl.parallel.costs.cost_model import (
    ASSUMED,
    Overhead,
    Profiler,
    StageCosts,
    StageSeconds,
    costs_for,
    costs_of,
    groups_of,
    measure_link,
    measured_costs,
    recomputed,
    stages_on,
)
from mpi4dl.parallel.costs.machine import Machine
from mpi4dl.parallel.costs.meter import UnitCosts
from mpi4dl.parallel.costs.sites import Site, sites_of
from mpi4dl.parallel.costs.stage_traffic import WaitSeconds
from mpi4dl.parallel.costs.store import Store
from mpi4dl.parallel.costs.timing import Seconds
from mpi4dl.parallel.cut import split
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.pool.ranks import Ranks

CPU = torch.device("cpu")
IMAGE = (2, 3, 16, 16)
PLAN = Plan.of(stages=2, tiles=[(1, 2), (1, 1)])


def model() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)]
    return nn.Sequential(*convolutions)


def costs_of_model(cuttable: Cuttable, plan: Plan, image: tuple[int, ...], profiler: Profiler) -> StageCosts:
    return costs_for(cuttable, plan, sites_of(cuttable, plan, image), "auto", CPU, profiler)


def partly_frozen() -> nn.Sequential:
    """Of its four units the third is trained."""
    made = model().requires_grad_(False)
    made[2].requires_grad_(True)
    return made


@pytest.mark.parametrize("balance", ["auto", "flops"])
def test_frozen_weights_take_no_time_backward(balance: str) -> None:
    """The first unit with a gradient needs none of its inputs, and frozen ones behind it need none of weights."""
    there = Machine.of_link(0.0, 1e9, 1, flops_per_second=1e9)
    plan = Plan.of()
    ratios = []
    for build in (model, partly_frozen):
        cuttable = Cuttable(outline(build), image=IMAGE)
        sites = sites_of(cuttable, plan, IMAGE)
        costs = costs_for(cuttable, plan, sites, balance, CPU, Profiler(machine=there))
        ratios.append([unit.backward_seconds / unit.forward_seconds for unit in costs.columns[0]])
    trained = [1, 2, 2, 2] if balance == "auto" else [2, 2, 2, 2]
    assert ratios == [trained, [0, 0, 1, 1]]
    assert costs.columns[0][3].weight_seconds == 0


class Stopwatch:
    """Says that unit i takes 10 ** i seconds on each rank, and counts how often it was asked."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def __call__(self, cuttable: Cuttable, site: Site, device: torch.device, budget_seconds: float) -> Seconds:
        self.sites.append(site)
        return np.array([(10.0**i / site.shape.size, 0.0, 0.0) for i in range(len(cuttable))])


def test_every_site_is_timed_once(tmp_path: Path) -> None:
    timer = Stopwatch()
    profiler = Profiler(Store(tmp_path), timer)
    first = costs_of_model(Cuttable(model()), PLAN, IMAGE, profiler)
    assert [site.shape.size for site in timer.sites] == [2, 1]
    assert costs_of_model(Cuttable(model()), PLAN, IMAGE, profiler) == first
    assert len(timer.sites) == 2
    costs_of_model(Cuttable(model()[:3]), PLAN, IMAGE, profiler)
    costs_of_model(Cuttable(model()), PLAN, (4, *IMAGE[1:]), profiler)
    assert len(timer.sites) == 6
    for file in tmp_path.iterdir():
        file.write_text("{")
    profiler = Profiler(Store(tmp_path), timer)
    assert costs_of_model(Cuttable(model()), PLAN, IMAGE, profiler) == first
    assert len(timer.sites) == 8
    assert first.timed
    assert first.stages[0].machine == ASSUMED.machine(3)


def test_what_cannot_be_timed_is_counted(tmp_path: Path) -> None:
    def fail(*_: Any) -> Seconds:
        raise RuntimeError("it looks at values")

    profiler = Profiler(Store(tmp_path), fail, gflops=1e-3)
    found = costs_of_model(Cuttable(model()), PLAN, IMAGE, profiler)
    flops = 2 * 2 * 16 * 16 * 3 * 3 * 9
    assert not found.timed
    seconds = [stage.forward for stage in found.of_stages((1, 3))]
    assert seconds == pytest.approx([flops / 2 / 1e6, 3 * flops / 1e6])
    with pytest.raises(ValueError, match="cannot take images of 4 x 16 x 16"):
        costs_of_model(Cuttable(model()), PLAN, (2, 4, 16, 16), profiler)


def test_messages_cost_what_the_link_says() -> None:
    """Three exchanges with the neighbour on the right, of 100 bytes together, and on the way back one on the left."""
    there, back = (
        Round("exchange", (0, 1, 2), 3, (((0, 0, 1), 100),)),
        Round("exchange", (0, 1, 2), 1, (((0, 0, -1), 50),)),
    )
    unit, plan = (
        UnitCosts(there=(there,), back=(back,), forward_seconds=1.0, backward_seconds=2.0),
        Plan.of(tiles=[(1, 2)]),
    )
    machine = Machine.of_link(0.5, 100.0, 2, message_seconds=0.0)
    costs = StageCosts(((unit, unit),), stages_on(machine, plan), "", True)
    (found,) = costs.of_stages((2,))
    assert found.both == pytest.approx((2 * (1.0 + 1.5 + 1.0), 2 * (2.0 + 0.5 + 0.5)))
    assert found.there == pytest.approx(WaitSeconds(halos=5.0))
    assert costs.matrix == [pytest.approx([6.5, 6.5])]
    (found,) = replace(costs, overhead=Overhead(action_seconds=0.25, round_seconds=0.5)).of_stages((2,))
    assert (found.forward, found.backward) == (2 * (1.0 + 3 * 0.5) + 0.25, 2 * (2.0 + 0.5) + 0.25)


def test_gradients_of_weights_are_timed_apart_where_a_schedule_splits_them(tmp_path: Path) -> None:
    plan = Plan.of(stages=2, schedule="zero-bubble", microbatches=4)
    assert plan.split_stages == {1}  # the first has nobody to send gradients to
    assert Plan.of(stages=2, microbatches=4).split_stages == frozenset()
    for _ in range(2):  # timed, and remembered
        profiler = Profiler(Store(tmp_path))
        whole, split_up = costs_of_model(Cuttable(model()), plan, IMAGE, profiler).columns
        assert not any(unit.weight_seconds for unit in whole)
        assert all(0 < unit.weight_seconds < unit.backward_seconds for unit in split_up)
    with_weights = StageSeconds(1.0, 3.0, WaitSeconds(1.0), WaitSeconds(0.5), weight=1.0)
    costs = costs_of([with_weights, with_weights._replace(weight=0.0)], (0.0,), (1, 1))
    assert (costs.backward_seconds, costs.weight_seconds) == ((3.5, 3.5), (1.0, 1.5))


def test_what_many_write_at_once_is_read_whole(tmp_path: Path) -> None:
    kept = Store(tmp_path)

    def work(number: int) -> list[Any]:
        kept.put({"fact": number % 2}, [number] * 2000)
        return kept.get({"fact": number % 2}) or []

    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(work, range(200))):
            assert len(found) == 2000
            assert len(set(found)) == 1
            assert found[0] % 2 == number % 2
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Store(tmp_path / "file" / "folder")
    kept.put({"a": 1}, 2)
    assert kept.get({"a": 1}) is None


def on_ranks(comm: Communicator) -> tuple[Any, ...]:
    """By a clock on which all units take 1 s, forward and backward."""
    ticks = iter(range(10**6))
    cuttable, image = Cuttable(model()), (2, 3, 32, 32)
    before = torch.get_rng_state()
    costs = measured_costs(cuttable, PLAN, comm, image, CPU, lambda: float(next(ticks)))
    held = split(model, PLAN, comm, balance="measured", image=image)
    return costs.of_stages((2, 2)), held.counts, torch.equal(before, torch.get_rng_state()), measure_link(comm, CPU)


def test_all_ranks_time_their_own_tiles_and_know_the_same(ranks: Ranks) -> None:
    found = ranks(3).run(on_ranks)
    assert len({(seconds, counts, link) for seconds, counts, _, link in found}) == 1
    seconds, counts, same_randomness, link = found[0]
    assert [stage.both for stage in seconds] == [(2.0, 2.0), (2.0, 2.0)]
    assert (len(counts), sum(counts)) == (2, 4)
    assert same_randomness
    assert min(link) > 0


def test_groups_are_the_units_of_blocks() -> None:
    cuttable = Cuttable(outline(lambda: models.build("small_resnet", 10)))
    groups = groups_of(cuttable)
    assert [cuttable.names[first] for first, _ in groups] == [
        *("stem.0", "stage1_block1", "stage1_block2", "stage2_block1", "stage2_block2", "stage3_block1"),
        *("stage3_block2", "head"),
    ]
    assert groups[0] == (0, 4)


def test_of_a_group_its_inputs_are_kept_until_it_runs_again() -> None:
    column = tuple(UnitCosts(10 * i, i, 0, 1, 2) for i in range(1, 5))
    found = recomputed(column, [(0, 1), (2, 4)], 7)
    assert [unit.kept_bytes for unit in found] == [7, 20, 2, 0]
    assert [unit.backward_bytes for unit in found] == [12, 2, 2, 2 + 30 + 40]
    seconds = recomputed((UnitCosts(forward_seconds=1.0, backward_seconds=2.0),) * 3, [(1, 2)], 0)
    assert [unit.backward_seconds for unit in seconds] == [2.0, 3.0, 2.0]
