"""Schedules against tables drawn by hand."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl.parallel.tables import schedules
from mpi4dl.parallel.tables.drawing import as_text
from mpi4dl.parallel.tables.schedules import (
    SCHEDULES,
    Action,
    Placement,
    Schedule,
    Table,
    forward_only,
    gems,
    interleaved,
    table_for,
)
from mpi4dl.parallel.tables.simulator import Costs, check, simulate
from tests.parallel.tables.tables import can_be_played, read, tables

# Tables by schedule, placement, microbatches and pairs of waves. In the last one, ranks 1 to 3 hold a tile of the first
# stage of both copies; ranks 0 and 4 hold a tile of one and all of a second.
DRAWN = {
    ("layer", Placement.row([1] * 3), 2, 1): """
        F0 B0 F1 B1
        F0 B0 F1 B1
        F0 B0 F1 B1
    """,
    ("gpipe", Placement.row([1] * 3), 3, 1): """
        F0 F1 F2 B0 B1 B2
        F0 F1 F2 B0 B1 B2
        F0 F1 F2 B0 B1 B2
    """,
    ("1f1b", Placement.row([1] * 4), 2, 1): """
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 F1 B0 B1
        F0 B0 F1 B1
    """,
    ("1f1b", Placement.row([1] * 4), 4, 1): """
        F0 F1 F2 F3 B0 B1 B2 B3
        F0 F1 F2 B0 F3 B1 B2 B3
        F0 F1 B0 F2 B1 F3 B2 B3
        F0 B0 F1 B1 F2 B2 F3 B3
    """,
    ("1f1b", Placement.row([1] * 4), 5, 1): """
        F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
        F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
        F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
    """,
    ("1f1b", Placement.row([1] * 4), 6, 1): """
        F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5
        F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
        F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5
        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
    """,
    ("zero-bubble", Placement.row([1] * 3), 2, 1): """
        F0 F1 I0 W0 I1 W1
        F0 F1 I0 I1 W0 W1
        F0 I0 F1 I1 W0 W1
    """,
    ("zero-bubble", Placement.row([1] * 3), 4, 1): """
        F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    ("layer", Placement.row([1] * 2, directions=2), 1, 1): """
        F0 B0 f0 b0
        F0 B0 f0 b0
    """,
    ("layer", Placement.row([1] * 3, directions=2), 1, 2): """
        F0 B0 f0 b0 F1 B1 f1 b1
        F0 B0 f0 b0 F1 B1 f1 b1
        F0 B0 f0 b0 F1 B1 f1 b1
    """,
    ("gpipe", Placement.row([1] * 3, directions=2), 2, 2): """
        F0 F1 B0 B1 f0 f1 b0 b1 F2 F3 B2 B3 f2 f3 b2 b3
        F0 F1 B0 B1 f0 f1 b0 b1 F2 F3 B2 B3 f2 f3 b2 b3
        F0 F1 B0 B1 f0 f1 b0 b1 F2 F3 B2 B3 f2 f3 b2 b3
    """,
    ("1f1b", Placement.row([1] * 4, directions=2), 3, 1): """
        F0 F1 F2 B0 B1 B2 f0 b0 f1 b1 f2 b2
        F0 F1 F2 B0 B1 B2 f0 f1 b0 f2 b1 b2
        F0 F1 B0 F2 B1 B2 f0 f1 f2 b0 b1 b2
        F0 B0 F1 B1 F2 B2 f0 f1 f2 b0 b1 b2
    """,
    ("interleaved", Placement.row((1,) * 2, chunks=2), 4, 1): """
        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
    """,
    ("interleaved", Placement.row((1,) * 2, chunks=2), 3, 1): """
        F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 B2.1 F2.2 B0.0 B0.1 B2.2 B0.2
        F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 B1.1 F3.2 B3.2 B1.2
    """,
    ("1f1b", Placement.row([4, 1], directions=2), 2, 1): """
        F0.0 F0.1 B0.0 B0.1 f1.0 b1.0 f1.1 b1.1
        F0.0 F0.1 B0.0 B0.1 f0.0 f0.1 b0.0 b0.1
        F0.0 F0.1 B0.0 B0.1 f0.0 f0.1 b0.0 b0.1
        F0.0 F0.1 B0.0 B0.1 f0.0 f0.1 b0.0 b0.1
        F1.0 B1.0 F1.1 B1.1 f0.0 f0.1 b0.0 b0.1
    """,
}


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{case[0]}-{case[1].num_ranks}-{case[2]}x{case[3]}")
def test_a_table_is_as_drawn(case: tuple[str, Placement, int, int]) -> None:
    name, placement, num_microbatches, pairs = case
    assert table_for(name, placement, num_microbatches, pairs) == read(DRAWN[case], placement)


