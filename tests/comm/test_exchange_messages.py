"""The messages of exchanges: corners, over narrow and empty tiles, several at once, and none where none is needed."""

import random

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.exchange import Exchange, ExchangePlan, Slab, narrow, plan_exchange
from mpi4dl.geometry import Box, Grid, Interval, Split, Tiling
from tests.comm.values import Counting
from tests.pool.ranks import Ranks

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


def test_a_corner_is_sent_to_the_diagonal_neighbour() -> None:
    #  owns  0 0 | 1 1      rank 0 needs  0 0 1
    #        0 0 | 1 1                    0 0 1
    #        ----+----                    2 2 3
    #        2 2 | 3 3
    owned = (patch((0, 2), (0, 2)), patch((0, 2), (2, 4)), patch((2, 3), (0, 2)), patch((2, 3), (2, 4)))
    needed = (patch((0, 3), (0, 3)), *owned[1:])
    assert plan_exchange(0, owned, owned, needed, patch((0, 3), (0, 4))).receives == (
        Slab(1, patch((0, 2), (2, 3))),
        Slab(2, patch((2, 3), (0, 2))),
        Slab(3, patch((2, 3), (2, 3))),
    )
    assert plan_exchange(3, owned, owned, needed, patch((0, 3), (0, 4))).sends == (Slab(0, patch((2, 3), (2, 3))),)


def test_an_empty_tile_sends_and_receives_only_what_it_needs() -> None:
    owned = (line(0, 3), line(3, 3), line(3, 6))
    needed = (line(0, 4), line(3, 3), line(2, 6))
    assert plan_exchange(1, owned, owned, needed, line(0, 6)) == ExchangePlan(
        line(3, 3), line(3, 3), (), (), line(3, 3)
    )
    assert plan_exchange(0, owned, owned, needed, line(0, 6)).receives == (Slab(2, line(3, 4)),)


def hold_enough(comm: Communicator, grid: Grid, num_cases: int) -> int:
    """Random tilings whose ranks hold copies of what they need, in part beyond the edge; returns the messages sent."""
    comm.mpi = Counting(comm.mpi)
    rng = random.Random(str(grid))
    for case in range(num_cases):
        size = (rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 9))
        cuts = [[0, *sorted(rng.randint(0, n) for _ in range(k - 1)), n] for n, k in zip(size, grid, strict=True)]
        batch, rows, cols = (Split.at(cut).widen(rng.randint(1, 3)) for cut in cuts)
        tiling, whole = Tiling((batch, rows, cols)), Box(*(Interval(0, n) for n in size))
        needed = tuple(
            Box(*(side_needed(rng, side, n) for side, n in zip(box, size, strict=True))) for box in tiling.all_held
        )
        plan = plan_exchange(comm.rank, tiling.all_owned, tiling.all_held, needed, whole)
        image = torch.randn(size, generator=torch.Generator().manual_seed(case))
        result = Exchange(plan, comm, (0, 1, 2), fill=5.0)(narrow(image, (0, 1, 2), whole, tiling.held(comm.rank)))
        inside = needed[comm.rank].intersect(whole)
        assert result.shape == needed[comm.rank].shape
        assert inside.empty or torch.equal(
            narrow(result, (0, 1, 2), needed[comm.rank], inside), narrow(image, (0, 1, 2), whole, inside)
        )
        assert (result == 5.0).sum() == result.numel() - torch.Size(inside.shape).numel()
    return comm.mpi.calls.get("Isend", 0)


def side_needed(rng: random.Random, held: Interval, size: int) -> Interval:
    """A part of what is held; where that ends at the edge of the whole, it may reach beyond."""
    start = held.start + rng.randint(0, 1) - 2 * (held.start == 0)
    stop = held.stop - rng.randint(0, 1) + 2 * (held.stop == size)
    return Interval(start, max(start, stop))


@pytest.mark.parametrize("grid", [Grid(1, 1, 2), Grid(1, 3, 1), Grid(2, 1, 2), Grid(1, 2, 2)])
def test_nothing_is_sent_where_what_is_held_suffices(ranks: Ranks, grid: Grid) -> None:
    assert ranks(grid.size).run(hold_enough, grid, 25) == [0] * grid.size


def exchange_twice_at_once(comm: Communicator) -> None:
    """Strips of two images are under way at the same time; the second is awaited first."""
    owned, needed = (line(0, 4), line(4, 8)), (line(0, 5), line(3, 8))
    exchange = Exchange(plan_exchange(comm.rank, owned, owned, needed, line(0, 8)), comm, (None, None, 0))
    wholes = [torch.arange(8.0), torch.arange(8.0) + 100]
    tiles = [whole[4 * comm.rank : 4 * comm.rank + 4] for whole in wholes]
    started = [exchange.start(tile) for tile in tiles]
    for number in (1, 0):
        got = exchange.assemble(tiles[number], *started[number])
        assert torch.equal(got, wholes[number][3 * comm.rank : 3 * comm.rank + 5])


def test_two_exchanges_may_be_under_way(ranks: Ranks) -> None:
    ranks(2).run(exchange_twice_at_once)


def keep_layout_and_dtype(comm: Communicator) -> list[tuple[bool, torch.dtype]]:
    owned = (patch((0, 4), (0, 4)), patch((4, 8), (0, 4)))
    needed = (patch((0, 5), (0, 4)), patch((3, 8), (0, 4)))
    exchange = Exchange(plan_exchange(comm.rank, owned, owned, needed, patch((0, 8), (0, 4))), comm, (0, 2, 3))
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        x = torch.ones((1, 3, 4, 4), dtype=dtype).contiguous(memory_format=torch.channels_last)
        result = exchange(x)
        assert bool(result.all())
        found.append((result.is_contiguous(memory_format=torch.channels_last), result.dtype))
    return found


def test_layout_and_dtype_are_kept(ranks: Ranks) -> None:
    expected = [(True, dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool)]
    assert ranks(2).run(keep_layout_and_dtype) == [expected] * 2


def stay_put(comm: Communicator) -> tuple[bool, bool, bool]:
    owned = (line(0, 4), line(4, 8))
    inert = Exchange(plan_exchange(comm.rank, owned, owned, owned, line(0, 8)), comm, (None, None, 0))
    needed = (line(0, 4), line(3, 8))
    asked = Exchange(plan_exchange(comm.rank, owned, owned, needed, line(0, 8)), comm, (None, None, 0))
    x = torch.ones(4, requires_grad=True)
    result = inert(x)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 4
    asked(x).sum().backward()
    return inert.inert, asked.inert, result.data_ptr() == x.data_ptr()


def test_an_exchange_is_inert_only_where_nobody_needs_anything(ranks: Ranks) -> None:
    """Rank 0 of the second one has what it needs, but rank 1 asks for its last column: nothing may be skipped."""
    assert ranks(2).run(stay_put) == [(True, False, True)] * 2
