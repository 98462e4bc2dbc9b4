"""What once went wrong silently: one pixel against many, and results that share memory with their input."""

import pytest
from torch.nn import functional as F

from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, functions
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
            "an image times its mean, by a window as large as the image": lambda x: x * F.avg_pool2d(x, x.shape[2:]),
            "an image plus the largest of each row": lambda x: x + F.max_pool2d(x, (1, x.shape[3])),
            "padding by nothing is a copy": lambda x: F.relu_(F.pad(x * 1, (0, 0, 0, 0))) + x,
            "padding on one side only is a copy on every rank": lambda x: F.relu_(F.pad(x * 2, (0, 1, 0, 1))),
            "cropping by padding is a copy": lambda x: F.relu_(F.pad(x * 1, (-1, 0, -1, 0))),
            "interpolating to the same size is a copy": lambda x: F.relu_(F.interpolate(x, size=x.shape[2:])) + x,
        }
    ),
    **functions(
        {"one pixel against plain ones": lambda x: F.avg_pool2d(x, x.shape[2:]) * x.new_ones(3, 4, 5, 6)}, spread=False
    ),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_pitfalls(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
