"""Overviews: what they count against plain PyTorch and the balance, and what they say, by literal equality."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpi4dl import models
from mpi4dl.comm.traffic import Round
from mpi4dl.estimate.summary import PlanSummary
from mpi4dl.parallel.costs import cost_model
from mpi4dl.parallel.costs.cost_model import LINK, MESSAGE_SECONDS, PYTHON, Link, Profiler
from mpi4dl.parallel.costs.meter import UnitCosts
from mpi4dl.parallel.costs.sites import Site
from mpi4dl.parallel.costs.store import Store
from mpi4dl.parallel.costs.timing import Seconds
from mpi4dl.parallel.costs.units import count_bytes
from mpi4dl.parallel.cut import choose_cut
from mpi4dl.parallel.pipeline.split import Cuttable, outline
from mpi4dl.parallel.plan import Plan
from tests.support.counting import count_flops, summary_of

IMAGE = (8, 3, 64, 64)


def build() -> nn.Module:
    return models.build("resnet_v2", 10, depth=11)


def planned(plan: Plan, image: tuple[int, int, int, int] = IMAGE, **options: Any) -> PlanSummary:
    return summary_of("resnet_v2", build, plan, image, **options)


def test_stages_on_tiles() -> None:
    plan = Plan.of(stages=2, tiles=[(1, 2), (1, 1)], microbatches=4)
    expected = """\
        resnet_v2, 126,746 parameters, on 3 ranks: stages(2: 1x2 + 1x1 tiles) x data(1), microbatches(4), 1f1b, \
images of 64 x 64 px, batches of 8
        start: mpirun -n 3 python -m mpi4dl.train

        stage  ranks  tiles  ways  units                       parameters   FLOPs  cost/mean  hands on
            0    0-1  1x2       1  3: stem .. stage2_block1        28,944  65.0 %       0.96   1.0 MiB
            1      2  1x1       1  4: stage3_block1 .. head.2      97,802  35.0 %       1.04         -
        a microbatch of 2: 0.2755 GFLOP forward; cost/mean: of a rank's time; hands on: from all ranks of the stage \
together

        images read of each batch, from the first number up to, not including, the second:
          rank 0: rows 0-64, columns 0-32 of samples 0-8
          rank 1: rows 0-64, columns 32-64 of samples 0-8
          1 rank reads none

        a step, simulated (50 GFLOP/s a rank, a backward as two forwards; messages take no time; activations in fp32, \
none recomputed):
          ranks 0-1: at most 2 microbatches with 8.1 MiB of activations, idle 24.7 %
          rank 2: at most 1 microbatch with 3.5 MiB of activations, idle 18.8 %
        with gradients and optimizer 0.0285 s; of the rank that works longest: arithmetic 81 %, idle 19 %
        rank 0 |F0 F1        B0--- F2 B1--- F3  B2---     B3---
        rank 1 |F0 F1        B0--- F2 B1--- F3  B2---     B3---
        rank 2 |   F0 B0---- F1 B1--- F2- B2--- F3 B3----
        0.02853 s, bubble 22.7 % over all ranks, at most 8.135 MiB of activations on a rank"""
    assert str(planned(plan, command="mpirun -n 3 python -m mpi4dl.train")) == dedent(expected)


def test_two_directions_and_replicas() -> None:
    plan = Plan.of(stages=2, data=2, microbatches=1, bidirectional=2)
    expected = """\
        resnet_v2, 126,746 parameters, on 4 ranks: stages(2: 1x1 + 1x1 tiles) x data(2), microbatches(4), 1f1b, \
bidirectional(2), images of 64 x 64 px, batches of 8

        stage  ranks  mirrored  tiles  ways  units                       parameters   FLOPs  cost/mean  hands on
            0      0         1  1x1       1  3: stem .. stage2_block1        28,944  65.0 %       1.30   1.0 MiB
            1      1         0  1x1       1  4: stage3_block1 .. head.2      97,802  35.0 %       0.70         -
        a microbatch of 2: 0.2755 GFLOP forward; cost/mean: of a rank's time; hands on: from all ranks of the stage \
together
        replica d of 2 has these ranks + d x 2

        images read of each batch, from the first number up to, not including, the second:
          rank 0: rows 0-64, columns 0-64 of samples 0-1, 4-5
          rank 1: rows 0-64, columns 0-64 of samples 2-3, 6-7
          rank 2: rows 0-64, columns 0-64 of samples 1-2, 5-6
          rank 3: rows 0-64, columns 0-64 of samples 3-4, 7-8

        a step, simulated (50 GFLOP/s a rank, a backward as two forwards; messages take no time; activations in fp32, \
none recomputed):
          ranks 0-1: at most 1 microbatch with 4.1 MiB of activations, idle 40.3 %
        with gradients and optimizer 0.0277 s; of the rank that works longest: arithmetic 60 %, idle 40 %
        rank 0 |F0---          B0-------- f0 b0--- F1--                B1-------- f1 b1---
        rank 1 |      F0 B0--- f0--                b0-------- F1 B1--- f1--                b1--------
        0.02769 s, bubble 40.3 % over all ranks, at most 4.05 MiB of activations on a rank"""
    assert str(planned(plan)) == dedent(expected)


def test_one_stage() -> None:
    expected = """\
        resnet_v2, 126,746 parameters, on 1 rank: tiles(1x1) x data(1), images of 64 x 64 px, batches of 8

        stage  ranks  tiles  ways  units              parameters    FLOPs
            0      0  1x1       1  7: stem .. head.2     126,746  100.0 %
        a microbatch of 8: 1.102 GFLOP forward

        images read of each batch, from the first number up to, not including, the second:
          rank 0: rows 0-64, columns 0-64 of samples 0-8

        a step, simulated (50 GFLOP/s a rank, a backward as two forwards; messages take no time; activations in fp32, \
none recomputed):
          rank 0: at most 1 microbatch with 46.4 MiB of activations, idle 0.0 %
        with gradients and optimizer 0.0661 s; of the rank that works longest: arithmetic 100 %
        rank 0 |F0 B0---
        0.06613 s, bubble 0.0 % over all ranks, at most 46.39 MiB of activations on a rank"""
    assert str(planned(Plan())) == dedent(expected)


class Undecided(nn.Module):
    """A model that cannot be traced: what it does depends on a shape that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean((2, 3)) if len([*x]) > 1 else x[:, :, 0, 0])


