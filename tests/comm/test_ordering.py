"""All ranks hold the same bits after a reduction, also of NaNs of any sign and of zeros of both signs."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator
from mpi4dl.comm.communicator import INTEGERS, order_keys_of, values_of_order_keys
from tests.pool.ranks import Ranks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def special_values(dtype: torch.dtype) -> list[float]:
    limits = torch.finfo(dtype)
    return [-math.inf, limits.min, -1.0, -limits.tiny, -0.0, 0.0, limits.tiny, 1.0, limits.max, math.inf, math.nan]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_have_the_order_of_the_values_and_give_them_back(dtype: torch.dtype) -> None:
    values = torch.tensor(special_values(dtype), dtype=torch.float64).to(dtype)
    keys = order_keys_of(values, "max")
    assert keys.tolist() == sorted(set(keys.tolist()))
    assert order_keys_of(values, "min")[-1] < keys[0]
    assert (order_keys_of(values, "min")[:-1] == keys[:-1]).all()
    back = values_of_order_keys(keys, dtype)
    assert torch.equal(back.view(keys.dtype)[:-1], values.view(keys.dtype)[:-1])
    assert back[-1].isnan()


def bits_of_reductions(comm: Communicator, op: str) -> list[tuple[Tensor, Tensor, bool]]:
    """By dtype and layout: this rank's bits, its values, and whether those are what torch has of all rows."""
    results = []
    for dtype in FLOATS:
        some = [*special_values(dtype), -math.nan]
        tuples = list(itertools.product(range(len(some)), repeat=2))
        # Every pair of special values meets on every pair of neighbours, and in both orders.
        rows = [torch.tensor([some[pair[rank % 2]] for pair in tuples]).to(dtype) for rank in range(comm.size)]
        stack = torch.stack(rows)
        expected = {"max": stack.amax(0), "min": stack.amin(0), "sum": stack.double().sum(0).to(dtype)}.get(op)
        for x in (rows[comm.rank].clone(), rows[comm.rank].view(12, 12).t().contiguous().t()):
            comm.all_reduce(x, op)
            flat = x.reshape(-1)
            right = expected is None or torch.equal(flat.nan_to_num(7.0), expected.nan_to_num(7.0))
            results.append((flat.view(INTEGERS[x.itemsize]), flat, right))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("op", ["max", "min", "sum", "product"])
def test_all_ranks_hold_the_same_bits_of_special_values(ranks: Ranks, num_ranks: int, op: str) -> None:
    first, *others = ranks(num_ranks).run(bits_of_reductions, op)
    for _, values, right in first:
        assert right, f"{op} of {values.dtype} is {values}"
    for other in others:
        for (mine, values, _), (theirs, _, _) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs), f"{op} of {values.dtype}"


def bits_beyond_a_piece(comm: Communicator) -> Tensor:
    """The last elements come in a small piece of their own, which a library may add up on every rank."""
    x = torch.full((comm.max_reduction_bytes // 4 + 3,), -math.nan if comm.rank else math.nan)
    comm.all_reduce(x)
    return x[-3:].view(torch.int32)


def test_the_last_piece_of_a_large_sum_has_the_same_bits_too(ranks: Ranks) -> None:
    first, second = ranks(2).run(bits_beyond_a_piece)
    assert torch.equal(first, second)
