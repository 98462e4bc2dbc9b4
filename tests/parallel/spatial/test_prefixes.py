"""Cumulative sums, products and extrema along the image are those of the whole."""

import pytest
import torch

from tests.parallel.spatial.comparing import SOME_ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
            "cumsum of rows": lambda x: x.cumsum(2),
            "cumsum of columns": lambda x: torch.cumsum(x, dim=-1),
            "integral image": lambda x: x.cumsum(2).cumsum(3),
            "cumsum of integers": lambda x: (3 * x.detach()).int().cumsum(3),
            "cumsum of booleans, as floats": lambda x: (x > 0).cumsum(2, dtype=torch.float64),
            "cumprod of columns": lambda x: x.cumprod(3),
            "cumprod of zeros": lambda x: (x * (x.detach() > -1)).cumprod(2),
            "logcumsumexp of rows": lambda x: x.logcumsumexp(2),
            "cummax of columns": lambda x: x.cummax(3),
            "cummin of rows": lambda x: torch.cummin(x, 2),
            "cummax of equals": lambda x: x.round().cummax(3),
            "cummin of equals": lambda x: x.clamp(-0.5, 0.5).cummin(2),
            "cummax of channels": lambda x: x.cummax(1),
            "cumsum of the batch": lambda x: x.cumsum(0),
        }
    ),
}


@pytest.mark.parametrize("arrangement", SOME_ARRANGEMENTS, ids=str)
def test_prefixes_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