def test_one_stage_needs_no_model_that_can_be_traced() -> None:
    with pytest.raises(ValueError, match="traced"):
        Cuttable(outline(Undecided))
    lines = str(summary_of("undecided", Undecided, Plan(), (2, 3, 4, 4))).splitlines()
    assert lines[2:4] == [
        "stage  ranks  tiles  ways  parameters    FLOPs",
        "    0      0  1x1       1           8  100.0 %",
    ]


@pytest.mark.parametrize("balance", ["flops", "memory", (2, 4, 1)])
@pytest.mark.sample(1)
def test_stages_are_cut_as_for_training(balance: Any) -> None:
    plan = Plan.of(stages=3, tiles=[(2, 1), (1, 1), (1, 1)], microbatches=2, batch_ways=(1, 2, 1))
    counts, _ = choose_cut(Cuttable(outline(build)), plan, None, balance, (4, 3, 64, 64))
    assert tuple(len(work.units) for work in planned(plan, balance=balance).work) == counts


def test_work_is_counted_as_the_balance_counts_it() -> None:
    cuttable, image = Cuttable(outline(build)), (2, 3, 64, 64)
    work = planned(Plan.of(stages=3, microbatches=4), balance=(2, 2, 3)).work
    flops = count_flops(cuttable, image)
    assert [stage.forward_flops for stage in work] == [sum(flops[:2]), sum(flops[2:4]), sum(flops[4:])]
    assert [stage.num_parameters for stage in work] == [
        sum(p.numel() for p in stage.parameters()) for stage in cuttable.stages((2, 2, 3))
    ]
    (whole,) = planned(Plan.of(microbatches=4)).rank_memory.stages
    kept_anyway = [*cuttable.model.parameters(), *(b for b in cuttable.model.buffers() if b.is_floating_point())]
    assert whole.kept == sum(count_bytes(cuttable, image)) - sum(t.nbytes for t in kept_anyway)


class Overlapping(nn.Module):
    """On an image of 2 x 2 px, a cut in front of `second` hands on 12 floats to it, and 3 past it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sigmoid(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        small = x[:, :, 0, 0]
        return self.second(self.first(x)).mean((2, 3)) + small


def test_what_is_handed_on_is_counted_once_whoever_needs_it() -> None:
    found = summary_of(
        "overlapping", Overlapping, Plan.of(stages=2), (1, 3, 2, 2), balance=by_name("second", Overlapping)
    )
    assert [work.output_bytes for work in found.work] == [4 * (12 + 3), 0]


def by_name(first_of_second: str, make: Callable[[], nn.Module]) -> tuple[int, int]:
    names = Cuttable(outline(make)).names
    return names.index(first_of_second), len(names) - names.index(first_of_second)


def test_a_stage_without_parameters_keeps_what_the_backward_of_others_needs() -> None:
    """And what the stage before handed on."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Tanh(), nn.Flatten())

    found = summary_of("small", make, Plan.of(stages=2), (1, 3, 2, 2), balance=(1, 2))
    assert [stage.kept for stage in found.rank_memory.stages] == [4 * 3 * 2 * 2, 4 * (2 + 2) * 2 * 2]


def test_ranks_share_the_work_of_a_stage_over_tiles_ways_and_replicas() -> None:
    alone = planned(Plan.of(stages=2, microbatches=2), balance=(3, 4))
    shared = planned(
        Plan.of(stages=2, microbatches=2, tiles=[(2, 1), (1, 1)], batch_ways=(2, 1), data=2), balance=(3, 4)
    )
    assert [a / b for a, b in zip(alone.costs.forward_seconds, shared.costs.forward_seconds, strict=True)] == [8.0, 2.0]
    # Halos are kept too, but less by a norm over ranks than by PyTorch's.
    assert shared.costs.activation_bytes[0] == pytest.approx(alone.costs.activation_bytes[0] / 8, rel=0.05)
    assert shared.work == alone.work


