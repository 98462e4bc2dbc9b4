"""What once went wrong silently: one pixel against many, and results that share memory with their input."""

import pytest
import torch
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, chosen, functions
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
        {
            "one pixel, flattened": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(2),
            "one pixel, flattened from the channels": lambda x: F.avg_pool2d(x, x.shape[2:]).flatten(1),
            "one pixel, flattened, a new dim": lambda x: F.max_pool2d(x, x.shape[2:]).flatten(2).unsqueeze(2),
            "one pixel, its view": lambda x: F.avg_pool2d(x, x.shape[2:]).view(x.shape[0], x.shape[1], -1),
            "one pixel, dims of one more": lambda x: F.avg_pool2d(x, x.shape[2:]).reshape(1, -1, 1, 1, 1, 1),
            "one pixel, squeezed": lambda x: F.avg_pool2d(x, x.shape[2:]).squeeze(),
            "one row, squeezed": lambda x: F.avg_pool2d(x, (x.shape[2], 1)).squeeze(2),
            "one column, flattened": lambda x: F.avg_pool2d(x, (1, x.shape[3])).flatten(2),
            "one row, flattened with the channels": lambda x: x[:, :, 2:3].flatten(1, 2),
            "one window": lambda x: F.unfold(x, x.shape[2:]),
            "squeeze and excite by a window": lambda x: (
                x * F.avg_pool2d(x, x.shape[2:]).flatten(1).softmax(1).view(*x.shape[:2], 1, 1)
            ),
            "no channels": lambda x: x[:, :0].reshape(x.shape[0], 0, x.shape[2] * x.shape[3]),
        },
        spread=False,
    ),
    **functions(
        {"one pixel against plain ones": lambda x: F.avg_pool2d(x, x.shape[2:]) * x.new_ones(3, 4, 5, 6)}, spread=False
    ),
}


def pool_large_halves(comm: Communicator) -> bool:
    """Whether means over windows of 1024 pixels of 100 are 100, whose sum float16 cannot hold."""
    x = torch.full((1, 1, 64, 64), 100.0, dtype=torch.float16)
    y = spatial.gather(F.avg_pool2d(spatial.shard(x, spatial.Grid(comm, rows=2)), 32))
    return torch.equal(y, F.avg_pool2d(x, 32))


def test_average_pooling_does_not_overflow(ranks: Ranks) -> None:
    assert ranks(2).run(pool_large_halves) == [True, True]


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
def test_pitfalls(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
