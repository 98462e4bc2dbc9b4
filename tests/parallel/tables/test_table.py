"""Placements that cannot be, and backwards that stay whole."""

import pytest

from mpi4dl.parallel.tables.schedules import Placement, undivided, zero_bubble
from tests.parallel.tables.tables import read


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


def test_backwards_stay_whole_where_no_half_waits() -> None:
    placement = Placement.row([1, 1, 1])
    rows = [undivided(row) for row in zero_bubble(placement, 4)]
    assert rows[0] == list(read("F0 F1 F2 B0 F3 B1 B2 B3", placement)[0])
    assert [tuple(row) for row in rows[1:]] == list(zero_bubble(placement, 4)[1:])
    (row,) = zero_bubble(Placement.row([1]), 2)
    assert undivided(row) == list(read("F0 B0 F1 B1", Placement.row([1]))[0])
