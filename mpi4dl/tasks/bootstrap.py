"""Intervals of metrics by the bootstrap: the metric of samples drawn anew, with replacement, again and again."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_SAMPLES = 10  # of fewer there are too few resamples that differ
WHY_NONE = f"an interval takes {LEAST_SAMPLES} images or more, and resamples that differ"


class Bounds(NamedTuple):
    """The ends of an interval that holds a share `level` of the resampled metric, and how often it was defined.

    The ends are NaN where there is no interval: of too few samples, or of resamples that all give the same.
    """

    low: float
    high: float
    defined: int


def bootstrap(
    metric: Callable[[Tensor], float],
    num_samples: int,
    *,
    num_resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Bounds:
    """The percentile interval of `metric(numbers)`, a function of the numbers (int64, (num_samples,)) of samples.

    A sample is what was drawn independently, such as an image, not a pixel. Resamples of which the metric is not a
    number, as where a class is missing, are left out. Efron 1979, "Bootstrap methods: another look at the jackknife".
    """
    if num_samples < 1 or num_resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"`num_samples` {num_samples} and `num_resamples` {num_resamples} must be at least 1, and `level` {level} "
            "between 0 and 1"
        )
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(num_samples, (num_samples,), generator=generator) for _ in range(num_resamples))
    found = [value for value in map(metric, draws) if not math.isnan(value)]
    if not found:
        return Bounds(math.nan, math.nan, 0)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.tensor(found, dtype=torch.float64).quantile(ends).tolist()
    if num_samples < LEAST_SAMPLES or low == high:
        low = high = math.nan
    return Bounds(low, high, len(found))
