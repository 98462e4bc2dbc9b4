"""Placements and what an action needs."""

import pytest

from mpi4dl.parallel.tables.schedules import Action, Placement, needs, precedence, undivided, zero_bubble
from tests.parallel.tables.tables import read


def test_a_row_lays_the_mirrored_copy_in_reverse() -> None:
    placement = Placement.row([4, 1], directions=2)
    assert placement.holders == (((0, 1, 2, 3), (4,)), ((4, 3, 2, 1), (0,)))
    assert (placement.num_ranks, placement.num_stages, placement.num_directions) == (5, 2, 2)
    assert placement.held_by(0) == ((0, 0), (1, 1))
    assert placement.held_by(2) == ((0, 0), (1, 0))
    assert placement.only(1) == Placement((((4, 3, 2, 1), (0,)),))
    assert Placement.row([4, 1]).holders == placement.holders[:1]


def test_interleaved_deals_stages_out() -> None:
    placement = Placement.row((1,) * 2, chunks=3)
    assert placement.holders == (((0,), (1,), (0,), (1,), (0,), (1,)),)
    assert placement.held_by(1) == ((0, 1), (0, 3), (0, 5))


@pytest.mark.parametrize(
    ("holders", "complaint"),
    [
        ((), "at least one direction of at least one stage"),
        (((),), "at least one direction of at least one stage"),
        ((((0,), ()),), r"stage 1 of direction 0 is held by \(\)"),
        ((((0, 0),),), r"stage 0 of direction 0 is held by \(0, 0\): name each rank once"),
        ((((0,), (2,)),), r"direction 0 is held by ranks \[0, 2\], but a placement of 3 ranks gives each of 0 to 2"),
        ((((0,), (1,)), ((0,), (0,))), r"direction 1 is held by ranks \[0\]"),
        ((((0,),), ((0,), (0,))), "direction 1 has 2 stages, but direction 0 has 1"),
    ],
)
def test_a_wrong_placement_is_refused(holders: tuple[tuple[tuple[int, ...], ...], ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Placement(holders)


@pytest.mark.parametrize("directions", [0, 3])
def test_there_are_two_directions_at_most(directions: int) -> None:
    with pytest.raises(ValueError, match=rf"directions \(={directions}\) must be 1, or 2"):
        Placement.row([1], directions)


def test_rows_are_shares_of_one_order() -> None:
    first, second = Action("forward", 0, 0, 0), Action("forward", 0, 1, 0)
    assert Placement.row([2, 1]).rows([first, second]) == ((first,), (first,), (second,))


def test_needs() -> None:
    assert needs(Action("forward", 1, 0, 5), 3) == ()
    assert needs(Action("forward", 1, 2, 5), 3) == (Action("forward", 1, 1, 5),)
    assert needs(Action("backward", 0, 2, 5), 3) == (Action("forward", 0, 2, 5),)
    assert needs(Action("backward", 0, 1, 5), 3) == (Action("forward", 0, 1, 5), Action("backward", 0, 2, 5))
    assert needs(Action("input", 0, 1, 5), 3) == (Action("forward", 0, 1, 5), Action("input", 0, 2, 5))
    assert needs(Action("weight", 0, 1, 5), 3) == (Action("input", 0, 1, 5),)


def test_precedence_joins_needs_and_rows() -> None:
    a, b, c = Action("forward", 0, 0, 0), Action("forward", 0, 1, 0), Action("forward", 0, 0, 1)
    assert precedence([[a, c], [a, b]], 2) == {a: [], c: [a], b: [a, a]}


def test_an_action_names_itself() -> None:
    assert str(Action("forward", 0, 1, 2)) == "forward of stage 1, microbatch 2"
    assert str(Action("weight", 1, 0, 3)) == "weight of stage 0, microbatch 3 of the mirrored copy"


def test_backwards_stay_whole_where_no_half_waits() -> None:
    placement = Placement.row([1, 1, 1])
    rows = [undivided(row) for row in zero_bubble(placement, 4)]
    assert rows[0] == list(read("F0 F1 F2 B0 F3 B1 B2 B3", placement)[0])
    assert [tuple(row) for row in rows[1:]] == list(zero_bubble(placement, 4)[1:])
    (row,) = zero_bubble(Placement.row([1]), 2)
    assert undivided(row) == list(read("F0 B0 F1 B1", Placement.row([1]))[0])
