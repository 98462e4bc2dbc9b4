"""Tensors over MPI: every dtype, layout and size arrives as it was sent, in chunks too; reductions are PyTorch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.comm.communicator import Pending
from mpi4dl.comm.packing import Piece
from tests.pool.ranks import Ranks

REALS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*REALS, *INTEGERS, *COMPLEX, torch.bool]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0, 2)]

FEW_RANKS = [1, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (2, 3)), 4]
IN_PIECES = [1, 2, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (3, 4))]  # slow in tiny ones


def sample(dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> Tensor:
    """Small integers, which every dtype holds exactly, other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 5, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.double(), (values - 2).double()).to(dtype)
    return values.to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
}


def laid_out(x: Tensor) -> list[Tensor]:
    return [layout(x.clone()) for name, layout in LAYOUTS.items() if x.dim() >= 2 or name in ("dense", "strided")]


def move_everything(comm: Communicator, max_message_bytes: int) -> int:
    """Send, exchange, broadcast and so on, of every dtype and layout. Returns how many tensors were compared."""
    comm.max_message_bytes = max_message_bytes
    compared = 0

    def same(ours: Tensor | None, expected: Tensor) -> None:
        nonlocal compared
        assert ours is not None
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(ours, expected), (ours, expected)
        compared += 1

    last = comm.size - 1
    for dtype in DTYPES:
        for shape in SHAPES:
            each = [sample(dtype, shape, rank) for rank in range(comm.size)]
            for mine, into in zip(laid_out(each[comm.rank]), laid_out(torch.zeros_like(each[0])), strict=True):
                left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
                receiving = comm.irecv(into, left)
                comm.send(mine, right)
                receiving.wait()
                same(into, each[left])
                same(comm.broadcast(mine.clone(), last), each[last])
                same(comm.all_gather(mine), torch.stack(each))
                swapped = [torch.zeros_like(into) for _ in each]
                comm.iexchange(
                    [Piece(to, mine) for to in range(comm.size)], [*map(Piece, range(comm.size), swapped)], 3
                ).wait()
                same(torch.stack(swapped), torch.stack(each))
            for spread in laid_out(torch.zeros_like(each[0])):
                spread.copy_(each[comm.rank])
                same(comm.broadcast(spread, 0), each[0])
    return compared


@pytest.mark.parametrize("num_ranks", IN_PIECES)
@pytest.mark.parametrize("max_message_bytes", [1 << 30, 10])
def test_everything_arrives_as_it_was_sent(ranks: Ranks, num_ranks: int, max_message_bytes: int) -> None:
    assert min(ranks(num_ranks).run(move_everything, max_message_bytes)) > 1000


def reduce_everything(comm: Communicator, max_reduction_bytes: int) -> int:
    comm.max_reduction_bytes = max_reduction_bytes
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
            for shape in SHAPES:
                each = torch.stack([sample(dtype, shape, rank) for rank in range(comm.size)])
                expected = reference(each).to(dtype)
                for mine in laid_out(each[comm.rank]):
                    all_reduced = mine.clone()
                    assert comm.all_reduce(all_reduced, op) is all_reduced
                    comm.ireduce(mine, op, comm.size - 1).wait()
                    if comm.rank == comm.size - 1:
                        assert torch.equal(mine, expected), (dtype, op, mine, expected)
                    assert torch.equal(all_reduced, expected), (dtype, op, all_reduced, expected)
                    assert all_reduced.dtype is dtype
                    compared += 1
    return compared


@pytest.mark.parametrize("num_ranks", IN_PIECES)
@pytest.mark.parametrize("max_reduction_bytes", [1 << 21, 10])
def test_reductions_are_those_of_pytorch(ranks: Ranks, num_ranks: int, max_reduction_bytes: int) -> None:
    assert min(ranks(num_ranks).run(reduce_everything, max_reduction_bytes)) > 500


def add_up_in_low_precision(comm: Communicator) -> tuple[float, bytes]:
    """256 + 1/4 of a unit in the last place on each of the others: only a wider sum notices them."""
    x = torch.full((3,), 256.0 if comm.rank == 0 else 0.75, dtype=torch.bfloat16)
    comm.all_reduce(x)
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    comm.all_reduce(noise)
    return float(x[0]), noise.view(torch.uint8).numpy().tobytes()


