"""Algorithms of all-reduce: each gives what the MPI library gives, alone and many at once; the choice is alike."""

import random
import time

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.allreduce import ALGORITHMS, AllReduce, Choice, pick
from tests.comm.values import DTYPES, bits, check, layouts, whole_numbers
from tests.pool.ranks import Ranks, on_ranks

LENGTHS = (0, 1, 3, 7, 48, 1001)
SHAPE = (4, 2, 3, 2)
NODES: dict[int, list[list[int]]] = {
    1: [[0]],
    2: [[0, 0], [0, 1]],
    3: [[0, 0, 1], [0, 1, 0]],
    4: [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [3, 2, 1, 0]],
    8: [[0, 0, 0, 1, 1, 2, 2, 2]],
}


def sum_everything(comm: Communicator, name: str, nodes: list[int] | None) -> int:
    all_reduce = AllReduce(comm, Choice.of(name, "as asked"), None if nodes is None else nodes[comm.rank])
    compared = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            ours = whole_numbers(comm.rank, dtype, (length,))
            expected = comm.all_reduce(ours.clone())
            all_reduce(ours).wait()
            check(ours, expected, length)
            compared += 1
        for layout, ours in layouts(whole_numbers(comm.rank, dtype, SHAPE)):
            expected = comm.all_reduce(ours.clone())
            pending = all_reduce(ours)
            pending.wait()
            pending.wait()
            check(ours, expected, layout)
            compared += 1
    return compared


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.sample(4)
def test_sums_are_those_of_the_library(ranks: Ranks, num_ranks: int, name: str) -> None:
    for nodes in NODES[num_ranks] if name == "two-level" else [None]:
        assert min(ranks(num_ranks).run(sum_everything, name, nodes)) >= len(DTYPES) * (len(LENGTHS) + 6)


@on_ranks(4)
def test_nodes_are_the_machines_by_default(comm: Communicator) -> None:
    all_reduce = pick(comm, "two-level")
    total = torch.full((5,), float(comm.rank))
    all_reduce(total).wait()
    assert total.tolist() == [6.0] * 5
    assert (all_reduce.levels.within.size, all_reduce.levels.several) == (4, False)


