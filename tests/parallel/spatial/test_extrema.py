"""Maxima, minima, their places and their gradients, on images of equals, infinities, what is no number, and 16 bits."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import Arrangement, Case, check_table, in_turns
from tests.pool.ranks import Ranks

SHAPE = (3, 4, 6, 7)


def some(x: Tensor, value: float) -> Tensor:
    """A third of the pixels, in all of a row and a column too, have this value."""
    y = x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.3, value)
    y[:, :, 1], y[:, 1, :, -1] = value, value
    return y


IMAGES = {
    "drawn": lambda x: x,
    "of few values": lambda x: x.round(),
    "constant": lambda x: torch.full_like(x, 0.3),
    "with infinities": lambda x: some(some(x, math.inf), -math.inf),
    "of minus infinity": lambda x: torch.full_like(x, -math.inf),
    "with what is no number": lambda x: some(x, math.nan),
    "with all of it": lambda x: some(x, math.nan) + some(x.flip(0), math.inf) + some(x.flip(2), -math.inf),
}
FUNCTIONS = {
    "amax of the image": lambda x: x.amax((2, 3)),
    "amax of rows, kept": lambda x: x.amax(2, keepdim=True),
    "amin of all": lambda x: x.amin(),
    "amin of columns and batch": lambda x: x.amin((0, 3)),
    "max of all": lambda x: x.max(),
    "min of all": lambda x: torch.min(x),
    "max along rows": lambda x: x.max(2),
    "min along columns, kept": lambda x: x.min(dim=3, keepdim=True),
    "max along channels": lambda x: x.max(1),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all, kept": lambda x: x.argmin(keepdim=True),
    "argmax along columns": lambda x: x.argmax(3),
    "argmin along rows, kept": lambda x: x.argmin(2, keepdim=True),
    "aminmax": lambda x: torch.aminmax(x),
    "aminmax along rows": lambda x: torch.aminmax(x, dim=2, keepdim=True),
    "topk along columns": lambda x: x.topk(3),
    "topk along channels": lambda x: x.topk(2, 1),
    "sort along rows": lambda x: torch.sort(x, dim=2, stable=True),
    "kthvalue along rows": lambda x: x.kthvalue(2, 2),
    "median along columns": lambda x: x.median(-1),
    "median": lambda x: x.median(),
    "nanmedian along rows": lambda x: x.nanmedian(2),
    "mode along columns": lambda x: x.mode(),
    "quantiles along rows": lambda x: x.quantile(torch.tensor([0.25, 0.8]), 2),
    "logsumexp of the image": lambda x: x.logsumexp((2, 3)),
    "softmax along columns": lambda x: x.softmax(3),
    "log_softmax along rows": lambda x: F.log_softmax(x, 2),
    "any along rows": lambda x: (x > 0).any(2),
    "all of it": lambda x: (x == x).all(),
    "nansum": lambda x: x.nansum((2, 3)),
    "nanmean": lambda x: x.nanmean(3),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool with indices": lambda x: F.max_pool2d(x, (2, 3), (2, 1), 1, return_indices=True),
    "dilated max pool with indices": lambda x: F.max_pool2d(x, 3, 2, 1, 2, return_indices=True),
    "max pool over the edge with indices": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "adaptive max pool with indices": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
}
CASES = {
    f"{name}, image {kind}": Case(lambda function=function: function, (SHAPE,), False, image)
    for name, function in FUNCTIONS.items()
    for kind, image in IMAGES.items()
}
ARRANGEMENTS = [Arrangement(2, 2), Arrangement(1, 2, batch=2), Arrangement(4, 1, style="uneven")]


@pytest.mark.parametrize(
    "arrangement",
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ARRANGEMENTS[:2]),
        *in_turns(ARRANGEMENTS[2], Arrangement(2, 2, style="wide")),
    ],
    ids=str,
)
def test_extrema_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)


def reduce_halves(comm: Communicator) -> list[bool]:
    """Values that PyTorch has in 16 bits, though what the parts come to would leave their range."""
    image = torch.full((1, 1, 256, 256), 6.0, dtype=torch.float16)
    apart = torch.cat([image * 20, image * -20], -1)
    grid = spatial.Grid(comm, rows=2, cols=2)
    x, y = spatial.shard(image, grid), spatial.shard(apart, grid)
    return [
        torch.equal(x.amax((2, 3)), image.amax((2, 3))),
        torch.equal(x.max(), image.max()),
        torch.equal(F.adaptive_max_pool2d(x, 1), F.adaptive_max_pool2d(image, 1)),
        torch.equal(y.sum(), apart.sum()),
        torch.equal(x.mean(), image.mean()),
    ]


def test_extrema_and_sums_of_16_bits_do_not_overflow(ranks: Ranks) -> None:
    assert ranks(4).run(reduce_halves) == [[True] * 5] * 4


def ask_for_what_is_not_there(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(2, 3, 4, 4), spatial.Grid(comm, rows=2))
    for call in (lambda: x.sum(4), lambda: x.amax(-5), lambda: x.max(4), lambda: x.softmax(4), lambda: x.sort(4)):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call()
    with pytest.raises(RuntimeError, match="more than once"):
        x.mean((2, -2))
    with pytest.raises((RuntimeError, IndexError), match="zero-size"):
        x[:, :0].amax(1)


def test_a_dim_that_there_is_not_is_an_error(ranks: Ranks) -> None:
    ranks(2).run(ask_for_what_is_not_there)