def drawing_above(schedule: Schedule) -> str:
    comment = inspect.getcomments(schedule)
    assert comment is not None
    return "\n".join(line[6:] for line in comment.splitlines() if "|" in line)


def draw(table: Table, placement: Placement) -> str:
    """Every action taking a second."""
    backward = 2.0 if any(action.kind == "input" for row in table for action in row) else 1.0
    return as_text(simulate(table, placement, Costs.equal(placement.num_stages, 1.0, backward))).rpartition("\n")[0]


@pytest.mark.parametrize(
    ("function", "placement", "num_microbatches"),
    [
        ("layer", Placement.row([1] * 3), 2),
        ("gpipe", Placement.row([1] * 3), 3),
        ("one_f_one_b", Placement.row([1] * 4), 4),
        ("interleaved", Placement.row((1,) * 2, chunks=2), 4),
        ("zero_bubble", Placement.row([1] * 3), 4),
        ("forward_only", Placement.row([1] * 3), 3),
    ],
)
def test_the_drawing_above_a_schedule_is_its_table(function: str, placement: Placement, num_microbatches: int) -> None:
    schedule = getattr(schedules, function)
    assert drawing_above(schedule) == draw(schedule(placement, num_microbatches), placement)


def test_the_drawing_above_gems_is_its_table() -> None:
    placement = Placement.row([1] * 3, directions=2)
    assert drawing_above(gems) == draw(gems(placement, 1, 1, schedules.layer), placement)


@settings(max_examples=200, deadline=None)
@given(tables(), st.integers(0, 10**6))
def test_every_table_is_sound_and_can_be_played_at_any_speed(case: tuple[Table, Placement], seed: int) -> None:
    table, placement = case
    report = check(table, placement)
    assert min(report.num_microbatches) >= 1
    assert placement.rows(report.order) == table
    assert can_be_played(table, placement, seed)


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 13])
def test_peaks_of_live_microbatches(num_ranks: int, num_microbatches: int) -> None:
    placement = Placement.row([1] * num_ranks)

    def peaks(name: str) -> tuple[int, ...]:
        return check(table_for(name, placement, num_microbatches), placement).peak_live

    assert peaks("layer") == (1,) * num_ranks
    assert peaks("gpipe") == (num_microbatches,) * num_ranks
    assert peaks("1f1b") == tuple(min(num_ranks - stage, num_microbatches) for stage in range(num_ranks))
    assert peaks("zero-bubble") == (min(num_ranks, num_microbatches),) * num_ranks


@pytest.mark.parametrize("name", ["layer", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_gems_keeps_no_more_than_one_direction(name: str, pairs: int) -> None:
    one, two = Placement.row([2, 1, 1]), Placement.row([2, 1, 1], directions=2)
    report = check(table_for(name, two, 5, pairs), two)
    assert max(report.peak_live) == max(check(table_for(name, one, 5), one).peak_live)
    assert report.num_microbatches == (5 * pairs, 5 * pairs)


def test_evaluation_keeps_nothing_and_one_direction_of_two_suffices() -> None:
    placement = Placement.row([2, 1], directions=2)
    table = forward_only(placement.only(0), 4)
    report = check(table, placement)
    assert report.num_microbatches == (4, 0)
    assert report.peak_live == (1, 1, 1)
    assert table[2] == tuple(Action("forward", 0, 1, microbatch) for microbatch in range(4))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_microbatches_are_refused(name: str) -> None:
    placement = Placement.row((1,) * 2, chunks=2)
    with pytest.raises(ValueError, match=r"num_microbatches \(=0\) must be at least 1"):
        table_for(name, placement, 0)


def test_wrong_schedules_are_refused() -> None:
    one, two = Placement.row([1, 1]), Placement.row([1, 1], directions=2)
    with pytest.raises(ValueError, match="no schedule 'gpip': choose one of layer, gpipe, 1f1b, interleaved"):
        table_for("gpip", one, 1)
    with pytest.raises(ValueError, match="runs one direction, but the placement has 2"):
        schedules.gpipe(two, 1)
    with pytest.raises(ValueError, match="give the placement directions=2"):
        gems(one, 1, 1, schedules.gpipe)
    with pytest.raises(ValueError, match=r"pairs \(=0\) of waves"):
        table_for("gpipe", two, 1, pairs=0)


@pytest.mark.parametrize(
    "stages",
    [((0,), (1,)), ((0,), (1,), (0,)), ((0,), (1,), (1,), (0,)), ((0, 1), (2,), (1, 0), (2,))],
)
def test_interleaved_needs_stages_dealt_out_evenly(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="deals its stages out like cards"):
        interleaved(Placement((stages,)), 2)
