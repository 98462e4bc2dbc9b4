"""Tensors arrive as they were sent: for every dtype, layout and size, point to point and by every collective."""

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from tests.comm.values import DTYPES, Counting, layouts, whole_numbers
from tests.pool.ranks import Ranks

SHAPE = (4, 2, 3, 2)
SIZES = (1, 2, 3, 4)
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check(got: Tensor, expected: Tensor, *case: object) -> None:
    assert got.dtype == expected.dtype, case
    assert got.shape == expected.shape, case
    assert torch.equal(got, expected), (case, got, expected)


def send_around_a_ring(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES:
        expected = whole_numbers(before, dtype, SHAPE)
        for name, mine in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
            for target_name, target in layouts(torch.zeros(SHAPE, dtype=dtype)):
                case = dtype, name, target_name
                receiving = comm.irecv(target, before, tag=5)
                comm.isend(mine, after, tag=5).wait()
                receiving.wait()
                check(target, expected, *case)
                check(mine, whole_numbers(comm.rank, dtype, SHAPE), *case)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_dtype_and_layout_is_received_as_it_was_sent(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks).run(send_around_a_ring)


def receive_into_part(comm: Communicator) -> list[float]:
    whole = torch.full((6,), -1.0)
    if comm.rank == 0:
        comm.send(torch.tensor([1.0, 2.0, 3.0]), 1)
    else:
        comm.recv(whole[::2], 0)
    return whole.tolist()


def test_what_lies_between_the_received_elements_is_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(receive_into_part)[1] == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0]


def order_of_messages(comm: Communicator) -> list[float]:
    if comm.rank == 0:
        for value, tag in ((1.0, 0), (2.0, 0), (3.0, 9), (4.0, 0)):
            message = torch.full((2,), value)
            pending = comm.isend(message, 1, tag)
            pending.wait()
            message.fill_(-1.0)  # a completed send has read its message
        return []
    received = [torch.zeros(2) for _ in range(4)]
    comm.recv(received[3], 0, tag=9)
    waiting = [comm.irecv(tensor, 0) for tensor in received[:3]]
    for pending in reversed(waiting):
        pending.wait()
    return [float(tensor[1]) for tensor in received]


def test_messages_of_one_tag_keep_their_order_and_tags_are_told_apart(ranks: Ranks) -> None:
    assert ranks(2).run(order_of_messages)[1] == [1.0, 2.0, 4.0, 3.0]


def poll(comm: Communicator) -> tuple[bool, bool, float]:
    other, target = 1 - comm.rank, torch.zeros(4)[::2]
    pending = comm.irecv(target, other)
    too_early = pending.ready()
    comm.barrier()
    comm.isend(torch.ones(2), other).wait()
    deadline = time.monotonic() + 10
    while not pending.ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    done = pending.ready()
    pending.wait()
    return too_early, done, float(target.sum())


def test_ready_says_whether_a_message_is_there(ranks: Ranks) -> None:
    assert ranks(2).run(poll) == [(False, True, 2.0)] * 2


def reduce_all(comm: Communicator) -> None:
    for dtype in DTYPES:
        for op, combine in OPERATORS.items():
            if dtype.is_complex and op in ("max", "min"):
                continue
            expected = whole_numbers(0, dtype, SHAPE)
            for rank in range(1, comm.size):
                theirs = whole_numbers(rank, dtype, SHAPE)
                if dtype is torch.bool:
                    expected = expected | theirs if op in ("sum", "max") else expected & theirs
                else:
                    expected = combine(expected, theirs)
            for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
                assert comm.all_reduce(x, op) is x
                check(x, expected, dtype, op, name)
            for root in range(comm.size):
                for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
                    comm.reduce(x, root, op)
                    if comm.rank == root:
                        check(x, expected, dtype, op, name, root)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_reductions_equal_torch_for_every_dtype_operator_layout_and_root(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks).run(reduce_all)


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


def sum_one_large_and_many_small(comm: Communicator, dtype: torch.dtype, large: float) -> float:
    return float(comm.all_reduce(torch.tensor(1.0 if comm.rank else large, dtype=dtype)))


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_low_precision_sums_round_once(ranks: Ranks, dtype: torch.dtype, large: float) -> None:
    """256 + 1 is 256 in bfloat16, so adding up rank after rank would never leave 256."""
    expected = float(torch.tensor(large + 3.0).to(dtype))
    assert expected > large
    assert ranks(4).run(sum_one_large_and_many_small, dtype, large) == [expected] * 4


def rearrange(comm: Communicator) -> None:
    for dtype in DTYPES:
        everyone = torch.stack([whole_numbers(rank, dtype, SHAPE) for rank in range(comm.size)])
        for root in range(comm.size):
            for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
                comm.broadcast(x, root)
                check(x, everyone[root], "broadcast", dtype, root, name)
            for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
                stacked = comm.gather(x, root)
                assert (stacked is None) == (comm.rank != root)
                if stacked is not None:
                    check(stacked, everyone, "gather", dtype, root, name)
        for name, x in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
            check(comm.all_gather(x), everyone, "all_gather", dtype, name)
        shape = (comm.size, *SHAPE[1:])
        rows = torch.stack([whole_numbers(rank, dtype, shape) for rank in range(comm.size)])
        for name, x in layouts(rows[comm.rank]):
            check(comm.all_to_all(x), rows[:, comm.rank], "all_to_all", dtype, name)
            for root in range(comm.size):
                check(comm.scatter(x, root), rows[root, comm.rank], "scatter", dtype, root, name)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_collectives_move_every_dtype_and_layout(ranks: Ranks, num_ranks: int) -> None:
    ranks(num_ranks).run(rearrange)