def sum_noise(comm: Communicator, name: str, dtype: torch.dtype) -> tuple[bytes, float]:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn((comm.size, 5001), generator=generator, dtype=torch.float64).to(dtype)
    all_reduce = AllReduce(comm, Choice.of(name, "as asked"), comm.rank // 2)
    results = []
    for _ in range(2):
        total = parts[comm.rank].clone()
        all_reduce(total).wait()
        results.append(bits(total))
    assert results[0] == results[1]
    exact = parts.double().sum(0)
    return results[0], float(((total.double() - exact) / exact.abs().clamp(min=1)).abs().max())


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)],
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bits_are_equal_on_all_ranks_and_low_precision_rounds_once(
    ranks: Ranks, name: str, dtype: torch.dtype, bound: float
) -> None:
    """One rounding errs by half a unit in the last place at most: 2 ** -11 and 2 ** -8, and a little of float32."""
    for num_ranks in (3, 4):
        results = ranks(num_ranks).run(sum_noise, name, dtype)
        assert len({total for total, _ in results}) == 1
        assert max(error for _, error in results) <= bound * 1.01


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.sample(3)
@on_ranks()
def test_many_at_once_in_any_order(comm: Communicator, num_ranks: int, seed: int) -> None:
    """Sums of all sizes start in one order on all ranks; each rank dawdles, polls and waits in an order of its own.

    Between them are collectives and messages of the communicator itself, which wait while sums are under way.
    """
    algorithms = list(ALGORITHMS)
    shared, own = random.Random(seed), random.Random(seed * 10 + comm.rank)
    each = [AllReduce(comm, Choice.of(name, "as asked"), comm.rank // 2) for name in algorithms]
    compared = 0
    for _ in range(6):
        started: list[tuple[Tensor, Tensor, Pending]] = []
        for number in range(20):
            length, dtype = shared.choice([1, 2, 50, 3000, 70_000]), shared.choice([torch.float32, torch.bfloat16])
            everyone = [whole_numbers(rank, dtype, (length,), number) for rank in range(comm.size)]
            ours = everyone[comm.rank].clone()
            started.append((ours, torch.stack(everyone).sum(0), shared.choice(each)(ours)))
            if own.random() < 0.2:
                time.sleep(0.002 * own.random())
            if own.random() < 0.3:
                own.choice(started)[2].test()
            if shared.random() < 0.1:
                assert comm.all_gather_object(comm.rank) == list(range(comm.size))
            if shared.random() < 0.1:
                arriving = comm.irecv(torch.zeros(9000), comm.rank - 1 if comm.rank else comm.size - 1, number)
                comm.send(torch.ones(9000), (comm.rank + 1) % comm.size, number)
                arriving.wait()
        own.shuffle(started)
        joined, alone = started[:8], started[8:]
        for _, _, pending in alone:
            pending.wait()
        Pending.all(comm.node, [pending for _, _, pending in joined]).wait()
        for ours, expected, _ in started:
            assert torch.equal(ours, expected), (ours, expected)
            compared += 1
    assert comm.node.underway == []
    assert compared == 120


def poll_to_the_end(comm: Communicator, name: str) -> tuple[bool, bool]:
    """Whether a sum is complete before the last rank has begun, and then by polling alone."""
    all_reduce = AllReduce(comm, Choice.of(name, "as asked"), comm.rank // 2)
    total = torch.ones(40_000)
    comm.barrier()
    if comm.rank == 0:
        comm.recv(torch.zeros(1), 1)
    pending = all_reduce(total)
    early = pending.test()
    if comm.rank == 1:
        comm.send(torch.zeros(1), 0)
    deadline = time.monotonic() + 20
    while not pending.test() and time.monotonic() < deadline:
        time.sleep(0.0005)
    done = pending.test()
    pending.wait()
    assert total.tolist() == [float(comm.size)] * 40_000
    comm.barrier()
    return early, done


@pytest.mark.parametrize("name", ALGORITHMS)
def test_polling_drives_the_phases(ranks: Ranks, name: str) -> None:
    results = ranks(4).run(poll_to_the_end, name)
    assert not results[1][0]
    assert all(done for _, done in results)


@on_ranks(4)
def test_ranks_may_wait_in_opposite_orders(comm: Communicator) -> None:
    """Even ranks wait for one sum, odd ranks for the other: neither ends if a wait drives only its own forward."""
    all_reduce = AllReduce(comm, Choice.of("ring", "as asked"))
    a, b = torch.ones(50_000), torch.ones(50_000)
    pending = [all_reduce(a), all_reduce(b)]
    for each in pending if comm.rank % 2 else reversed(pending):
        each.wait()
        comm.all_gather_object(None)
    assert float(a.mean() + b.mean()) == 8.0


@on_ranks(2)
def test_meta_and_empty_tensors_move_nothing(comm: Communicator) -> None:
    all_reduce = AllReduce(comm, Choice.of("direct", "as asked"))
    assert [all_reduce(x).test() for x in (torch.empty(3, device="meta"), torch.empty(0))] == [True, True]


def pick_by_name(comm: Communicator, name: str) -> str:
    try:
        return pick(comm, name).describe()
    except ValueError as error:
        return str(error)


def test_an_algorithm_may_be_asked_for(ranks: Ranks) -> None:
    assert ranks(2).run(pick_by_name, "ring") == ["all-reduce over 2 ranks: ring (as asked)"] * 2
    message = "all-reduce is 'tree', but must be one of auto, library, direct, ring, two-level"
    assert ranks(2).run(pick_by_name, "tree") == [message] * 2


def test_a_choice_goes_by_precision() -> None:
    choice = Choice("library", "ring", "the same in every run")
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert choice.algorithm(dtype) == "library"
    for dtype in (torch.bfloat16, torch.float16):
        assert choice.algorithm(dtype) == "ring"
    assert str(choice) == "library; in 16 bits ring (the same in every run)"
    assert str(Choice.of("direct", "as asked")) == "direct (as asked)"


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, ("direct", "direct")), (3, ("library", "direct"))])
@on_ranks()
def test_the_choice_follows_from_the_number_of_ranks(
    comm: Communicator, num_ranks: int, expected: tuple[str, str]
) -> None:
    choice = pick(comm, "auto").choice
    assert (choice.algorithm(torch.float32), choice.algorithm(torch.bfloat16)) == expected