def test_low_precision_is_summed_in_float32_and_alike_on_all_ranks(ranks: Ranks) -> None:
    results = ranks(4).run(add_up_in_low_precision)
    assert {total for total, _ in results} == {258.0}  # 258.25 rounded once; one by one, 256.75 rounds back to 256
    assert len({bits for _, bits in results}) == 1


def send_in_order(comm: Communicator) -> list[float]:
    """Three messages at once, two of one tag; the received ones are waited for last first."""
    other = 1 - comm.rank
    into = [torch.zeros(2) for _ in range(3)]
    pending = [comm.irecv(into[0], other, 1), comm.irecv(into[1], other, 1), comm.irecv(into[2], other, 2)]
    sent = [comm.isend(torch.full((2,), value), other, tag) for value, tag in ((5.0, 2), (6.0, 1), (7.0, 1))]
    for each in reversed(pending):
        each.wait()
    Pending.all(comm.node, sent).wait()
    return [float(x.sum()) for x in into]


def test_messages_of_one_tag_keep_their_order(ranks: Ranks) -> None:
    assert ranks(2).run(send_in_order) == [[12.0, 14.0, 10.0]] * 2


def forget_what_was_sent(comm: Communicator) -> float:
    """A transposed tensor is copied when it is sent, and that copy lives until it has arrived."""
    if comm.rank == 1:
        comm.recv(torch.zeros(1), 0, tag=1)  # so that rank 0 has long let go of its tensors
        return float(comm.recv(torch.zeros(2000, 300), 0).mean())
    pending = comm.isend(torch.full((300, 2000), 3.0).mT, 1)
    for value in range(20):
        torch.full((300, 2000), float(value))
    comm.send(torch.zeros(1), 1, tag=1)
    pending.wait()
    return 3.0


def test_what_was_sent_lives_until_it_has_arrived(ranks: Ranks) -> None:
    assert ranks(2).run(forget_what_was_sent) == [3.0, 3.0]


