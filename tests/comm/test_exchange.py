"""Plans of exchanges are the slabs drawn by hand; their values are slices of the whole, and their adjoint holds.

The plans are tested without ranks. The exchanges run on random tilings of a random image, of which every rank knows
the whole.
"""

import random

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange, ExchangePlan, Slab, narrow, plan_exchange, plan_retiling
from mpi4dl.geometry import Box, GridShape, Interval, Split, Tiling
from tests.comm.values import Counting
from tests.pool.ranks import Ranks, on_ranks

ONE = Interval(0, 1)


def line(start: int, stop: int) -> Box:
    """Columns of one row of one image."""
    return Box(ONE, ONE, Interval(start, stop))


def patch(rows: tuple[int, int], cols: tuple[int, int]) -> Box:
    return Box(ONE, Interval(*rows), Interval(*cols))


def test_a_wide_halo_reaches_over_a_narrow_neighbour() -> None:
    #          rank 0      rank 1  rank 2
    # owns     [ 0 1 2 ]   [ 3 ]   [ 4 5 6 ]
    # needs    [ 0 1 2 3 4 ]
    #                      [ 3 ]
    #                 [ 2 3 4 5 6 ]
    owned = (line(0, 3), line(3, 4), line(4, 7))
    needed = (line(0, 5), line(3, 4), line(2, 7))
    plans = [plan_exchange(rank, owned, owned, needed, line(0, 7)) for rank in range(3)]
    assert plans[0].sends == (Slab(2, line(2, 3)),)
    assert plans[0].receives == (Slab(1, line(3, 4)), Slab(2, line(4, 5)))
    assert plans[1] == ExchangePlan(line(3, 4), line(3, 4), (Slab(0, line(3, 4)), Slab(2, line(3, 4))), (), line(3, 4))
    assert plans[2].sends == (Slab(0, line(4, 5)),)
    assert plans[2].receives == (Slab(0, line(2, 3)), Slab(1, line(3, 4)))


def test_what_is_held_suffices_also_at_the_edge_of_the_whole() -> None:
    #          rank 0        rank 1
    # holds    [ 0 1 2 3 4 ]
    #                [ 2 3 4 5 6 ]          of which it owns 4 and more
    # needs  [ - 0 1 2 3 ]
    #                  [ 3 4 5 6 - ]
    owned = (line(0, 4), line(4, 7))
    held = (line(0, 5), line(2, 7))
    needed = (line(-1, 4), line(3, 8))
    assert plan_exchange(0, owned, held, needed, line(0, 7)) == ExchangePlan(
        line(0, 5), line(-1, 4), (), (), line(0, 4)
    )
    assert plan_exchange(1, owned, held, needed, line(0, 7)) == ExchangePlan(line(2, 7), line(3, 8), (), (), line(3, 7))


def test_copies_that_do_not_suffice_are_not_used_at_all() -> None:
    """Each element comes from its owner, so that its gradient has one place to return to."""
    #          rank 0          rank 1
    # holds    [ 0 1 2 3 (4) ] [ 4 5 6 ]       rank 0 holds a copy of 4
    # needs    [ 0 1 2 3 4 5 ] [ 4 5 6 ]
    owned = (line(0, 4), line(4, 7))
    plan = plan_exchange(0, owned, (line(0, 5), line(4, 7)), (line(0, 6), line(4, 7)), line(0, 7))
    assert plan == ExchangePlan(line(0, 5), line(0, 6), (), (Slab(1, line(4, 6)),), line(0, 4))


def test_narrow_is_a_view_by_global_coordinates() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    part = narrow(x, (0, 2, 3), patch((10, 13), (20, 24)), patch((11, 13), (20, 22)))
    assert torch.equal(part, x[:, :, 1:3, 0:2])
    assert part.data_ptr() == x[:, :, 1:].data_ptr()
    assert narrow(x, (0, 2, 3), patch((10, 13), (20, 24)), patch((99, 99), (20, 24))).shape == (1, 2, 0, 4)
    columns = narrow(x[:, 0, 0], (0, None, 1), patch((0, 1), (20, 24)), patch((5, 6), (21, 22)))
    assert torch.equal(columns, x[:, 0, 0, 1:2])


Boxes = tuple[Box, ...]
Case = tuple[Boxes, Boxes, Boxes, Box]


