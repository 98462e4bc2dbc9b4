"""What many ranks merge in two levels: every rank has each part once, in the same order."""

import pytest
import torch
from torch import Tensor

from mpi4dl.comm import Communicator, blocks
from mpi4dl.comm.blocks import BlockPlan, Blocks
from tests.pool.ranks import Ranks

SIZES = [2, 5, 9, 64, 65, 67, 96, 127, 130, 1000, 2047, 2048, 4099]


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gathers_few_parts_and_meets_each_block(size: int) -> None:
    plan = BlockPlan.of(size)
    assert [rank for span in plan.spans for rank in span] == list(range(size))
    assert {len(span) for span in plan.spans} <= {plan.fewest, plan.fewest + 1}
    limit = 2 * size**0.5 + 1
    assert plan.fewest <= limit
    assert plan.num_blocks <= limit
    of_place = [plan.across(place) for place in range(plan.fewest)]
    assert sorted(rank for ranks in of_place for rank in ranks) == list(range(size))
    for ranks in of_place:
        assert sorted({plan.block(rank) for rank in ranks}) == list(range(plan.num_blocks))


def merge_in_order(parts: Tensor, level: int) -> Tensor:
    """Neither associative nor commutative; of integers, so that another order or another part shows."""
    found = torch.full_like(parts[0], 7 + level)
    for part in parts:
        found = (found * 31 + part) % 1_000_003
    return found


def combine(comm: Communicator) -> tuple[int, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MOST_GATHERED", 4)
        found = comm.split(0).blocks
    assert (found is None) == (comm.size <= 4)
    if found is None:
        return 0, True
    plan = BlockPlan.of(comm.size)
    each = [torch.tensor([10 * rank + 3]) for rank in range(comm.size)]
    of_blocks = [merge_in_order(torch.stack([each[rank] for rank in span]), 0) for span in plan.spans]
    expected = merge_in_order(torch.stack(of_blocks), 1)
    result = Blocks.of(comm).combine(each[comm.rank], merge_in_order)
    return int(result), torch.equal(result, expected)


@pytest.mark.parametrize("num_ranks", [4, 5, 6, 7, 8])
def test_all_ranks_merge_the_same_in_the_same_order(ranks: Ranks, num_ranks: int) -> None:
    found = ranks(num_ranks).run(combine)
    assert all(right for _, right in found)
    assert len({value for value, _ in found}) == 1
