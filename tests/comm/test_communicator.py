"""Tensors over MPI: every dtype, layout and size arrives as it was sent, in pieces too; reductions are PyTorch's."""

import time

import pytest
import torch

from mpi4dl.comm import Communicator
from mpi4dl.comm.communicator import Pending
from mpi4dl.comm.packing import Piece
from tests.comm.values import DTYPES, Counting, check, layouts, whole_numbers
from tests.pool.ranks import Ranks, on_ranks

SHAPE = (4, 2, 3, 2)
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0, 2)]
FEW_SHAPES = [(7,), (3, 5)]
IN_PIECES = [1, 2, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (3, 4))]  # slow in tiny ones


def move_everything(comm: Communicator, tiny: bool) -> int:
    """Send, exchange, gather and broadcast every dtype and layout. Returns how many layouts were compared."""
    comm.max_message_bytes = 10 if tiny else 1 << 30
    compared, others = 0, range(comm.size)
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for dtype in DTYPES:
        for shape in [*FEW_SHAPES, (0,)] if tiny else [*SHAPES, SHAPE]:
            everyone = torch.stack([whole_numbers(rank, dtype, shape) for rank in others])
            mine, zeros = layouts(everyone[comm.rank]), layouts(torch.zeros_like(everyone[0]))
            for (name, x), (_, into) in zip(mine, zeros, strict=True):
                receiving = comm.irecv(into, left)
                comm.send(x, right)
                receiving.wait()
                check(into, everyone[left], "send", name)
                check(comm.all_gather(x), everyone, "all_gather", name)
                swapped = [torch.zeros_like(into) for _ in others]
                comm.iexchange([Piece(to, x) for to in others], [*map(Piece, others, swapped)], 3).wait()
                check(torch.stack(swapped), everyone, "iexchange", name)
                compared += 1
            for root in others:
                for name, x in layouts(everyone[comm.rank]):
                    check(comm.broadcast(x, root), everyone[root], "broadcast", root, name)
    return compared


@pytest.mark.parametrize("num_ranks", IN_PIECES)
@pytest.mark.parametrize("tiny", [False, True])
def test_everything_arrives_as_it_was_sent(ranks: Ranks, num_ranks: int, tiny: bool) -> None:
    assert min(ranks(num_ranks).run(move_everything, tiny)) > (100 if tiny else 300)


def reduce_everything(comm: Communicator, tiny: bool) -> int:
    comm.max_reduction_bytes = 10 if tiny else 1 << 21
    compared = 0
    with_numbers = {
        "sum": lambda x: x.sum(0),
        "product": lambda x: x.prod(0),
        "max": lambda x: x.amax(0),
        "min": lambda x: x.amin(0),
    }
    with_booleans = {"sum": with_numbers["max"], "product": with_numbers["min"]}
    for dtype in DTYPES:
        for op, reference in with_numbers.items():
            if dtype.is_complex and op in ("max", "min"):
                continue
            if dtype is torch.bool:
                reference = with_booleans.get(op, reference)
            for shape in FEW_SHAPES if tiny else [*SHAPES, SHAPE]:
                each = torch.stack([whole_numbers(rank, dtype, shape) for rank in range(comm.size)])
                expected = reference(each).to(dtype)
                for root in (None, *range(comm.size)) if op == "sum" else (None, comm.size - 1):
                    for name, x in layouts(each[comm.rank]):
                        comm.ireduce(x, op, root).wait()
                        if root in (None, comm.rank):
                            check(x, expected, op, root, name)
                            compared += 1
    return compared


