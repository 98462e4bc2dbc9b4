"""Collectives from every root, for every dtype and layout, in one message or in pieces that outlive slow ranks."""

import time

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.comm.packing import Piece
from tests.comm.values import DTYPES, Counting, layouts, whole_numbers
from tests.pool.ranks import Ranks

SHAPE = (4, 2, 3, 2)


def check(got: Tensor, expected: Tensor, *case: object) -> None:
    assert got.dtype == expected.dtype, case
    assert got.shape == expected.shape, case
    assert torch.equal(got, expected), (case, got, expected)


def rearrange(comm: Communicator) -> None:
    for dtype in DTYPES:
        everyone = torch.stack([whole_numbers(rank, dtype, SHAPE) for rank in range(comm.size)])
        for root in range(comm.size):
            for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
                comm.broadcast(x, root)
                check(x, everyone[root], "broadcast", dtype, root, name)
        for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
            check(comm.all_gather(x), everyone, "all_gather", dtype, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_may_be_the_root(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks).run(rearrange)


def reduce_to_every_root(comm: Communicator) -> None:
    for dtype in DTYPES:
        everyone = torch.stack([whole_numbers(rank, dtype, SHAPE) for rank in range(comm.size)])
        total = everyone.any(0) if dtype is torch.bool else everyone.sum(0, dtype=dtype)
        for root in range(comm.size):
            for name, x in layouts(everyone[comm.rank]):
                comm.ireduce(x, root=root).wait()
                if comm.rank == root:
                    check(x, total, dtype, root, name)


def test_every_rank_may_hold_the_sum(ranks: Ranks) -> None:
    ranks(3).run(reduce_to_every_root)


def poll(comm: Communicator) -> tuple[bool, bool, float]:
    other, target = 1 - comm.rank, torch.zeros(4)[::2]
    pending = comm.irecv(target, other)
    too_early = pending.test()
    comm.barrier()
    comm.isend(torch.ones(2), other).wait()
    deadline = time.monotonic() + 10
    while not pending.test() and time.monotonic() < deadline:
        time.sleep(0.001)
    done = pending.test()
    pending.wait()
    return too_early, done, float(target.sum())


def test_ready_says_whether_a_message_is_there(ranks: Ranks) -> None:
    assert ranks(2).run(poll) == [(False, True, 2.0)] * 2


def sum_reals(comm: Communicator, dtype: torch.dtype) -> tuple[bytes, float]:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn((comm.size, 5000), generator=generator, dtype=torch.float64)
    parts = parts.to(dtype)
    total = comm.all_reduce(parts[comm.rank].clone())
    error = (total.double() - parts.double().sum(0)).abs().max()
    return total.view(torch.uint8).numpy().tobytes(), float(error)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)],
)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_sums_are_bit_equal_on_all_ranks(ranks: Ranks, num_ranks: int, dtype: torch.dtype, bound: float) -> None:
    results = ranks(num_ranks).run(sum_reals, dtype)
    assert all(total == results[0][0] for total, _ in results)
    assert max(error for _, error in results) < bound


def receive_into_part(comm: Communicator) -> list[float]:
    whole = torch.full((6,), -1.0)
    if comm.rank == 0:
        comm.send(torch.tensor([1.0, 2.0, 3.0]), 1)
    else:
        comm.recv(whole[::2], 0)
    return whole.tolist()


def test_what_lies_between_the_received_elements_is_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(receive_into_part)[1] == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0]


def send_in_pieces(comm: Communicator, limit: int) -> dict[str, int]:
    comm.mpi = Counting(comm.mpi)
    comm.max_message_bytes = limit
    other = 1 - comm.rank
    for _, mine in layouts(whole_numbers(comm.rank, torch.float64, SHAPE)):
        target = torch.zeros(SHAPE, dtype=torch.float64)
        receiving = comm.irecv(target, other)
        comm.send(mine, other)
        receiving.wait()
        check(target, whole_numbers(other, torch.float64, SHAPE))
        comm.broadcast(mine, 1)
        check(mine, whole_numbers(1, torch.float64, SHAPE))
    return comm.mpi.calls


