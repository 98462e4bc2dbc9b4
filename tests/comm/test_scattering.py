"""Reduce-scatter and all-gather in place: every dtype, uneven and empty parts, sums that round once, many at once."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, Pending
from mpi4dl.geometry import even_cuts
from tests.comm.values import DTYPES, Counting, bits, whole_numbers
from tests.pool.ranks import on_ranks

LENGTHS = (0, 1, 3, 24, 103)


def cuts_for(length: int, size: int) -> list[Sequence[int] | None]:
    """Even parts, all for the first rank, all for the last, and a part that is longer than the others."""
    rest = [length - length // (3 + rank) for rank in range(size - 1)]
    return [None, [0, *[length] * size], [*[0] * size, length], sorted([0, *rest, length])]


def total_of(everyone: list[Tensor]) -> Tensor:
    stacked = torch.stack(everyone)
    return stacked.any(0) if stacked.dtype is torch.bool else stacked.sum(0, dtype=stacked.dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks()
def test_parts_are_summed_and_shared_for_every_dtype(comm: Communicator, num_ranks: int) -> None:
    compared = 0
    for dtype in DTYPES:
        for length in LENGTHS:
            everyone = [whole_numbers(rank, dtype, (length,)) for rank in range(comm.size)]
            total = total_of(everyone)
            for cuts in cuts_for(length, comm.size):
                where = even_cuts(length, comm.size) if cuts is None else cuts
                flat = torch.cat([everyone[comm.rank]] * 3)[length : 2 * length]
                comm.ireduce_scatter(flat, cuts).wait()
                own = slice(where[comm.rank], where[comm.rank + 1])
                assert torch.equal(flat[own], total[own]), (dtype, cuts, flat, total)
                mine = torch.zeros_like(flat)
                mine[own] = everyone[comm.rank][own]
                comm.iall_gather_into(mine, cuts).wait()
                parts = [everyone[rank][where[rank] : where[rank + 1]] for rank in range(comm.size)]
                assert torch.equal(mine, torch.cat(parts)), (dtype, cuts)
                compared += 1
    assert compared == len(DTYPES) * len(LENGTHS) * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@on_ranks()
def test_sums_are_in_the_order_of_the_ranks_and_round_once(
    comm: Communicator, num_ranks: int, dtype: torch.dtype
) -> None:
    """What both halves make of noise is the sum in the order of the ranks on any rank alone."""
    generator = torch.Generator().manual_seed(1)
    everyone = torch.randn((comm.size, 1001), generator=generator, dtype=torch.float64).to(dtype)
    flat = everyone[comm.rank].clone()
    comm.ireduce_scatter(flat).wait()
    comm.iall_gather_into(flat).wait()
    expected = everyone[0].to(torch.promote_types(dtype, torch.float32))
    for part in everyone[1:]:
        expected = expected + part
    assert bits(flat) == bits(expected.to(dtype))


@pytest.mark.parametrize(("limit", "sum_pieces", "gather_pieces"), [(40, 1, 1), (39, 2, 1), (7, 6, 3)])
@on_ranks(3)
def test_many_at_once_and_in_pieces(comm: Communicator, limit: int, sum_pieces: int, gather_pieces: int) -> None:
    """A part is 10 numbers: 40 bytes in float32, 20 in int16; it goes to, or comes from, 2 others."""
    count = 8 * 2 * (sum_pieces + gather_pieces)
    comm.max_message_bytes = limit
    comm.mpi = Counting(comm.mpi)
    length = 30
    summed = [whole_numbers(comm.rank, torch.float32, (length,), salt) for salt in range(8)]
    shared = [whole_numbers(comm.rank, torch.int16, (length,), salt) for salt in range(8)]
    pending: list[Pending] = []
    for a, b in zip(summed, shared, strict=True):
        pending += [comm.ireduce_scatter(a), comm.iall_gather_into(b)]
    for each in reversed(pending) if comm.rank else pending:
        each.wait()
    where = even_cuts(length, comm.size)
    own = slice(where[comm.rank], where[comm.rank + 1])
    for salt, (a, b) in enumerate(zip(summed, shared, strict=True)):
        everyone = [whole_numbers(rank, torch.float32, (length,), salt) for rank in range(comm.size)]
        assert torch.equal(a[own], total_of(everyone)[own])
        parts = [whole_numbers(rank, torch.int16, (length,), salt) for rank in range(comm.size)]
        assert torch.equal(b, torch.cat([part[where[i] : where[i + 1]] for i, part in enumerate(parts)]))
    assert comm.mpi.calls == {"Irecv": count, "Isend": count}


@on_ranks(2)
def test_meta_and_empty_tensors_move_nothing(comm: Communicator) -> None:
    comm.mpi = Counting(comm.mpi)
    for flat in (torch.empty(5, device="meta"), torch.empty(0)):
        comm.ireduce_scatter(flat).wait()
        comm.iall_gather_into(flat).wait()
    assert comm.mpi.calls == {}


@on_ranks(2)
def test_buffers_and_cuts_that_do_not_fit_are_refused(comm: Communicator) -> None:
    rule = "must be 3 numbers that rise from 0 to 5, so that each of 2 ranks has a part of 5 elements"
    layout = "but must be 1-D and contiguous: pass a flat buffer"
    expected = [
        f"the tensor has shape (2, 3) and strides (3, 1), {layout}",
        f"the tensor has shape (4,) and strides (2,), {layout}",
        f"cuts [0, 5] {rule}",
        f"cuts [0, 6, 5] {rule}",
        f"cuts [0, 2, 4] {rule}",
    ]
    said = []
    flat = torch.zeros(5)
    calls = (
        lambda: comm.ireduce_scatter(torch.zeros(2, 3)),
        lambda: comm.iall_gather_into(torch.zeros(8)[::2]),
        lambda: comm.ireduce_scatter(flat, [0, 5]),
        lambda: comm.iall_gather_into(flat, [0, 6, 5]),
        lambda: comm.ireduce_scatter(flat, [0, 2, 4]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        said.append(str(caught.value))
    assert said == expected
