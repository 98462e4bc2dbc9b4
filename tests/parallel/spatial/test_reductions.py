"""Sums, means, extrema with their places, norms, and cumulative sums, of tiles are those of the whole image."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    SOME_ARRANGEMENTS,
    Arrangement,
    Case,
    chosen,
    functions,
    in_turns,
    table_test,
)
from tests.pool.ranks import on_ranks

SPREAD = {
    "sum of channels": lambda x: x.sum(1),
    "sum of channels, kept": lambda x: x.sum(1, keepdim=True),
    "sum of rows": lambda x: x.sum(2),
    "mean of columns, kept": lambda x: x.mean(-1, keepdim=True),
    "mean of channels": lambda x: torch.mean(x, 1),
    "amax of channels": lambda x: x.amax(1),
    "amax of rows": lambda x: x.amax(2),
    "amin of columns, kept": lambda x: x.amin(3, keepdim=True),
    "max of channels": lambda x: x.max(1),
    "min of channels, kept": lambda x: torch.min(x, dim=1, keepdim=True),
    "max of two": lambda x: torch.max(x, 1 - x),
    "var of channels": lambda x: x.var(1),
    "std of rows": lambda x: x.std(2),
    "var of columns, biased, kept": lambda x: x.var(3, unbiased=False, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "softmin": lambda x: F.softmin(x, dim=-3),
    "logsumexp": lambda x: x.logsumexp(1),
    "argmax of channels": lambda x: x.argmax(1),
    "argmin of channels, kept": lambda x: x.argmin(dim=1, keepdim=True),
    "cumsum of channels": lambda x: x.cumsum(1),
    "cumprod of channels": lambda x: torch.cumprod(x, dim=1),
    "norm of channels": lambda x: x.norm(dim=1),
    "norm of channels, p=1, kept": lambda x: x.norm(1, 1, keepdim=True),
    "vector_norm of channels": lambda x: torch.linalg.vector_norm(x, dim=1),
    "normalize": lambda x: F.normalize(x),
    "normalize p=1": lambda x: F.normalize(x, p=1, dim=1),
    "glu": lambda x: F.glu(x, 1),
    "topk": lambda x: x.topk(2, dim=1),
    "sort": lambda x: x.sort(1),
    "argsort": lambda x: x.argsort(dim=1, descending=True),
    "median of channels": lambda x: x.median(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "prod of channels": lambda x: x.prod(1),
    "any of channels": lambda x: (x > 0).any(1),
    "all of channels, kept": lambda x: (x > 0).all(1, keepdim=True),
    "sum_to_size of channels": lambda x: x.sum_to_size(x.shape[0], 1, *x.shape[2:]),
    "sum_to_size of lines": lambda x: x.sum_to_size((1, x.shape[3])),
    "sum_to_size of itself": lambda x: x.sum_to_size(x.shape),
    "squeeze and excite": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "spatial attention": lambda x: x * (x.sum((1,), keepdim=True) + x.amax(1, keepdim=True)).sigmoid(),
    "standardize": lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True),
    "rows minus their mean": lambda x: x - x.mean(3, keepdim=True),
}
WHOLE = {
    "sum": lambda x: x.sum(),
    "sum of all dims": lambda x: x.sum((0, 1, 2, 3), keepdim=True),
    "sum_to_size": lambda x: x.sum_to_size(4, 1, 1),
    "mean": lambda x: x.mean(),
    "global average": lambda x: x.mean((2, 3)).sum(0),
    "global average by name": lambda x: torch.mean(x, dim=(-2, -1), keepdim=True).sum(0),
    "global average, one dim after the other": lambda x: x.mean(3).mean(2).sum(0),
    "global maximum": lambda x: x.amax((2, 3)).sum(0),
    "maximum": lambda x: x.max(),
    "minimum": lambda x: torch.min(x),
    "amax": lambda x: x.amax(),
    "amin of all but channels": lambda x: x.amin((0, 2, 3)),
    "amax of equals": lambda x: x.clamp(-0.2, 0.2).amax((0, 2, 3)),
    "amin of equals": lambda x: x.clamp(-0.2, 0.2).amin(),
    "maximum of equals": lambda x: x.round().max(),
    "maximum of integers": lambda x: (3 * x).to(torch.int32).max(),
    "places of numbers of 32 bits": lambda x: (x.float().max(2), x.float().argmin(), x.round().int().max(3)),
    "sum of integers": lambda x: (3 * x).to(torch.int32).sum(),
    "sum of booleans": lambda x: (x > 0).sum((0, 2, 3)),
    "logsumexp of booleans": lambda x: (x > 0).logsumexp(3),
    "logsumexp of integers": lambda x: (3 * x).to(torch.int32).logsumexp((2, 3)),
    "var": lambda x: x.var(),
    "var of the image": lambda x: x.var((0, 2, 3)),
    "var with a correction": lambda x: torch.var(x, dim=(0, 2, 3), correction=0),
    "std of the image, biased": lambda x: x.std((0, 2, 3), unbiased=False),
    "var_mean": lambda x: torch.var_mean(x, (0, 2, 3)),
    "std_mean, biased": lambda x: torch.std_mean(x, (0, 2, 3), unbiased=False, keepdim=True),
    "mean of squares, as numbers": lambda x: float((x * x).mean().detach().round(decimals=6)),
}
CASES = functions(SPREAD) | functions(WHOLE, spread=False)

test_reductions_equal_those_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


SPREAD_NORMS = {
    "norm of rows": lambda x: x.norm(dim=2),
    "norm, p=1, kept": lambda x: x.norm(1, 3, keepdim=True),
    "norm, p=3": lambda x: torch.norm(x, p=3, dim=2),
    "norm, p=0.5": lambda x: torch.linalg.vector_norm(x, 0.5, 3),
    "norm, p=0": lambda x: torch.linalg.vector_norm(x.round(), 0, 3) + x.sum(3),
    "norm, p=inf, of equals": lambda x: x.clamp(-0.2, 0.2).norm(torch.inf, 2),
    "norm of the image, kept": lambda x: x * x.norm(dim=(2, 3), keepdim=True),
    "norm of zeros": lambda x: x + x.clamp(0, 0).norm(dim=(2, 3), keepdim=True),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=(2, 3), keepdim=True) * x,
    "response norm": lambda x: x / (x.norm(p=2, dim=(2, 3), keepdim=True).mean(1, keepdim=True) + 1e-6),
    "normalize rows": lambda x: F.normalize(x, dim=2),
    "normalize images": lambda x: F.normalize(x, dim=(2, 3)),
    "normalize, p=1": lambda x: F.normalize(x, 1, 3),
    "cosine_similarity of channels": lambda x: F.cosine_similarity(x, x.roll(1, 1)),
    "cosine_similarity of columns": lambda x: F.cosine_similarity(x, x.detach().flip(1), dim=3),
    "cosine_similarity that broadcasts": lambda x: F.cosine_similarity(x, x.mean(2, keepdim=True), dim=2),
    "cosine_similarity with zeros": lambda x: F.cosine_similarity(x, x.clamp(0, 0), dim=2),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(1)),
}
WHOLE_NORMS = {
    "norm": lambda x: x.norm(),
    "norm of all": lambda x: torch.linalg.vector_norm(x),
    "linalg.norm of all": lambda x: torch.linalg.norm(x),
    "norm of an image": lambda x: x[0].norm(p=1, dim=(-2, -1)),
    "dist": lambda x: torch.dist(x, x.detach().flip(1), 3),
}
NORMS = functions(SPREAD_NORMS) | functions(WHOLE_NORMS, spread=False)

test_norms_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS, "NORMS")


SPREAD_PREFIXES = {
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
PREFIXES = functions(SPREAD_PREFIXES)

test_prefixes_equal_those_of_the_whole_image = table_test(__name__, SOME_ARRANGEMENTS, "PREFIXES")


OF_SHAPE = (3, 4, 6, 7)


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
OF_EXTREMA = {
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
if torch.__version__ < "2.13":  # it has no derivative there
    OF_EXTREMA = {name: each for name, each in OF_EXTREMA.items() if not name.startswith("aminmax")}
EXTREMA = {
    f"{name}, image {kind}": Case(lambda function=function: function, (OF_SHAPE,), False, image)
    for name, function in OF_EXTREMA.items()
    for kind, image in IMAGES.items()
}
ARRANGEMENTS = [Arrangement(2, 2), Arrangement(1, 2, batch=2), Arrangement(4, 1, style="uneven")]


test_extrema_equal_those_of_the_whole_image = table_test(
    __name__,
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ARRANGEMENTS[:2]),
        *in_turns(ARRANGEMENTS[2], Arrangement(2, 2, style="wide")),
    ],
    "EXTREMA",
)


@on_ranks(4)
def test_extrema_and_sums_of_16_bits_do_not_overflow(comm: Communicator) -> None:
    """Values that PyTorch has in 16 bits, though what the parts come to would leave their range."""
    image = torch.full((1, 1, 256, 256), 6.0, dtype=torch.float16)
    apart = torch.cat([image * 20, image * -20], -1)
    grid = spatial.Grid(comm, rows=2, cols=2)
    x, y = spatial.shard(image, grid), spatial.shard(apart, grid)
    assert [
        torch.equal(x.amax((2, 3)), image.amax((2, 3))),
        torch.equal(x.max(), image.max()),
        torch.equal(F.adaptive_max_pool2d(x, 1), F.adaptive_max_pool2d(image, 1)),
        torch.equal(y.sum(), apart.sum()),
        torch.equal(x.mean(), image.mean()),
    ] == [True] * 5


@on_ranks(2)
def test_a_dim_that_there_is_not_is_an_error(comm: Communicator) -> None:
    x = spatial.shard(torch.randn(2, 3, 4, 4), spatial.Grid(comm, rows=2))
    for call in (lambda: x.sum(4), lambda: x.amax(-5), lambda: x.max(4), lambda: x.softmax(4), lambda: x.sort(4)):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call()
    with pytest.raises(RuntimeError, match="more than once"):
        x.mean((2, -2))
    for empty in (
        lambda y: y.amax(1),
        lambda y: y.max(1),
        lambda y: y.amax(),
        lambda y: y.max(),
        lambda y: y.argmax(1),
    ):
        messages = []
        for each in (torch.empty(2, 0, 4, 4), x[:, :0]):
            with pytest.raises((RuntimeError, IndexError)) as caught:
                empty(each)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
