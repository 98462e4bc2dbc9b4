"""The search: which plans are looked at, which of them is best, and the flags that each is started by."""

from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl import models
from mpi4dl.estimate.memory import OF_TENSORS
from mpi4dl.estimate.plan_estimate import Estimator, PlanEstimate
from mpi4dl.estimate.search import candidates, degrees_of, ranked, search
from mpi4dl.options.build import build_plan
from mpi4dl.options.config import Config, parse
from mpi4dl.options.declare import options_of, to_toml
from mpi4dl.parallel.costs.cost_model import Profiler
from mpi4dl.parallel.costs.sites import Site
from mpi4dl.parallel.costs.store import Store
from mpi4dl.parallel.costs.timing import Seconds
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from mpi4dl.parallel.tensor.styles import Degrees
from tests.support.counting import summary_of

IMAGE = (8, 3, 32, 32)


def build() -> nn.Module:
    return models.build("small_resnet", 10)


def estimator_of(tmp_path: Path, tile_seconds: float) -> Estimator:
    """A unit takes a second for each sample, shared by all ranks, and so much more on tiles."""

    def time_units(cuttable: Cuttable, site: Site, *_: Any) -> Seconds:
        seconds = site.image[0] / site.shape.size + tile_seconds * (prod(site.shape.space) > 1)
        return np.array([(seconds, 2 * seconds, 0.0) for _ in cuttable.names])

    profiler = Profiler(Store(tmp_path), time_units)
    optimizer = partial(torch.optim.Adam, lr=0.1)
    cuttable = Cuttable(outline(build).train(), image=IMAGE)
    return Estimator(cuttable, IMAGE, profiler, torch.device("cpu"), optimizer, OF_TENSORS)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_candidate_can_be_trained(num_ranks: int) -> None:
    plans = list(candidates(num_ranks, 11, IMAGE))
    assert len(set(plans)) == len(plans) > 0
    assert [plan.problem(num_ranks, IMAGE[2:], IMAGE[0]) for plan in plans] == [None] * len(plans)
    assert {plan.num_ranks for plan in plans} == {num_ranks}


def test_the_kinds_of_plans_are_among_them() -> None:
    plans = set(candidates(4, 11, IMAGE))
    assert {
        Plan(data=4),
        Plan(((2, 2),)),
        Plan(((1, 3), (1, 1)), microbatches=4),
        Plan(((1, 2), (1, 2)), microbatches=2, schedule="zero-bubble"),
        Plan(((1, 1),) * 4, microbatches=2, bidirectional=1),
        Plan(((1, 1),) * 2, data=2, microbatches=4, schedule="interleaved", chunks=2),
    } <= plans


def test_experts_are_shared_by_as_many_ranks_as_can() -> None:
    sizes = {"vocabulary": 8, "num_layers": 2, "num_heads": 2, "hidden": 8}
    dense, sparse = models.build("gpt", **sizes), models.build("gpt", num_experts=3, **sizes)
    alone = [Degrees(), Degrees(2)]
    assert list(degrees_of(dense, 4, 2)) == alone
    assert list(degrees_of(sparse, 4, 2)) == [Degrees(), Degrees(1, 2), Degrees(2), Degrees(2, 2)]
    plans = set(candidates(4, 11, (8, 16), degrees_of(sparse, 4, 2)))
    assert {Plan(((1,),), experts=2, data=2), Plan(((1,),), experts=2, tensor=2), Plan(((4,),))} <= plans
    assert Plan(((1,), (1,)), experts=2, microbatches=2) in plans
    assert all(plan.problem(4, (16,), 8) is None for plan in plans)


@pytest.mark.exhaustive
def test_the_fastest_plan_that_fits_is_first(tmp_path: Path) -> None:
    plans = [Plan(data=2), Plan(((1, 2),)), Plan(((1, 1), (1, 1)), microbatches=2)]
    slow_tiles = search(estimator_of(tmp_path / "a", 1.0), plans)
    assert [each.plan for each in slow_tiles.best] == [plans[0], plans[1], plans[2]]
    assert (slow_tiles.num_plans, slow_tiles.num_too_large) == (3, 0)
    sizes = {each.plan: each.num_bytes for each in slow_tiles.best}
    limit = sizes[plans[0]] - 1
    sharing = search(estimator_of(tmp_path / "a", 1.0), plans[:1], limit)
    assert [each.plan.zero for each in sharing.best] == [1]  # the lowest with which it fits
    own = replace(plans[0], zero=2)
    assert estimator_of(tmp_path / "a", 1.0).estimate(own, limit).plan == own  # or its own
    nothing = search(estimator_of(tmp_path / "a", 1.0), plans, 1000)
    assert (nothing.best, nothing.num_too_large) == ((), 3)
    assert "none fits; the smallest needs" in "\n".join(ranked(nothing, 2, 1000, []))


def test_no_plan_at_all_is_one_message(tmp_path: Path) -> None:
    small = (1, 3, 2, 2)
    with pytest.raises(ValueError, match="no plan is for so many ranks and such batches: raise `batch_size`"):
        search(estimator_of(tmp_path, 0.0), candidates(61, 3, small))


@pytest.mark.exhaustive
def test_each_plan_is_started_by_flags_that_make_it(tmp_path: Path) -> None:
    found = search(estimator_of(tmp_path, 0.1), candidates(4, 11, IMAGE))
    for outlook in found.best:
        assert build_plan(parse(outlook.flags())) == outlook.plan
    lines = ranked(found, 4, None, ["--model", "small_resnet", "--stages", "3", "--data=2"])
    assert lines[0] == f"{found.num_plans} plans for 4 ranks looked at"
    assert lines[-10].startswith("1: mpirun -n 4 python -m mpi4dl.train --model small_resnet ")
    assert "--stages 3" not in lines[-10]