def use_single_numbers(comm: Communicator) -> tuple[list[float], float, list[float]]:
    mine = torch.tensor(float(comm.rank + 1))
    scattered = comm.scatter(torch.arange(comm.size, dtype=torch.float32), 0)
    assert scattered.shape == ()
    return comm.all_gather(mine).tolist(), float(scattered), comm.all_to_all(torch.full((comm.size,), mine)).tolist()


def test_tensors_without_dims_are_moved_too(ranks: Ranks) -> None:
    expected = [([1.0, 2.0, 3.0], float(rank), [1.0, 2.0, 3.0]) for rank in range(3)]
    assert ranks(3).run(use_single_numbers) == expected


def move_nothing(comm: Communicator, device: str) -> list[tuple[int, ...]]:
    comm.mpi = Counting(comm.mpi)
    shape = (comm.size, 0) if device == "cpu" else (comm.size, 7)
    x = torch.zeros(shape, device=device)
    other = (comm.rank + 1) % comm.size
    pending = [comm.irecv(x, other), comm.isend(x, other), comm.iall_reduce(x)]
    assert all(part.ready() for part in pending)
    for part in pending:
        part.wait()
    stacked = comm.gather(x, 1)
    moved = [comm.broadcast(x), comm.reduce(x), comm.all_gather(x), comm.all_to_all(x), comm.scatter(x)]
    assert (stacked is not None) == (comm.rank == 1)
    assert comm.mpi.calls == {}
    assert all(part.device.type == device for part in moved)
    return [tuple(part.shape) for part in moved]


@pytest.mark.parametrize(("device", "width"), [("cpu", 0), ("meta", 7)])
def test_empty_and_meta_tensors_keep_their_shapes_and_send_nothing(ranks: Ranks, device: str, width: int) -> None:
    expected = [(2, width), (2, width), (2, 2, width), (2, width), (width,)]
    assert ranks(2).run(move_nothing, device) == [expected] * 2


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
        comm.reduce(x, comm.size - 1)
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
    check(comm.all_to_all(mine), rows[:, comm.rank])
    check(comm.all_gather(mine[0]), rows[:, 0])
    for root in range(comm.size):
        check(comm.scatter(mine, root), rows[root, comm.rank], root)
        stacked = comm.gather(mine[1], root)
        if stacked is not None:
            check(stacked, rows[:, 1], root)
    return comm.mpi.calls


@pytest.mark.parametrize(("limit", "pieces"), [(144, 1), (143, 2), (40, 4), (1, 12)])
def test_large_collectives_travel_in_pieces(ranks: Ranks, limit: int, pieces: int) -> None:
    """12 numbers of 4 bytes for each of 3 ranks make 144 bytes."""
    expected = {"Ialltoall": pieces, "Iallgather": pieces, "Iscatter": 3 * pieces, "Igather": 3 * pieces}
    assert ranks(3).run(rearrange_in_pieces, limit) == [expected] * 3


def rearrange_while_ranks_lag(comm: Communicator) -> None:
    comm.max_message_bytes = 2_000_000
    columns = torch.arange(250_000, dtype=torch.float32)
    mine = torch.stack([columns + 3 * comm.rank + 7 * to for to in range(comm.size)])
    for lagging in range(comm.size):
        time.sleep(0.05 * (comm.rank == lagging))
        received = comm.all_to_all(mine)
        for source in range(comm.size):
            check(received[source], columns + 3 * source + 7 * comm.rank, "all_to_all", lagging, source)
        check(comm.scatter(mine, lagging), columns + 3 * lagging + 7 * comm.rank, "scatter", lagging)


def test_pieces_live_until_slow_ranks_have_read_them(ranks: Ranks) -> None:
    """A large piece is read from the sender's memory only when its receiver arrives."""
    ranks(4).run(rearrange_while_ranks_lag)


def split_twice(comm: Communicator) -> tuple[int, int, float, list[int]]:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    pair = part.split(0)
    total = part.all_reduce(torch.tensor(float(comm.rank)))
    assert part.node is comm.node
    assert (pair.rank, pair.size) == (part.rank, part.size)
    return part.rank, part.size, float(total), part.all_gather_object(comm.rank)


def test_a_split_groups_ranks_by_colour_in_the_order_of_their_keys(ranks: Ranks) -> None:
    assert ranks(4).run(split_twice) == [
        (1, 2, 2.0, [2, 0]),
        (1, 2, 4.0, [3, 1]),
        (0, 2, 2.0, [2, 0]),
        (0, 2, 4.0, [3, 1]),
    ]


def share_objects(comm: Communicator) -> tuple[list[str], str, bool]:
    mine = f"from {comm.rank}"
    return comm.all_gather_object(mine), comm.broadcast_object(mine, 2), copy.deepcopy({"comm": comm})["comm"] is comm


def test_objects_are_shared_and_a_deep_copy_is_the_same_communicator(ranks: Ranks) -> None:
    assert ranks(3).run(share_objects) == [(["from 0", "from 1", "from 2"], "from 2", True)] * 3


def describe(comm: Communicator) -> tuple[str, str]:
    return repr(comm), comm.library


def test_a_communicator_says_what_it_is(ranks: Ranks) -> None:
    (first, library), (second, _) = ranks(2).run(describe)
    assert (first, second) == ("Communicator(rank 0 of 2)", "Communicator(rank 1 of 2)")
    assert library.startswith(("MPICH", "Open MPI"))
    assert "\0" not in library
