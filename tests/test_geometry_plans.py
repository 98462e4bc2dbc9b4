"""Plans of whole axes against brute force: whose rows are whose, who reads which, and when nobody has to send any."""

from hypothesis import assume, given
from hypothesis import strategies as st

from mpi4dl.geometry import AxisMap, AxisPlan, Interval, Split, TransposedWindow, Window, even_cuts, plan_axis
from tests.brute_force import (
    inside,
    quick,
    resamplings,
    sizes,
    slab,
    splits,
    thorough,
    transposed_windows,
    windows,
)


def check_plan(mapping: AxisMap, split: Split) -> AxisPlan:
    """Hold every promise of `plan_axis` against enumerated rows."""
    size, output_size = split.size, mapping.output_size(split.size)
    plan = plan_axis(mapping, split)
    output = plan.output
    assert list(output.cuts) == sorted(output.cuts)
    assert (output.cuts[0], output.cuts[-1]) == (0, output_size)
    assert [row for part in range(split.parts) for row in range(*output.owned(part))] == list(range(output_size))
    assert len(plan.needed) == output.parts == split.parts

    short = [not inside(slab(mapping, output.owned(i), size), split.held[i]) for i in range(split.parts)]
    assert plan.exchange == any(short)
    for part in range(split.parts):
        computed = output.held[part]
        assert computed.covers(output.owned(part))
        assert inside(slab(mapping, computed, size), plan.needed[part])
        if computed.empty:
            assert plan.needed[part].empty
        if plan.exchange:
            assert computed == output.owned(part)
            continue
        assert Interval(0, output_size).covers(computed)
        assert inside(slab(mapping, computed, size), split.held[part])
        if computed.empty:
            continue
        longer = [computed.grow(1, 0)] * (computed.start > 0) + [computed.grow(0, 1)] * (computed.stop < output_size)
        assert not any(inside(slab(mapping, rows, size), split.held[part]) for rows in longer)
    return plan


@thorough
@given(st.data(), windows(), sizes)
def test_a_plan_of_a_window_holds_its_promises(data: st.DataObject, window: Window, size: int) -> None:
    assume(window.output_size(size) >= 1)
    check_plan(window, data.draw(splits(size)))


@quick
@given(st.data(), transposed_windows(), st.integers(1, 60))
def test_a_plan_of_a_transposed_window_holds_its_promises(
    data: st.DataObject, window: TransposedWindow, size: int
) -> None:
    assume(window.output_size(size) >= 1)
    check_plan(window, data.draw(splits(size)))


@quick
@given(st.data(), sizes)
def test_a_plan_of_a_resampling_holds_its_promises(data: st.DataObject, size: int) -> None:
    check_plan(data.draw(resamplings(size)), data.draw(splits(size)))


def test_a_3x3_convolution_exchanges_one_row_with_each_neighbour() -> None:
    plan = plan_axis(Window(3, before=1, after=1), Split.at([0, 4, 8, 10]))
    assert plan == AxisPlan(
        Split.at([0, 4, 8, 10]), needed=(Interval(-1, 5), Interval(3, 9), Interval(7, 11)), exchange=True
    )


def test_a_stack_of_convolutions_uses_up_a_wide_halo_and_then_exchanges() -> None:
    split = Split.at([0, 8, 16]).widen(2)
    held = []
    for _ in range(3):
        plan = check_plan(Window(3, before=1, after=1), split)
        held.append((plan.exchange, plan.output.held))
        split = plan.output
    assert held == [
        (False, (Interval(0, 9), Interval(7, 16))),
        (False, (Interval(0, 8), Interval(8, 16))),
        (True, (Interval(0, 8), Interval(8, 16))),
    ]


def test_a_tile_that_becomes_empty_needs_nothing() -> None:
    plan = check_plan(Window(3, stride=8, before=1, after=1), Split.at(even_cuts(16, 8)))
    assert plan.output.size == 2
    empty = [part for part in range(8) if plan.output.owned(part).empty]
    assert len(empty) == 6
    assert all(plan.needed[part].empty for part in empty)


def test_the_window_of_a_strided_stack_keeps_97_rows_over_4_ranks_complete() -> None:
    """The stem of a ResNet on an odd size, down to fewer rows than ranks."""
    split = Split.at(even_cuts(97, 4))
    for window in [Window(7, 2, 3, 3)] + [Window(3, 2, 1, 1)] * 5:
        split = check_plan(window, split).output
    assert split.size == 2
