"""Simulated time against the formulas of the papers, and against timelines worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings

from mpi4dl.parallel.tables.schedules import Action, Placement, Table, table_for
from mpi4dl.parallel.tables.simulator import Costs, Simulation, TableError, TimeSpan, check, simulate
from tests.parallel.tables.tables import tables

SIZES = [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 4, 8, 13)]


def simulated(name: str, placement: Placement, num_microbatches: int, costs: Costs, pairs: int = 1) -> Simulation:
    return simulate(table_for(name, placement, num_microbatches, pairs), placement, costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    simulation = simulated(name, Placement.row([1] * p), m, Costs.equal(p, 1.5, 2.5))
    assert simulation.makespan_seconds == pytest.approx((m + p - 1) * 4)
    assert simulation.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.bubbles == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_layer_parallelism_leaves_one_rank_busy(p: int, m: int) -> None:
    simulation = simulated("layer", Placement.row([1] * p), m, Costs.equal(p))
    assert simulation.makespan_seconds == pytest.approx(3 * p * m)
    assert simulation.bubble == pytest.approx(1 - 1 / p)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zero_bubble_leaves_a_third_of_the_bubble(p: int, m: int) -> None:
    """A forward, the gradient of the input and that of the weights take as long as each other, as in the paper."""
    idle = {}
    for name in ("1f1b", "zero-bubble"):
        simulation = simulated(name, Placement.row([1] * p), m, Costs.equal(p, 1.0, 2.0))
        idle[name] = simulation.makespan_seconds - 3 * m
    assert idle["1f1b"] == pytest.approx(3 * (p - 1))
    assert idle["zero-bubble"] == pytest.approx(p - 1)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 8), (3, 9), (4, 4), (4, 12)])
def test_chunks_divide_the_bubble(p: int, m: int, chunks: int) -> None:
    simulation = simulated("interleaved", Placement.row((1,) * p, chunks=chunks), m, Costs.equal(p * chunks))
    assert simulation.bubble == pytest.approx((p - 1) / (chunks * m + p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_waves_of_gems_overlap(p: int, pairs: int) -> None:
    """Layer parallelism: of every later wave's forward only the last stage is not hidden behind a backward."""
    forward, backward = 1.0, 2.0
    simulation = simulated("layer", Placement.row([1] * p, 2), 1, Costs.equal(p, forward, backward), pairs)
    later_waves = (2 * pairs - 1) * (forward + p * backward)
    assert simulation.makespan_seconds == pytest.approx(p * (forward + backward) + later_waves)


def test_a_timeline_worked_out_by_hand() -> None:
    """Two tiles and a faster second stage, 0.5 s apart: 0-2 forward, 2.5-3.5 and 3.5-6.5 there, 7-11 backward."""
    placement = Placement.row([2, 1])
    costs = Costs((2.0, 1.0), (4.0, 3.0), (0.5,), (10, 7))
    simulation = simulated("layer", placement, 1, costs)
    first = (TimeSpan(Action("forward", 0, 0, 0), 0.0, 2.0), TimeSpan(Action("backward", 0, 0, 0), 7.0, 11.0))
    second = (TimeSpan(Action("forward", 0, 1, 0), 2.5, 3.5), TimeSpan(Action("backward", 0, 1, 0), 3.5, 6.5))
    assert simulation == Simulation((first, first, second), (10, 10, 7))
    assert simulation.makespan_seconds == 11.0
    assert simulation.bubbles == pytest.approx([5 / 11, 5 / 11, 7 / 11])
    assert simulation.bubble == pytest.approx(17 / 33)


def test_every_boundary_has_its_own_cost_both_ways() -> None:
    costs = Costs((1.0,) * 3, (1.0,) * 3, (0.25, 2.0), (1,) * 3)
    rows = simulated("gpipe", Placement.row([1, 1, 1]), 1, costs).rows
    starts = [[span.start_seconds for span in row] for row in rows]
    assert starts == [[0.0, 9.5], [1.25, 8.25], [4.25, 5.25]]


def test_a_message_to_oneself_takes_no_time() -> None:
    placement = Placement((((0,), (0,)),))
    costs = Costs((1.0, 1.0), (1.0, 1.0), (9.0,), (1, 1))
    assert simulated("gpipe", placement, 1, costs).makespan_seconds == 4.0


def test_the_halves_of_a_backward() -> None:
    costs = Costs((1.0,), (10.0,), (), (1,), weight_seconds=(7.0,))
    (row,) = simulated("zero-bubble", Placement.row([1]), 1, costs).rows
    assert [span.end_seconds for span in row] == pytest.approx([1.0, 4.0, 11.0])


@pytest.mark.parametrize(
    ("name", "peaks"), [("gpipe", (600, 60, 6)), ("1f1b", (300, 20, 1)), ("zero-bubble", (300, 30, 3))]
)
def test_peak_memory(name: str, peaks: tuple[int, ...]) -> None:
    costs = Costs((1.0,) * 3, (2.0,) * 3, (0.0,) * 2, (100, 10, 1))
    assert simulated(name, Placement.row([1, 1, 1]), 6, costs).peak_bytes == peaks


@settings(max_examples=60, deadline=None)
@given(tables())
def test_simulated_actions_keep_order_and_ranks_one_thing_at_a_time(case: tuple[Table, Placement]) -> None:
    table, placement = case
    simulation = simulate(table, placement, Costs.equal(placement.num_stages, 1.0, 2.0, 0.25))
    assert tuple(tuple(span.action for span in row) for row in simulation.rows) == table
    when = {span.action: span for row in simulation.rows for span in row}
    for row in simulation.rows:
        assert all(span == when[span.action] for span in row)
        assert all(before.end_seconds <= span.start_seconds for before, span in pairwise(row))
    assert simulation.peak_bytes == check(table, placement).peak_live
    assert 0.0 <= simulation.bubble < 1.0


def test_unsound_tables_are_not_simulated() -> None:
    with pytest.raises(TableError, match="rank 0: forward of stage 0, microbatch 0 is missing"):
        simulate(((), (Action("forward", 0, 1, 0),)), Placement.row([1, 1]), Costs.equal(2))


@pytest.mark.parametrize(
    ("costs", "complaint"),
    [
        (Costs.equal(3), r"2 stages need 2 forward_seconds, but there are 3: \(1.0, 1.0, 1.0\)"),
        (Costs((1.0, 1.0), (1.0,), (0.0,), (1, 1)), "2 stages need 2 backward_seconds, but there are 1"),
        (Costs((1.0, 1.0), (1.0, 1.0), (), (1, 1)), "2 stages need 1 communication_seconds, but there are 0"),
        (Costs((1.0, 1.0), (1.0, 1.0), (0.0,), ()), "2 stages need 2 activation_bytes, but there are 0"),
    ],
)
def test_costs_need_one_entry_a_stage(costs: Costs, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        simulated("gpipe", Placement.row([1, 1]), 2, costs)