def profiler(tmp_path: Path, **options: Any) -> Profiler:
    return Profiler(Store(tmp_path), **options)


def test_seconds_follow_the_speed_of_a_rank(tmp_path: Path) -> None:
    plan = Plan.of(stages=2, microbatches=4)
    slow, fast = (planned(plan, profiler=profiler(tmp_path, gflops=gflops)) for gflops in (1.0, 4.0))
    assert slow.simulation.makespan_seconds == pytest.approx(4 * fast.simulation.makespan_seconds)
    assert slow.costs.forward_seconds[0] == pytest.approx(slow.work[0].forward_flops / 1e9)
    assert slow.costs.backward_seconds == tuple(2 * seconds for seconds in slow.costs.forward_seconds)


def test_timed_seconds_cut_the_model_and_make_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a third of an image the first units take as long as on all of it; a unit makes two exchanges of 1 s."""
    exchanges = (Round("exchange", (0, 1, 2), 2, (((0, 0, 1), 8),)),)

    def time_units(cuttable: Cuttable, site: Site, *_: Any) -> Seconds:
        first = 9.0 if site.shape.size == 1 else 8.0
        return np.array([(n, 2 * n, 0) for n in (first, 1, 1, 1, 3, 2, 1)])

    monkeypatch.setattr(cost_model, "cores", lambda: 4)
    monkeypatch.setattr(cost_model, "count_units", lambda *_: (UnitCosts(there=exchanges, back=exchanges),) * 7)
    timing = profiler(tmp_path, time=time_units)
    timing.store.put(LINK, Link(1.0, 0.0))
    found = planned(Plan.of(stages=2, tiles=[(1, 1), (1, 3)], microbatches=2), balance="auto", profiler=timing)
    assert [len(work.units) for work in found.work] == [4, 3]
    alone = PYTHON.action_seconds + 4 * 2 * PYTHON.round_seconds
    shared = PYTHON.action_seconds + 3 * 2 * (PYTHON.round_seconds + MESSAGE_SECONDS)
    assert found.costs.forward_seconds == pytest.approx((12.0 + alone, 6.0 + 3 * 2 + shared))
    assert found.costs.backward_seconds == pytest.approx((24.0 + alone, 12.0 + 3 * 2 + shared))
    assert found.costs.communication_seconds == (1.0 + 3 * MESSAGE_SECONDS,)  # to each of three ranks
    assert "(units timed on their tiles, on 1 thread here; " in str(found)


def test_many_readers_and_many_samples_are_shortened() -> None:
    plan = Plan.of(tiles=[(3, 4)], data=2, microbatches=6)
    lines = planned(plan, (12, 3, 64, 64)).images()
    assert lines[1] == "  rank 0: rows 0-21, columns 0-16 of samples 0-1, 2-3, 4-5, 6-7, ..."
    assert lines[-2:] == [
        "  rank 9: rows 42-64, columns 16-32 of samples 0-1, 2-3, 4-5, 6-7, ...",
        "  ... and 14 ranks more",
    ]


def test_a_rank_that_reads_for_both_directions_says_both() -> None:
    plan = Plan.of(stages=2, tiles=[(1, 2), (1, 1)], bidirectional=1)
    assert planned(plan, balance=(3, 4)).images()[1:] == [
        "  rank 0: rows 0-64, columns 0-32 of samples 0-4",
        "  rank 1: rows 0-64, columns 32-64 of samples 0-8",
        "  rank 2: rows 0-64, columns 0-32 of samples 4-8",
    ]


@pytest.mark.parametrize(
    ("plan", "image", "message"),
    [
        (Plan(data=9), IMAGE, "`data` 9 replicas cannot share a batch of 8"),
        (Plan.of(stages=8), IMAGE, "resnet_v2: Sequential has 7 units, too few for 8 stages"),
        (Plan(tiles=((1, 65),)), IMAGE, "`tiles` 1x65 cuts images into 65 tiles along their cols"),
        (Plan(), (2, 4, 64, 64), "resnet_v2: cannot take images of 4 x 64 x 64 (channels, height, width): Invalid"),
        (
            Plan.of(stages=2),
            (2, 4, 64, 64),
            "resnet_v2: cannot take images of 4 x 64 x 64 (channels, height, width): Invalid",
        ),
    ],
)
def test_what_does_not_fit_is_refused(plan: Plan, image: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is read below
        planned(plan, image)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_too_few_units_to_time_are_refused_before_they_are_timed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="7 units, too few for 8 stages"):
        planned(Plan.of(stages=8), balance="auto", profiler=profiler(tmp_path, time=lambda *_: pytest.fail("timed")))


def test_nothing_is_allocated() -> None:
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.numel() > 1:
                seen.append(result.device.type)
            return result

    with Watch():
        found = planned(Plan.of(stages=2, microbatches=2), (2, 3, 32768, 32768))
    assert set(seen) == {"meta"}
    assert found.rank_memory.stages[0].kept > 2**34