def random_cuts(rng: random.Random, size: int, parts: int) -> Split:
    """Any cuts, empty parts among them, and held intervals that are wider here and there."""
    split = Split.at([0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size])
    return split.widen(rng.choice((0, 0, 1, 2, size)))


def random_case(rng: random.Random, grid: GridShape, kind: str) -> Case:
    """What each rank owns, holds and needs of a whole.

    `kind` is "halo" (its tile and some around it, also beyond the edge), "any" (a box anywhere, or none) or "held"
    (what it holds suffices).
    """
    size = (rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 9))
    batch, rows, cols = (random_cuts(rng, n, parts) for n, parts in zip(size, grid, strict=True))
    tiling = Tiling((batch, rows, cols))
    needed = []
    for owned, held in zip(tiling.all_owned, tiling.all_held, strict=True):
        if kind == "halo":
            box = Box(*(side.grow(rng.randint(-1, 4), rng.randint(-1, 4)) for side in owned))
        elif kind == "any":
            corners = [sorted(rng.randint(-3, n + 3) for _ in range(2)) for n in size]
            box = Box(*(Interval(*pair) for pair in corners))
        else:
            shrunk = [Interval(s.start + rng.randint(0, 1), s.stop - rng.randint(0, 1)) for s in held]
            box = Box(*(Interval(s.start, max(s.start, s.stop)) for s in shrunk))
        needed.append(Box(*(Interval(s.start, max(s.start, s.stop)) for s in box)))
    return tiling.all_owned, tiling.all_held, tuple(needed), tiling.whole


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 4), (2, 1, 5), (3, 2, 2)])
def test_tilings_are_planned_axis_by_axis(shape: tuple[int, ...]) -> None:
    rng, grid = random.Random(str(shape)), GridShape(*shape)
    silent = 0

    def some_of(split: Split) -> Split:
        sides = (held.grow(rng.randint(-1, 1), rng.randint(-1, 1)) for held in split.held)
        return Split(split.cuts, tuple(Interval(start, max(start, stop)) for start, stop in sides))

    for case in range(60):
        have = Tiling(tuple(random_cuts(rng, rng.randint(1, 9), parts) for parts in grid))
        want = Tiling(tuple(map(some_of, have.splits)))
        boxes = have.all_owned, have.all_held, want.all_held, have.whole
        if all(box.intersect(have.whole).empty for box in want.all_held):
            continue  # nothing is wanted
        for rank in range(grid.size):
            planned, found = plan_exchange(rank, *boxes), plan_retiling(rank, have, want)
            assert found.silent == planned.silent, (case, rank, have, want)
            assert found == planned or (found.kept.empty and planned.kept.empty), (case, rank, have, want)
            assert (found.sends, found.receives) == (planned.sends, planned.receives), (case, rank, have, want)
            silent += found.silent
    assert silent


def cut(whole_x: torch.Tensor, box: Box, fill: float) -> torch.Tensor:
    """The box of the whole (N, C, H, W), with `fill` outside it."""
    sizes = (whole_x.shape[0], whole_x.shape[2], whole_x.shape[3])
    before = [max(0, -side.start) for side in box]
    after = [max(0, side.stop - n) for side, n in zip(box, sizes, strict=True)]
    (n0, h0, w0), (n1, h1, w1) = before, after
    padded = F.pad(whole_x, (w0, w1, h0, h1, 0, 0, n0, n1), value=fill)
    n, h, w = (slice(s.start + b, s.start + b + s.length) for s, b in zip(box, before, strict=True))
    return padded[n, :, h, w]


def exchange_cases(comm: Communicator, grid: GridShape, kind: str, num_cases: int) -> tuple[int, int]:
    """Run random cases; returns how many messages this rank sent forward, and how many cases filled something in."""
    comm.mpi = Counting(comm.mpi)
    rng, filled = random.Random(f"{grid} {kind}"), 0
    for case in range(num_cases):
        boxes = random_case(rng, grid, kind)
        _, held, needed, whole = boxes
        generator = torch.Generator().manual_seed(case)
        shape = (whole.batch.length, 2, whole.rows.length, whole.cols.length)
        x_whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        fill = rng.choice((0.0, -7.5))
        exchange = Exchange(plan_exchange(comm.rank, *boxes), comm, (0, 2, 3), fill)
        x = cut(x_whole, held[comm.rank], 0.0)
        if case % 3 == 1:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            got = exchange(x)
        expected = cut(x_whole, needed[comm.rank], fill)
        assert torch.equal(got, expected), (case, boxes)
        filled += not whole.covers(needed[comm.rank])

        linear = Exchange(exchange.plan, comm, (0, 2, 3))
        x = torch.randn(x.shape, generator=generator.manual_seed(100 + comm.rank), dtype=torch.float64).requires_grad_()
        ax = linear(x)
        y = torch.randn(ax.shape, generator=generator, dtype=torch.float64)
        (aty,) = torch.autograd.grad(ax, x, y)
        assert aty.shape == x.shape
        left, right = comm.all_reduce(torch.stack([(ax.detach() * y).sum(), (x.detach() * aty).sum()])).tolist()
        assert abs(left - right) <= 1e-11 * max(1.0, abs(left)), (case, boxes, left, right)
    return comm.mpi.calls.get("Isend", 0), filled