class Recorder:
    """An MPI communicator that notes how many bytes each call passes."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.mpi, name)

        def call(*args: Any) -> Any:
            self.calls += [(name, len(arg[0])) for arg in args if isinstance(arg, list)]
            return function(*args)

        return call


def move_in_chunks(comm: Communicator) -> list[tuple[str, int]]:
    recorder = Recorder(comm.mpi)
    comm.mpi, comm.max_message_bytes, comm.max_reduction_bytes = recorder, 100, 64  # type: ignore[assignment]
    x = torch.arange(30.0)
    other = 1 - comm.rank
    pending = comm.irecv(torch.zeros(30), other)
    comm.send(x, other)
    pending.wait()
    comm.broadcast(x)
    comm.all_reduce(x)
    comm.all_gather(x)
    return recorder.calls


def test_large_tensors_travel_in_chunks(ranks: Ranks) -> None:
    for calls in ranks(2).run(move_in_chunks):
        assert calls == [
            *[("Irecv", 100), ("Irecv", 20)],
            *[("Isend", 100), ("Isend", 20)],
            *[("Ibcast", 100), ("Ibcast", 20)],
            *[("Iallreduce", 64), ("Iallreduce", 56)],
            *[("Iallgather", 50), ("Iallgather", 100), ("Iallgather", 50), ("Iallgather", 100)],
            *[("Iallgather", 20), ("Iallgather", 40)],
        ]


def wait_twice(comm: Communicator) -> float:
    x = torch.ones(1000)
    pending = comm.iall_reduce(x)
    pending.wait()
    pending.wait()
    return float(x.mean())


def test_a_reduction_may_be_waited_for_twice(ranks: Ranks) -> None:
    assert ranks(3).run(wait_twice) == [3.0] * 3


def split_by_parity(comm: Communicator) -> tuple[int, int, float]:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    total = part.all_reduce(torch.tensor(float(comm.rank)))
    return part.rank, part.size, float(total)


def test_split_makes_communicators_of_one_colour_in_the_order_of_the_keys(ranks: Ranks) -> None:
    assert ranks(4).run(split_by_parity) == [(1, 2, 2.0), (1, 2, 4.0), (0, 2, 2.0), (0, 2, 4.0)]


def disagree(comm: Communicator, error_rank: int | None, differing_rank: int | None) -> str:
    error = f"rank {error_rank}'s disk is full" if comm.rank == error_rank else None
    try:
        comm.agree(error, batch_size=8 if comm.rank != differing_rank else 9, lr=0.1)
    except Refusal as refusal:
        return str(refusal)
    return ""


def test_an_error_of_one_rank_is_raised_by_all(ranks: Ranks) -> None:
    assert ranks(3).run(disagree, None, None) == [""] * 3
    assert ranks(3).run(disagree, 2, None) == ["rank 2: rank 2's disk is full"] * 3
    assert ranks(3).run(disagree, 0, 1) == ["rank 0's disk is full"] * 3
    assert ranks(1).run(disagree, 0, None) == ["rank 0's disk is full"]


def test_facts_that_differ_are_told_as_rank_0_sees_them(ranks: Ranks) -> None:
    (message, *others) = ranks(4).run(disagree, None, 2)
    assert message.startswith("the ranks were started differently: batch_size is 8 on rank 0 but 9 on rank 2")
    assert others == [message] * 3
    assert "batch_size is 9 on rank 0 but 8 on rank 1" in ranks(4).run(disagree, None, 0)[3]


def fail_together(comm: Communicator, kind: type[Exception]) -> tuple[str, str, str]:
    try:
        with comm.together():
            if comm.rank == 1:
                raise kind("no such tile")
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return "", "", ""


def test_what_fails_on_one_rank_fails_on_all_together(ranks: Ranks) -> None:
    first, second, third = ranks(3).run(fail_together, OSError)
    assert first == third == ("Refusal", "rank 1: no such tile", "NoneType")
    assert second == ("Refusal", "rank 1: no such tile", "OSError")


def pass_what_together_does_not_name(comm: Communicator) -> None:
    with pytest.raises(KeyError), comm.together((OSError,)):
        raise KeyError("a bug")
    with comm.together():
        pass


def test_bugs_and_successes_pass_through_together(ranks: Ranks) -> None:
    ranks(2).run(pass_what_together_does_not_name)


def exchange_objects(comm: Communicator) -> tuple[list[object], object]:
    return comm.all_gather_object({"rank": comm.rank}), comm.broadcast_object(("of", comm.rank), 1)


def test_objects(ranks: Ranks) -> None:
    assert ranks(2).run(exchange_objects) == [([{"rank": 0}, {"rank": 1}], ("of", 1))] * 2


def use_meta_tensors(comm: Communicator) -> list[tuple[int, ...]]:
    x = torch.empty(2, 3, device="meta")
    comm.send(x, 1 - comm.rank)
    comm.iexchange([Piece(1 - comm.rank, x)], [Piece(1 - comm.rank, x)]).wait()
    results = [comm.all_reduce(x), comm.broadcast(x), comm.all_gather(x)]
    assert all(y.is_meta for y in results)
    return [tuple(y.shape) for y in results]


def test_meta_tensors_move_nothing_and_keep_their_shapes(ranks: Ranks) -> None:
    assert ranks(2).run(use_meta_tensors) == [[(2, 3), (2, 3), (2, 2, 3)]] * 2


def send_views(comm: Communicator) -> list[complex]:
    """Lazy conjugates and negatives are views that have other bits than values."""
    z = torch.full((2,), 1 + 2j)
    imaginary = z.conj().imag
    assert imaginary.is_neg()
    received = torch.zeros(2, dtype=z.dtype), torch.zeros(2)
    other = 1 - comm.rank
    for x, into in zip((z.conj(), imaginary), received, strict=True):
        pending = comm.irecv(into, other)
        comm.send(x, other)
        pending.wait()
    return [complex(received[0][0]), complex(received[1][1])]


def test_lazy_conjugates_arrive_with_their_values(ranks: Ranks) -> None:
    assert ranks(2).run(send_views) == [[1 - 2j, -2]] * 2


def send_what_requires_gradients(comm: Communicator) -> float:
    x = torch.full((3,), 2.0, requires_grad=True)
    if comm.rank == 0:
        comm.send(x * 2, 1)
        return 4.0
    y = comm.recv(torch.zeros(3), 0)
    assert not y.requires_grad
    return float(y[0])


def test_tensors_inside_a_graph_are_sent_as_values(ranks: Ranks) -> None:
    assert ranks(2).run(send_what_requires_gradients) == [4.0, 4.0]
