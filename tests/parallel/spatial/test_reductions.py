"""Sums, means, extrema, variances and softmax of tiles are those of the whole image."""

import pytest
import torch
from torch.nn import functional as F

from tests.parallel.spatial.comparing import ARRANGEMENTS, Arrangement, check_table, chosen, functions
from tests.pool.ranks import Ranks

CASES = {
    **functions(
        {
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
    ),
    **functions(
        {
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
            "sum of integers": lambda x: (3 * x).to(torch.int32).sum(),
            "sum of booleans": lambda x: (x > 0).sum((0, 2, 3)),
            "var": lambda x: x.var(),
            "var of the image": lambda x: x.var((0, 2, 3)),
            "var with a correction": lambda x: torch.var(x, dim=(0, 2, 3), correction=0),
            "std of the image, biased": lambda x: x.std((0, 2, 3), unbiased=False),
            "var_mean": lambda x: torch.var_mean(x, (0, 2, 3)),
            "std_mean, biased": lambda x: torch.std_mean(x, (0, 2, 3), unbiased=False, keepdim=True),
            "mean of squares, as numbers": lambda x: float((x * x).mean().detach().round(decimals=6)),
        },
        spread=False,
    ),
}


@pytest.mark.parametrize("arrangement", chosen(ARRANGEMENTS), ids=str)
def test_reductions_equal_those_of_the_whole_image(ranks: Ranks, arrangement: Arrangement) -> None:
    check_table(ranks, __name__, arrangement)
