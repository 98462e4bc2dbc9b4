"""mpi4dl.parallel.plan: what a plan derives, by hand and by properties, and what it says of plans that cannot be."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl.geometry import Box, Interval
from mpi4dl.parallel.inputs import Microbatch, OwnSizes, Read, nested_cuts
from mpi4dl.parallel.plan import Plan
from tests.support.brute_force import patient, quick

DRAWN = Plan(((2, 2), (1, 2), (1, 1)), data=2)
MIRRORED = Plan(((1, 2), (1, 1)), data=2, microbatches=2, bidirectional=2)

grids = st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    places = draw(st.integers(1, 4))
    return Plan(
        tiles=tuple(draw(grids) for _ in range(places)),
        batch_ways=tuple(draw(st.integers(1, 3)) for _ in range(places)),
        data=draw(st.integers(1, 3)),
        microbatches=draw(st.integers(1, 4)),
        bidirectional=draw(st.integers(0, 2)) if places > 1 else 0,
    )


def test_the_drawn_plan() -> None:
    assert [DRAWN.ranks(0, stage) for stage in range(3)] == [(0, 1, 2, 3, 7, 8, 9, 10), (4, 5, 11, 12), (6, 13)]
    assert [DRAWN.shape(stage) for stage in range(3)] == [(2, 2, 2), (2, 1, 2), (2, 1, 1)]
    assert (DRAWN.num_ranks, DRAWN.ranks_per_replica, DRAWN.ranks_per_place) == (14, 7, (4, 2, 1))
    assert (DRAWN.num_stages, DRAWN.num_directions, DRAWN.num_microbatches) == (3, 1, 1)
    assert [DRAWN.held_by(rank) for rank in (0, 5, 6, 10, 13)] == [((0, s),) for s in (0, 1, 2, 0, 2)]


def test_the_mirrored_copy_lies_the_other_way_round_in_each_replica() -> None:
    assert [MIRRORED.ranks(0, stage) for stage in (0, 1)] == [(0, 1, 3, 4), (2, 5)]
    assert [MIRRORED.ranks(1, stage) for stage in (0, 1)] == [(2, 1, 5, 4), (0, 3)]
    assert MIRRORED.holders(0) == (0, 2, 1, 3, 5, 4)
    assert MIRRORED.holders(1) == (2, 0, 5, 3)
    assert [MIRRORED.held_by(rank) for rank in (0, 1, 2)] == [((0, 0), (1, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 0))]
    assert MIRRORED.num_microbatches == 8


def test_chunks_are_dealt_out_over_the_same_ranks() -> None:
    plan = Plan(((1, 2), (1, 1)), schedule="interleaved", chunks=2)
    assert [plan.ranks(0, stage) for stage in range(4)] == [(0, 1), (2,), (0, 1), (2,)]
    assert plan.held_by(1) == ((0, 0), (0, 2))
    assert [plan.shape(stage) for stage in range(4)] == [(1, 1, 2), (1, 1, 1)] * 2


@patient
@given(plans())
def test_every_rank_holds_what_it_is_listed_for(plan: Plan) -> None:
    listed: dict[int, set[tuple[int, int]]] = {rank: set() for rank in range(plan.num_ranks)}
    for direction in range(plan.num_directions):
        for stage in range(plan.num_stages):
            ranks = plan.ranks(direction, stage)
            assert len(ranks) == plan.shape(stage).size
            assert set(ranks) <= set(plan.holders(stage))
            for rank in ranks:
                listed[rank].add((direction, stage))
    assert listed == {rank: set(plan.held_by(rank)) for rank in listed}
    assert all(len(held) == plan.num_directions for held in listed.values())


def test_stages_are_plain_behind_the_last_that_is_shared_out() -> None:
    plan = Plan(((1, 1), (1, 2), (1, 1), (1, 1)), (1, 1, 2, 1))
    assert [plan.is_plain(stage) for stage in range(4)] == [False, False, False, True]
    assert [plan.tracks_batch(stage) for stage in range(4)] == [True, True, True, False]


def test_one_value_of_a_flag_stands_for_all_stages() -> None:
    assert Plan.of() == Plan()
    assert Plan.of(3) == Plan(((1, 1),) * 3)
    assert Plan.of(2, tiles=[(1, 2)], batch_ways=[2]) == Plan(((1, 2), (1, 2)), (2, 2))
    assert Plan.of(2, tiles=[(1, 2), (1, 1)], data=2) == Plan(((1, 2), (1, 1)), (1, 1), 2)
    assert Plan.of(4, schedule="interleaved", chunks=2) == Plan(((1, 1),) * 2, schedule="interleaved", chunks=2)


WRONG_FLAGS: list[tuple[dict[str, Any], str]] = [
    (
        {"stages": 3, "schedule": "interleaved", "chunks": 2},
        "`stages` 3 cannot be dealt out 2 times: `chunks` must divide it",
    ),
    (
        {"stages": 3, "tiles": [(1, 2), (1, 1)]},
        "`tiles` has 2 entries, but `stages` 3 needs 1 for all, or 3",
    ),
    (
        {"stages": 4, "batch_ways": [1, 2, 1], "schedule": "interleaved", "chunks": 2},
        "`batch_ways` has 3 entries, but `stages` 4 needs 1 for all, or 2 (4 stages in 2 chunks)",
    ),
    (
        {"schedule": "fastest"},
        "there is no schedule 'fastest': choose one of layer, gpipe, 1f1b, interleaved, zero-bubble",
    ),
    (
        {"stages": 2, "schedule": "interleaved"},
        "`schedule` interleaved with `chunks` 1: the interleaved schedule needs 2 chunks or more, and no other "
        "schedule can have them",
    ),
    (
        {"stages": 2, "chunks": 2},
        "`schedule` 1f1b with `chunks` 2: the interleaved schedule needs 2 chunks or more, and no other schedule can "
        "have them",
    ),
    (
        {"bidirectional": 1},
        "`bidirectional` 1 lays a mirrored copy over the ranks: it needs at least 2 stages of one chunk each, but "
        "`stages` is 1 and `chunks` 1",
    ),
    (
        {"stages": 4, "bidirectional": 1, "schedule": "interleaved", "chunks": 2},
        "`bidirectional` 1 lays a mirrored copy over the ranks: it needs at least 2 stages of one chunk each, but "
        "`stages` is 4 and `chunks` 2",
    ),
]


@pytest.mark.parametrize(("flags", "sentence"), WRONG_FLAGS)
def test_flags_that_do_not_fit_together(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"`|no schedule") as caught:
        Plan.of(**flags)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "numbers",
    [
        {"tiles": ()},
        {"tiles": ((0, 1),)},
        {"data": 0},
        {"microbatches": 0},
        {"bidirectional": -1},
        {"batch_ways": (1, 1)},
        {"batch_ways": (0,)},
    ],
    ids=str,
)
def test_numbers_that_no_plan_can_have(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every number must be at least 1, with one number of batch ways a stage"):
        Plan(**numbers)


WRONG_RUNS = [
    (
        DRAWN,
        (8, (64, 64), 8),
        "stages(3: 2x2 + 1x2 + 1x1 tiles) x data(2) = 14 ranks, but mpirun started 8: start with mpirun -n 14, or "
        "change `stages`, `tiles`, `batch_ways` or `data`",
    ),
    (
        Plan(((1, 2),), (2,), data=2),
        (4, (64, 64), 8),
        "tiles(1x2) x batch-ways(2) x data(2) = 8 ranks, but mpirun started 4: start with mpirun -n 8, or change "
        "`tiles` or `data`",
    ),
    (
        Plan(((2, 1), (1, 1)), (1, 2), schedule="interleaved", chunks=2),
        (2, (64, 64), 8),
        "stages(4 in 2 chunks: 2x1 + 1x1 x 2 ways tiles) x data(1) = 4 ranks, but mpirun started 2: start with "
        "mpirun -n 4, or change `stages`, `tiles`, `batch_ways` or `data`",
    ),
    (
        Plan(((1, 3),)),
        (3, (64, 2), 8),
        "`tiles` 1x3 cuts images into 3 tiles along their cols, of which they have only 2",
    ),
    (
        Plan(((3, 1),)),
        (3, (2, 64), 8),
        "`tiles` 3x1 cuts images into 3 tiles along their rows, of which they have only 2",
    ),
    (
        Plan(microbatches=4),
        (1, (64, 64), 3),
        "`microbatches` 4 cannot share a batch of 3: raise `batch_size` to 4",
    ),
    (
        MIRRORED,
        (6, (64, 64), 7),
        "`microbatches` 2 x 4 (both directions) cannot share a batch of 7: raise `batch_size` to 8",
    ),
    (Plan(data=3), (3, (64, 64), 2), "`data` 3 replicas cannot share a batch of 2: raise `batch_size`"),
    (
        Plan(((1, 1), (1, 1)), (1, 2), data=2, microbatches=2),
        (6, (64, 64), 7),
        "data(2) x batch-ways(2) cannot share a microbatch of 3: raise `batch_size` to 8",
    ),
]


@pytest.mark.parametrize(("plan", "run", "sentence"), WRONG_RUNS, ids=lambda v: str(v) if isinstance(v, Plan) else "")
def test_runs_that_a_plan_does_not_fit(plan: Plan, run: tuple[int, tuple[int, int], int], sentence: str) -> None:
    assert plan.problem(*run) == sentence


@quick
@given(plans(), st.integers(0, 5))
def test_the_batch_that_an_error_asks_for_is_the_smallest_that_fits(plan: Plan, short: int) -> None:
    least = plan.num_microbatches * plan.data * max(plan.batch_ways)
    assert plan.problem(plan.num_ranks, (64, 64), least + short) is None
    assert least == 1 or plan.problem(plan.num_ranks, (64, 64), least - 1) is not None


def test_titles() -> None:
    assert Plan().describe() == "tiles(1x1) x data(1)"
    assert Plan(microbatches=2).describe() == "tiles(1x1) x data(1), microbatches(2), 1f1b"
    assert MIRRORED.describe() == "stages(2: 1x2 + 1x1 tiles) x data(2), microbatches(8), 1f1b, bidirectional(2)"


def test_waves_of_both_directions_take_turns() -> None:
    found = [(m.direction, m.number, *m.samples) for m in MIRRORED.divide(16)]
    assert found == [
        (0, 0, 0, 2),
        (0, 1, 2, 4),
        (1, 0, 4, 6),
        (1, 1, 6, 8),
        (0, 2, 8, 10),
        (0, 3, 10, 12),
        (1, 2, 12, 14),
        (1, 3, 14, 16),
    ]
    assert [(m.direction, m.number, *m.samples) for m in MIRRORED.divide(3, training=False)] == [
        (0, 0, 0, 1),
        (0, 1, 1, 3),
    ]


@quick
@given(plans(), st.integers(0, 40), st.booleans())
def test_microbatches_are_even_parts_of_the_batch_in_order(plan: Plan, num_samples: int, training: bool) -> None:
    num_samples += plan.num_microbatches if training else 0
    divided = plan.divide(num_samples, training)
    assert [m.samples.start for m in divided] == [0, *(m.samples.stop for m in divided[:-1])]
    assert divided[-1].samples.stop == num_samples
    lengths = [m.samples.length for m in divided]
    assert max(lengths) - min(lengths) <= 1
    for microbatch in divided:
        assert len(microbatch.counts) == plan.data * plan.batch_ways[0]
        assert sum(microbatch.counts) == microbatch.samples.length
    if training:
        assert len(divided) == plan.num_microbatches
    else:
        assert {m.direction for m in divided} == {0}
        assert num_samples == 0 or min(lengths) > 0


def test_shares_of_ways_are_cut_out_of_those_of_replicas() -> None:
    plan = Plan(((1, 1), (1, 1)), (2, 1), data=2)
    assert plan.divide(7)[0] == Microbatch(0, 0, (0, 1, 3, 5, 7))
    assert plan.divide(7)[0].counts == (1, 2, 2, 2)


def test_replicas_with_local_batches_share_no_microbatch() -> None:
    plan = Plan(((1, 2), (1, 1)), data=2, microbatches=2, local_batches=True)
    assert [plan.shape(stage) for stage in (0, 1)] == [(1, 1, 2), (1, 1, 1)]
    assert [plan.partners(rank, 0, 0) for rank in (0, 2, 4)] == [(0, 1), (0, 1), (3, 4)]
    assert plan.holders(0) == (0, 1, 3, 4)
    assert not plan.tracks_batch(0)
    first, *_, last = divided = plan.divide(5)
    assert [(m.replica, m.number, m.cuts) for m in divided] == [
        (0, 0, (0, 1)),
        (0, 1, (1, 2)),
        (1, 0, (2, 3)),
        (1, 1, (3, 5)),
    ]
    assert [(m.replica, m.number, m.cuts) for m in plan.divide(3, training=False)] == [
        (0, 0, (0, 1)),
        (1, 0, (1, 2)),
        (1, 1, (2, 3)),
    ]
    sizes = OwnSizes(((4, 6), (4, 6), (2, 2), (8, 4), (8, 4)))
    assert plan.reads(1, divided, sizes)[0] == Read(first, Box(Interval(0, 1), Interval(0, 4), Interval(3, 6)))
    assert plan.reads(3, divided, sizes)[1] == Read(last, Box(Interval(3, 5), Interval(0, 8), Interval(0, 2)))
    assert plan.reads(2, divided, sizes) == ()
    for more in ({"batch_ways": (2, 1)}, {"bidirectional": 1}, {"experts": 2}):
        with pytest.raises(ValueError, match="leave out"):
            Plan(((1, 2), (1, 1)), data=2, local_batches=True, **more)


@quick
@given(st.lists(st.integers(0, 30), min_size=2, max_size=6).map(sorted), st.integers(1, 5))
def test_nested_cuts_keep_the_outer_ones_and_are_even_between_them(outer: list[int], ways: int) -> None:
    cuts = nested_cuts(outer, ways)
    assert list(cuts[::ways]) == outer
    for i in range(len(outer) - 1):
        lengths = [b - a for a, b in pairwise(cuts[i * ways : (i + 1) * ways + 1])]
        assert max(lengths) - min(lengths) <= 1


@quick
@given(plans(), st.integers(1, 30), st.data())
def test_what_is_left_without_some_samples(plan: Plan, num_samples: int, data: st.DataObject) -> None:
    num_samples += plan.num_microbatches - 1
    positions = data.draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples))
    left = [sample for sample in range(num_samples) if sample not in positions]
    for microbatch in plan.divide(num_samples):
        rest = microbatch.without(positions)
        assert (rest.direction, rest.number) == (microbatch.direction, microbatch.number)
        for before, after in zip(pairwise(microbatch.cuts), pairwise(rest.cuts), strict=True):
            assert left[slice(*after)] == [sample for sample in range(*before) if sample not in positions]


def test_what_a_rank_reads() -> None:
    plan = Plan(((1, 2), (1, 1)), data=2, microbatches=2)
    first, second = plan.divide(8)
    right = (Interval(0, 4), Interval(3, 6))
    assert plan.reads(4, (first, second), (4, 6)) == (
        Read(first, Box(Interval(2, 4), *right)),
        Read(second, Box(Interval(6, 8), *right)),
    )
    assert plan.reads(2, (first, second), (4, 6)) == ()


@quick
@given(plans(), st.integers(1, 20), st.integers(1, 7), st.integers(1, 7), st.booleans())
def test_all_ranks_together_read_every_pixel_once(plan: Plan, samples: int, rows: int, cols: int, train: bool) -> None:
    samples += plan.num_microbatches - 1 if train else 0
    microbatches = plan.divide(samples, train)
    times = torch.zeros(samples, rows, cols)
    for rank in range(plan.num_ranks):
        for microbatch, box in plan.reads(rank, microbatches, (rows, cols)):
            assert microbatch.samples.covers(box.batch)
            assert (microbatch.direction, 0) in plan.held_by(rank)
            times[slice(*box.batch), slice(*box.rows), slice(*box.cols)] += 1
    assert torch.equal(times, torch.ones_like(times))


def test_many_stages_alike_are_counted_not_named() -> None:
    assert str(Plan(((2, 2), *[(1, 1)] * 39))) == "stages(40: 2x2 + 39 of 1x1 tiles) x data(1)"


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(zero=3), [(0, 1)]),  # nobody to share with
        (Plan(data=4, zero=3), [(3, 1)]),
        (Plan(((2, 2), (1, 1)), zero=2), [(2, 1), (0, 1)]),
        (Plan(((1, 1), (1, 1)), bidirectional=1, zero=3), [(2, 2), (2, 2)]),  # one rank in each direction
        (Plan(((1, 1), (1, 1)), bidirectional=1, data=2, zero=3), [(3, 2), (3, 2)]),
        (Plan(((1, 1),) * 3, bidirectional=1, data=2, zero=3), [(3, 2), (3, 1), (3, 2)]),  # the middle is in both
        (Plan(((1, 2), (1, 1)), bidirectional=1, zero=3), [(1, 1), (2, 2)]),  # rank 1 holds stage 0 both ways
    ],
    ids=str,
)
def test_what_zero_shares_out_of_each_stage(plan: Plan, expected: list[tuple[int, int]]) -> None:
    assert [plan.zero_at(stage) for stage in range(plan.num_stages)] == expected


TWICE = Plan(((1, 1), (1, 1)), microbatches=2, schedule="interleaved", chunks=2, data=2, zero=3)


@pytest.mark.parametrize(
    ("plan", "stages", "part", "holders", "expected"),
    [
        (Plan(((1, 1), (1, 1)), zero=3), (0, 1), {}, (0, 1), (2, 2)),  # one rank in each stage: nothing to gather
        (Plan(((1, 1), (1, 1)), data=2, zero=3), (0, 1), {}, (0, 1, 2, 3), (3, 2)),
        (Plan(((1, 2), (1, 1)), zero=3), (0, 1), {}, (0, 2, 1), (1, 1)),  # of different sizes
        (Plan(((1, 1), (1, 1)), bidirectional=1, data=2, zero=3), (0, 1), {}, (0, 1, 2, 3), (1, 1)),
        (Plan(((1,), (1,)), tensor=2, data=2, zero=3), (0, 1), {"features": 1}, (1, 3, 5, 7), (3, 2)),
        (Plan(((1,), (1,)), tensor=2, zero=3), (0, 1), {"features": 0}, (0, 2), (2, 2)),
        (Plan(((1,), (1,)), experts=2, data=2, zero=3), (0, 1), {"experts": 1}, (2, 3, 6, 7), (3, 2)),
        (Plan(((1,),), experts=2, tensor=2, zero=1), (0,), {"experts": 1, "features": 0}, (2,), (0, 1)),
        (TWICE, (0, 2), {}, (0, 2), (3, 1)),  # the same ranks have both
        (TWICE, (0, 2, 3), {}, (0, 1, 2, 3), (1, 1)),
    ],
    ids=str,
)
def test_who_holds_what_stages_share(
    plan: Plan, stages: tuple[int, ...], part: dict[str, int], holders: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert plan.holders(*stages, part=part) == holders
    assert plan.zero_at(*stages, part=part) == expected


def test_there_are_four_zero_stages() -> None:
    with pytest.raises(ValueError, match="`zero` 4: the ZeRO stages are 0"):
        Plan(zero=4)


def test_fewer_samples_than_microbatches_cannot_be_trained_on() -> None:
    plan = Plan(((1, 1), (1, 1)), microbatches=4)
    with pytest.raises(ValueError, match=r"4 microbatches, but this one has 3 samples: leave it out, or plan fewer"):
        plan.divide(3)
    assert len(plan.divide(3, training=False)) == 3