@pytest.mark.parametrize("num_ranks", IN_PIECES)
@pytest.mark.parametrize("tiny", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_reductions_are_those_of_pytorch(ranks: Ranks, num_ranks: int, tiny: bool) -> None:
    assert min(ranks(num_ranks).run(reduce_everything, tiny)) > (300 if tiny else 1000)


@on_ranks(2)
def test_messages_of_one_tag_keep_their_order(comm: Communicator) -> None:
    """Three messages at once, two of one tag; the received ones are waited for last first."""
    other = 1 - comm.rank
    into = [torch.zeros(2) for _ in range(3)]
    pending = [comm.irecv(into[0], other, 1), comm.irecv(into[1], other, 1), comm.irecv(into[2], other, 2)]
    sent = [comm.isend(torch.full((2,), value), other, tag) for value, tag in ((5.0, 2), (6.0, 1), (7.0, 1))]
    for each in reversed(pending):
        each.wait()
    Pending.all(comm.node, sent).wait()
    assert [float(x.sum()) for x in into] == [12.0, 14.0, 10.0]


@on_ranks(2)
def test_what_was_sent_lives_until_it_has_arrived(comm: Communicator) -> None:
    """A transposed tensor is copied when it is sent, and that copy lives until it has arrived."""
    if comm.rank == 1:
        comm.recv(torch.zeros(1), 0, tag=1)  # so that rank 0 has long let go of its tensors
        assert float(comm.recv(torch.zeros(2000, 300), 0).mean()) == 3.0
        return
    pending = comm.isend(torch.full((300, 2000), 3.0).mT, 1)
    for value in range(20):
        torch.full((300, 2000), float(value))
    comm.send(torch.zeros(1), 1, tag=1)
    pending.wait()


@on_ranks(4)
def test_split_makes_communicators_of_one_colour_in_the_order_of_the_keys(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    total = part.all_reduce(torch.tensor(float(comm.rank)))
    assert (part.rank, part.size, float(total)) == [(1, 2, 2.0), (1, 2, 4.0), (0, 2, 2.0), (0, 2, 4.0)][comm.rank]


@on_ranks(2)
def test_objects(comm: Communicator) -> None:
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.broadcast_object(("of", comm.rank), 1) == ("of", 1)


@on_ranks(2)
def test_meta_tensors_move_nothing_and_keep_their_shapes(comm: Communicator) -> None:
    x = torch.empty(2, 3, device="meta")
    comm.send(x, 1 - comm.rank)
    comm.iexchange([Piece(1 - comm.rank, x)], [Piece(1 - comm.rank, x)]).wait()
    results = [comm.all_reduce(x), comm.broadcast(x), comm.all_gather(x)]
    assert all(y.is_meta for y in results)
    assert [tuple(y.shape) for y in results] == [(2, 3), (2, 3), (2, 2, 3)]


@on_ranks(2)
def test_tensors_inside_a_graph_are_sent_as_values(comm: Communicator) -> None:
    x = torch.full((3,), 2.0, requires_grad=True)
    if comm.rank == 0:
        comm.send(x * 2, 1)
        return
    y = comm.recv(torch.zeros(3), 0)
    assert not y.requires_grad
    assert float(y[0]) == 4.0


@on_ranks(2)
def test_ready_says_whether_a_message_is_there(comm: Communicator) -> None:
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
    assert (too_early, done, float(target.sum())) == (False, True, 2.0)


@on_ranks(2)
def test_what_lies_between_the_received_elements_is_left_alone(comm: Communicator) -> None:
    whole = torch.full((6,), -1.0)
    if comm.rank == 0:
        comm.send(torch.tensor([1.0, 2.0, 3.0]), 1)
        return
    comm.recv(whole[::2], 0)
    assert whole.tolist() == [1.0, -1.0, 2.0, -1.0, 3.0, -1.0]


@pytest.mark.parametrize(("limit", "pieces"), [(384, 1), (383, 2), (100, 4), (7, 55)])
@on_ranks(2)
def test_large_messages_travel_in_pieces(comm: Communicator, limit: int, pieces: int) -> None:
    """The 48 numbers of 8 bytes make 384 bytes, in each of 6 layouts; a piece need not hold whole numbers."""
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
    assert comm.mpi.calls == {"Irecv": 6 * pieces, "Isend": 6 * pieces, "Ibcast": 6 * pieces}


@pytest.mark.parametrize(
    ("limit", "dtype", "pieces"),
    [
        (384, torch.float64, 1),
        (383, torch.float64, 2),
        (100, torch.float64, 4),
        pytest.param(7, torch.float64, 48, marks=pytest.mark.exhaustive),
        (96, torch.bfloat16, 2),
        (10, torch.int16, 10),
    ],
)
@on_ranks(3)
def test_large_reductions_travel_in_pieces_of_whole_numbers(
    comm: Communicator, limit: int, dtype: torch.dtype, pieces: int
) -> None:
    """bfloat16 is reduced as float32: 48 numbers are 192 bytes."""
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
    assert comm.mpi.calls == {"Iallreduce": 6 * pieces, "Ireduce": 6 * pieces}


@pytest.mark.parametrize(("limit", "pieces"), [(144, 1), (143, 2), (40, 4), (1, 48)])
@on_ranks(3)
def test_large_collectives_travel_in_pieces(comm: Communicator, limit: int, pieces: int) -> None:
    """12 numbers of 4 bytes for each of 3 ranks make 144 bytes."""
    messages = 2 * -(-48 // limit)
    expected = {"Iallgather": pieces, "Isend": messages, "Irecv": messages}
    comm.mpi = Counting(comm.mpi)
    comm.max_message_bytes = limit
    shape = (comm.size, 4, 3)
    rows = torch.stack([whole_numbers(rank, torch.float32, shape) for rank in range(comm.size)])
    mine = rows[comm.rank]
    swapped = torch.zeros_like(mine)
    comm.iexchange([*map(Piece, range(comm.size), mine)], [*map(Piece, range(comm.size), swapped)]).wait()
    check(swapped, rows[:, comm.rank])
    check(comm.all_gather(mine[0]), rows[:, 0])
    assert comm.mpi.calls == expected


@on_ranks(4)
def test_pieces_live_until_slow_ranks_have_read_them(comm: Communicator) -> None:
    """A large piece is read from the sender's memory only when its receiver arrives."""
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