GRIDS = [
    GridShape(1, 1, 1),
    GridShape(1, 1, 2),
    GridShape(2, 1, 1),
    GridShape(1, 3, 1),
    GridShape(1, 2, 2),
    GridShape(2, 1, 2),
    GridShape(1, 1, 4),
]


@pytest.mark.parametrize("kind", ["halo", "any"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_values_are_slices_of_the_whole_and_the_adjoint_holds(ranks: Ranks, grid: GridShape, kind: str) -> None:
    results = ranks(grid.size).run(exchange_cases, grid, kind, 25)
    assert sum(filled for _, filled in results) > 0
    assert (sum(sent for sent, _ in results) > 0) == (grid.size > 1)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_nothing_is_sent_where_what_is_held_suffices(ranks: Ranks, grid: GridShape) -> None:
    assert [sent for sent, _ in ranks(grid.size).run(exchange_cases, grid, "held", 25)] == [0] * grid.size


@on_ranks(2)
def test_two_exchanges_may_be_under_way(comm: Communicator) -> None:
    """Strips of two images are under way at the same time; the second is awaited first."""
    owned, needed = (line(0, 4), line(4, 8)), (line(0, 5), line(3, 8))
    exchange = Exchange(plan_exchange(comm.rank, owned, owned, needed, line(0, 8)), comm, (None, None, 0))
    wholes = [torch.arange(8.0), torch.arange(8.0) + 100]
    tiles = [whole[4 * comm.rank : 4 * comm.rank + 4] for whole in wholes]
    started = [exchange.start(tile) for tile in tiles]
    for number in (1, 0):
        got = exchange.assemble(tiles[number], started[number])
        assert torch.equal(got, wholes[number][3 * comm.rank : 3 * comm.rank + 5])


@on_ranks(2)
def test_layout_and_dtype_are_kept(comm: Communicator) -> None:
    expected = [(True, dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool)]
    owned = (patch((0, 4), (0, 4)), patch((4, 8), (0, 4)))
    needed = (patch((0, 5), (0, 4)), patch((3, 8), (0, 4)))
    exchange = Exchange(plan_exchange(comm.rank, owned, owned, needed, patch((0, 8), (0, 4))), comm, (0, 2, 3))
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        x = torch.ones((1, 3, 4, 4), dtype=dtype).contiguous(memory_format=torch.channels_last)
        result = exchange(x)
        assert bool(result.all())
        found.append((result.is_contiguous(memory_format=torch.channels_last), result.dtype))
    assert found == expected


@on_ranks(2)
def test_a_rank_that_has_what_it_needs_sends_what_others_need(comm: Communicator) -> None:
    """Rank 0 of the second exchange is one: rank 1 asks for its last column."""
    owned = (line(0, 4), line(4, 8))
    inert = Exchange(plan_exchange(comm.rank, owned, owned, owned, line(0, 8)), comm, (None, None, 0))
    needed = (line(0, 4), line(3, 8))
    asked = Exchange(plan_exchange(comm.rank, owned, owned, needed, line(0, 8)), comm, (None, None, 0))
    x = torch.ones(4, requires_grad=True)
    result = inert(x)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 4
    x.grad = None
    brought = asked(x)
    brought.sum().backward()
    shared = any(each.data_ptr() == x.data_ptr() for each in (result, brought))  # what it returns may be written to
    assert (shared, x.grad.tolist()) == [(False, [1.0, 1.0, 1.0, 2.0]), (False, [1.0] * 4)][comm.rank]
