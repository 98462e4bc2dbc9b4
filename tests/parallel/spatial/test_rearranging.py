"""Rows rolled, flipped, repeated, chosen and joined, on tiles as on the whole image."""

import pytest
import torch

from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
            "roll rows": lambda x: x.roll(3, 2),
            "roll rows and columns": lambda x: torch.roll(x, shifts=(-2, 40), dims=(2, -1)),
            "roll twice along one dim": lambda x: x.roll((1, 2), (3, 3)),
            "roll channels": lambda x: x.roll(1, 1),
            "roll the batch": lambda x: x.roll(1, 0),
            "roll channels last": lambda x: x.permute(0, 2, 3, 1).roll((-2, -2), (1, 2)),
            "flip rows": lambda x: x.flip(2),
            "flip all": lambda x: torch.flip(x, (0, 1, 2, 3)),
            "flip, its dims by name": lambda x: x.flip(dims=(-1,)),
            "flip nothing": lambda x: x.flip(()),
            "fliplr": lambda x: torch.fliplr(x),
            "flipud of an image": lambda x: x[0].flipud(),
            "rot90": lambda x: x.rot90(1, (2, 3)),
            "rot90 thrice": lambda x: torch.rot90(x, -1, (3, 2)),
            "repeat": lambda x: x.repeat(1, 2, 3, 2),
            "repeat, a new dim": lambda x: x.repeat(2, 1, 1, 1, 2),
            "repeat many times": lambda x: x[:, :1].repeat(1, 1, 7, 1),
            "tile": lambda x: x.tile(2, 3),
            "repeat_interleave channels": lambda x: x.repeat_interleave(2, 1),
            "repeat_interleave rows": lambda x: torch.repeat_interleave(x, 3, dim=2),
            "repeat_interleave, each otherwise": lambda x: x.repeat_interleave(torch.arange(x.shape[3]) % 3, 3),
            "hstack": lambda x: torch.hstack((x, 2 * x)),
            "vstack": lambda x: torch.vstack((x, 2 * x)),
            "dstack": lambda x: torch.dstack((x, x.detach())),
            "column_stack": lambda x: torch.column_stack((x, x)),
            "cat of rows": lambda x: torch.cat((x[:, :, 1:], x, 2 * x[:, :, :3]), 2),
            "cat of columns with a plain tensor": lambda x: torch.cat((torch.ones(*x.shape[:3], 2), x), -1),
            "rows by a list": lambda x: x[:, :, [0, 3, 1, -1, 3]],
            "columns by index_select": lambda x: x.index_select(3, torch.tensor([2, 0, 4, 4])),
            "differences": lambda x: x.diff(dim=2),
            "differences of columns, twice": lambda x: torch.diff(x, 2, append=torch.zeros(*x.shape[:3], 1)),
            "broadcast_to": lambda x: x[:, :1].broadcast_to(x.shape),
            "a row": lambda x: x[:, :, 3],
            "a column from the end": lambda x: x.select(3, -2),
            "rows apart": lambda x: torch.stack(x.unbind(2)[::-1], 2),
            "channels by a list": lambda x: x[:, [2, 0, 2]],
            "channels by a tensor": lambda x: x[:, torch.tensor([[3, 1], [0, 0]])],
            "channels by a mask": lambda x: x[:, torch.tensor([True, False, False, True]), 1:],
            "channels and rows": lambda x: x[:, [1, 3], :, 2:4],
            "two dims by lists": lambda x: x.unflatten(1, (2, 2))[:, [0, 1, 1], [1, 0, 1]],
            "the batch, and a new dim": lambda x: x[[2, 0, 1], ..., None, :],
        }
    ),
    **functions(
        {
            "roll all of an image": lambda x: x[0, 0].roll((1, -1), (0, 1)).sum(0),
            "roll all": lambda x: x.roll(5),
            "a pixel": lambda x: x[:, :, 2, 3].sum(0),
            "repeat_interleave of all": lambda x: x.repeat_interleave(2),
        },
        spread=False,
    ),
}


@pytest.mark.parametrize("arrangement", SOME_ARRANGEMENTS, ids=str)
def test_rearranged_rows_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