@pytest.mark.parametrize(("limit", "pieces"), [(384, 1), (383, 2), (100, 4), (7, 55)])
def test_large_messages_travel_in_pieces(ranks: Ranks, limit: int, pieces: int) -> None:
    """The 48 numbers of 8 bytes make 384 bytes, in each of 6 layouts; a piece need not hold whole numbers."""
    for calls in ranks(2).run(send_in_pieces, limit):
        assert calls == {"Irecv": 6 * pieces, "Isend": 6 * pieces, "Ibcast": 6 * pieces}


def reduce_in_pieces(comm: Communicator, limit: int, dtype: torch.dtype) -> dict[str, int]:
    comm.mpi = Counting(comm.mpi)
    comm.max_reduction_bytes = limit
    everyone = [whole_numbers(rank, dtype, SHAPE) for rank in range(comm.size)]
    expected = torch.stack(everyone).sum(0, dtype=dtype)
    for name, x in layouts(everyone[comm.rank]):
        check(comm.all_reduce(x), expected, name)
    for name, x in layouts(everyone[comm.rank]):
        comm.ireduce(x, root=comm.size - 1).wait()
        if comm.rank == comm.size - 1:
            check(x, expected, name)
    return comm.mpi.calls


@pytest.mark.parametrize(
    ("limit", "dtype", "pieces"),
    [
        (384, torch.float64, 1),
        (383, torch.float64, 2),
        (100, torch.float64, 4),
        (7, torch.float64, 48),
        (96, torch.bfloat16, 2),
        (10, torch.int16, 10),
    ],
)
def test_large_reductions_travel_in_pieces_of_whole_numbers(
    ranks: Ranks, limit: int, dtype: torch.dtype, pieces: int
) -> None:
    """bfloat16 is reduced as float32: 48 numbers are 192 bytes."""
    for calls in ranks(3).run(reduce_in_pieces, limit, dtype):
        assert calls == {"Iallreduce": 6 * pieces, "Ireduce": 6 * pieces}


def rearrange_in_pieces(comm: Communicator, limit: int) -> dict[str, int]:
    comm.mpi = Counting(comm.mpi)
    comm.max_message_bytes = limit
    shape = (comm.size, 4, 3)
    rows = torch.stack([whole_numbers(rank, torch.float32, shape) for rank in range(comm.size)])
    mine = rows[comm.rank]
    swapped = torch.zeros_like(mine)
    comm.iexchange([*map(Piece, range(comm.size), mine)], [*map(Piece, range(comm.size), swapped)]).wait()
    check(swapped, rows[:, comm.rank])
    check(comm.all_gather(mine[0]), rows[:, 0])
    return comm.mpi.calls


@pytest.mark.parametrize(("limit", "pieces"), [(144, 1), (143, 2), (40, 4), (1, 48)])
def test_large_collectives_travel_in_pieces(ranks: Ranks, limit: int, pieces: int) -> None:
    """12 numbers of 4 bytes for each of 3 ranks make 144 bytes."""
    messages = 2 * -(-48 // limit)
    expected = {"Iallgather": pieces, "Isend": messages, "Irecv": messages}
    assert ranks(3).run(rearrange_in_pieces, limit) == [expected] * 3


def rearrange_while_ranks_lag(comm: Communicator) -> None:
    comm.max_message_bytes = 2_000_000
    columns = torch.arange(250_000, dtype=torch.float32)
    mine = torch.stack([columns + 3 * comm.rank + 7 * to for to in range(comm.size)])
    for lagging in range(comm.size):
        time.sleep(0.05 * (comm.rank == lagging))
        received = torch.zeros_like(mine)
        comm.iexchange([*map(Piece, range(comm.size), mine)], [*map(Piece, range(comm.size), received)]).wait()
        for source in range(comm.size):
            check(received[source], columns + 3 * source + 7 * comm.rank, "exchange", lagging, source)
        check(comm.all_gather(columns + lagging)[lagging], columns + lagging, "all_gather", lagging)


def test_pieces_live_until_slow_ranks_have_read_them(ranks: Ranks) -> None:
    """A large piece is read from the sender's memory only when its receiver arrives."""
    ranks(4).run(rearrange_while_ranks_lag)
