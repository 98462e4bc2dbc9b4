"""Faults in tables are found, and the rank and the action are named."""

import re
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mpi4dl.parallel.tables.schedules import Action, Placement, Table, table_for
from mpi4dl.parallel.tables.simulator import TableError, check
from tests.parallel.tables.tables import can_be_played, read, tables

THREE = Placement.row([1, 1, 1])
TILES = Placement.row([2, 1])
BOTH = Placement.row([1, 1], directions=2)


def with_row(table: Table, rank: int, change: Callable[[list[Action]], object]) -> Table:
    row = list(table[rank])
    change(row)
    return (*table[:rank], tuple(row), *table[rank + 1 :])


def swapped(table: Table, rank: int, i: int, j: int) -> Table:
    def swap(row: list[Action]) -> None:
        row[i], row[j] = row[j], row[i]

    return with_row(table, rank, swap)


FAULTS: dict[str, tuple[Placement, str, str]] = {  # what is said names first who is wrong, and with which action
    "a send dropped": (
        THREE,
        "F0 F1 B0 B1\n F0 B0 F1 B1\n F0 B0 F1",
        "rank 2: backward of stage 2, microbatch 1 is missing, and rank 1 waits for ever to receive from it for "
        "backward of stage 1, microbatch 1",
    ),
    "a tile left alone": (
        TILES,
        "F0 F1 B0 B1\n F0 B0 B1\n F0 B0 F1 B1",
        "rank 1: forward of stage 0, microbatch 1 is missing, and rank 0, which shares the stage, waits in it",
    ),
    "a backward dropped": (
        THREE,
        "F0 B0\n F0\n F0 B0",
        "rank 1: backward of stage 1, microbatch 0 is missing, and rank 0 waits for ever",
    ),
    "backward first": (
        THREE,
        "I0 F0 W0\n F0 I0 W0\n F0 I0 W0",
        "rank 0: input of stage 0, microbatch 0 comes before forward of stage 0, microbatch 0, which it needs",
    ),
    "weight before input": (
        THREE,
        "F0 I0 W0\n F0 W0 I0\n F0 I0 W0",
        "rank 1: weight of stage 1, microbatch 0 comes before input of stage 1, microbatch 0, which it needs",
    ),
    "twice": (
        THREE,
        "F0 B0\n F0 B0 F0\n F0 B0",
        "rank 1: forward of stage 1, microbatch 0 comes twice",
    ),
    "two ways back": (
        THREE,
        "F0 B0\n F0 I0 W0\n F0 I0 W0",
        "rank 0: backward of stage 0, microbatch 0 is in a table of forward, input, weight",
    ),
    "not its own": (
        THREE,
        "F0 B0\n F0 B0 F2.0\n F0 B0",
        "rank 1: forward of stage 2, microbatch 0 is not its to do, for it holds stage 1 of direction 0",
    ),
    "messages overtake": (
        THREE,
        "F0 F1 B0 B1\n F0 F1 B1 B0\n F0 F1 B0 B1",
        "rank 1: backward of stage 1, microbatch 1 comes where microbatch 0 is due",
    ),
    "a microbatch that nobody does": (
        THREE,
        "F0 F2 B0 B2\n F0 F2 B0 B2\n F0 F2 B0 B2",
        "rank 0: forward of stage 0, microbatch 1 is missing",
    ),
    "tiles of a stage in opposite orders": (
        TILES,
        "F0 F1 B0 B1\n F0 B0 F1 B1\n F0 B0 F1 B1",
        "rank 0: waits in a circle: rank 0 does forward of stage 0, microbatch 1 before backward of stage 0, "
        "microbatch 0; rank 1 does backward of stage 0, microbatch 0 before forward of stage 0, microbatch 1",
    ),
    "both directions wait for each other": (
        BOTH,
        "F0 B0 f0 b0\n f0 b0 F0 B0",
        "rank 0 does backward of stage 0, microbatch 0 before backward of stage 1, microbatch 0 of the mirrored",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_rank_and_action(fault: str) -> None:
    placement, drawing, complaint = FAULTS[fault]
    table = read(drawing, placement)
    with pytest.raises(TableError, match=re.escape(complaint)) as caught:
        check(table, placement)
    rank, action = re.search(r"^rank (\d+).*?(\w+ of stage \d+, microbatch \d+)", complaint).groups()  # type: ignore[union-attr]
    assert (caught.value.rank, str(caught.value.action)) == (int(rank), action)


def test_a_circle_is_told_step_by_step() -> None:
    """Rank 0 wants the gradient first; rank 1 wants the next activation first."""
    placement = Placement.row([1, 1])
    with pytest.raises(TableError) as caught:
        check(read("F0 B0 F1 B1\n F0 F1 B0 B1", placement), placement)
    told = str(caught.value)
    assert "rank 0 does backward of stage 0, microbatch 0 before forward of stage 0, microbatch 1" in told
    assert "forward of stage 1, microbatch 1 needs forward of stage 0, microbatch 1" in told
    assert "rank 1 does forward of stage 1, microbatch 1 before backward of stage 1, microbatch 0" in told
    assert "backward of stage 0, microbatch 0 needs backward of stage 1, microbatch 0" in told
    assert told.count(";") == 3


def test_a_row_too_few_or_too_many_is_refused() -> None:
    table = table_for("gpipe", THREE, 2)
    with pytest.raises(TableError, match="rank 2: the table has 2 rows for 3 ranks"):
        check(table[:2], THREE)
    with pytest.raises(TableError, match="rank 3: the table has 4 rows for 3 ranks"):
        check((*table, ()), THREE)


def test_negative_microbatches_are_refused() -> None:
    with pytest.raises(TableError, match="microbatches are numbered from 0"):
        check(((Action("forward", 0, 0, -1),),), Placement.row([1]))


@settings(max_examples=150, deadline=None)
@given(st.data(), tables(max_microbatches=5))
def test_any_action_left_out_is_refused_with_its_name(data: st.DataObject, case: tuple[Table, Placement]) -> None:
    table, placement = case
    rank = data.draw(st.integers(0, len(table) - 1))
    where = data.draw(st.integers(0, len(table[rank]) - 1))
    action = table[rank][where]
    others = [a for other, row in enumerate(table) for i, a in enumerate(row) if (other, i) != (rank, where)]
    # With the only action of a kind, or of a microbatch, goes all that tells that it should be there.
    assume(any(a.kind == action.kind for a in others))
    assume(any((a.direction, a.microbatch) == (action.direction, action.microbatch) for a in others))
    with pytest.raises(TableError) as caught:
        check(with_row(table, rank, lambda row: row.pop(where)), placement)
    assert (caught.value.rank, caught.value.action) == (rank, action)


@settings(max_examples=150, deadline=None)
@given(st.data(), tables(max_microbatches=5))
def test_two_actions_swapped_are_refused_unless_the_table_still_works(
    data: st.DataObject, case: tuple[Table, Placement]
) -> None:
    """A table that passes can be played, with every stage's microbatches in turn; one that does not, cannot."""
    table, placement = case
    rank = data.draw(st.integers(0, len(table) - 1))
    assume(len(table[rank]) >= 2)
    i, j = data.draw(st.lists(st.integers(0, len(table[rank]) - 1), min_size=2, max_size=2, unique=True))
    wrong = swapped(table, rank, i, j)
    in_turn = all(a.microbatch < b.microbatch for row in wrong for a, b in combinations(row, 2) if a[:3] == b[:3])
    works = in_turn and all(can_be_played(wrong, placement, seed) for seed in range(3))
    if works:
        check(wrong, placement)
    else:
        with pytest.raises(TableError, match=r"^rank \d+: .+ of stage \d+, microbatch \d+"):
            check(wrong, placement)