# For each field of a plan another value than the default's, in a plan that may have it.
OTHER = {
    "tiles": Plan(((2, 1), (1, 1))),
    "batch_ways": Plan(((1, 1),) * 2, (2, 1)),
    "data": Plan(data=3),
    "microbatches": Plan(microbatches=6),
    "schedule": Plan(((1, 1),) * 2, microbatches=2, schedule="zero-bubble"),
    "bidirectional": Plan(((1, 1),) * 2, bidirectional=1),
    "chunks": Plan(((1, 1),) * 2, microbatches=2, schedule="interleaved", chunks=2),
    "zero": Plan(data=2, zero=3),
    "tensor": Plan(tensor=2),
    "sequence": Plan(tensor=2, sequence=True),
    "experts": Plan(experts=2),
    "moe": Plan(tensor=2, experts=2, moe="expert"),
}


def test_every_field_of_a_plan_is_an_option_of_the_same_default() -> None:
    """A new field without an option fails here, and so does one that this table does not try."""
    options = options_of(Config)
    assert set(Plan.options()) <= set(options)
    assert {name: options[name].default for name in Plan.options()} == Plan().asked()
    assert [*OTHER] == [each.name for each in fields(Plan) if not each.metadata["derived"]]
    assert all(getattr(plan, name) != getattr(Plan(), name) for name, plan in OTHER.items())


@pytest.mark.parametrize("given", OTHER)
@pytest.mark.parametrize("name", OTHER)
def test_a_plan_makes_the_command_that_makes_it(tmp_path: Path, name: str, given: str) -> None:
    """Whatever other plan the flags, or the file, of the user had, with the other values of the user kept."""
    chosen = PlanEstimate(OTHER[name], 1.0, 1, True)
    usual = PlanEstimate(OTHER[given], 1.0, 1, True).flags()
    asked = ["--lr", "0.5", *usual, "--recompute", "--stream=4x4", "--stream-until", "layer1", "--flip"]
    (tmp_path / "run.toml").write_text(to_toml(parse(["--balance", "3,4,4", *asked])))
    for flags in (asked, ["--config", str(tmp_path / "run.toml")]):
        made = parse(chosen.flags(flags))
        assert build_plan(made) == OTHER[name]
        assert (made.optimizer.lr, made.training.recompute, made.parallel.stream) == (0.5, False, None)
        assert (made.parallel.stream_until, made.parallel.balance) == (None, "auto")


def test_the_words_of_a_plan_tell_it_from_others() -> None:
    assert len({plan.describe() for plan in OTHER.values()}) == len(OTHER)
    assert [plan for plan in OTHER.values() if not plan.is_told_by(plan.describe())] == []
    older = OTHER["moe"].describe().replace(", moe(expert)", "")  # as checkpoints had it
    assert OTHER["moe"].is_told_by(older)
    assert OTHER["moe"].is_told_by(f"{older}, moe-pieces(2)")
    assert not OTHER["sequence"].is_told_by(older)


def test_batches_that_are_accumulated_are_microbatches_of_the_plan(tmp_path: Path) -> None:
    given = ["--accumulate", "4", "--batch-size", "2"]
    plans = list(candidates(2, 11, (8, 3, 32, 32), accumulate=4))
    assert {plan.num_microbatches % 4 for plan in plans} == {0}
    for plan in plans:
        assert build_plan(parse(PlanEstimate(plan, 1.0, 1, True).flags(given))) == plan


def test_what_is_not_searched_stays_where_it_can_be() -> None:
    kept = {"sequence": True, "moe": "tensor"}
    plans = set(candidates(4, 11, (8, 16), [Degrees(), Degrees(2, 2, True)], kept))
    assert {(plan.tensor, plan.sequence, plan.moe) for plan in plans} == {(1, False, "tensor"), (2, True, "expert")}


def test_what_the_plan_decides_is_taken_out_of_the_flags() -> None:
    given = ["--lr", "1", "--tiles", "2x2", "--zero=3", "--flip", "--experts", "2", "--sequence", "--moe=expert"]
    assert PlanEstimate(Plan(), 1.0, 1, True).flags(given) == ["--lr", "1", "--flip"]


@pytest.mark.parametrize("plan", [Plan(microbatches=4), Plan(((1, 2), (1, 1)), microbatches=4)])
def test_the_overview_and_the_search_need_the_same_bytes(tmp_path: Path, plan: Plan) -> None:
    """Of a plan as it is, and with blocks that are recomputed, which takes as long in both."""
    estimator = estimator_of(tmp_path, 0.0)
    how = {"profiler": estimator.profiler, "optimizer": estimator.optimizer, "allocator": OF_TENSORS}
    usual = estimator.estimate(plan, float("inf"))
    for found in (usual, estimator.estimate(plan, usual.num_bytes - 1)):
        recompute, chosen = found.recompute, found.plan
        seen = summary_of("small_resnet", build, chosen, IMAGE, balance="auto", recompute=recompute, **how)
        assert max(seen.rank_memory.of_ranks(chosen.zero)) == found.num_bytes
        assert found.time is not None
        assert found.time.simulation.makespan_seconds == pytest.approx(seen.simulation.makespan_seconds)
        assert IMAGE[0] / found.time.seconds == pytest.approx(found.samples_per_second)
    assert recompute or chosen.zero
