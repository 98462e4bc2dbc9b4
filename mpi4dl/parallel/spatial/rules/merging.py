"""A few numbers for each channel: each rank's sums of its pixels, and the moments of all ranks' pixels made of them.

An operator of PyTorch's takes a microsecond or two for them, whatever it does: so there are to be few operators, and on
CPUs it is numpy that calculates, which takes a quarter of that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

backward_of_batch_norm = torch.ops.aten.native_batch_norm_backward.default
OTHERS = {ndim: ([d for d in range(ndim) if d != 1],) for ndim in range(2, 7)}  # all dims but that of channels
PER_CHANNEL = {ndim: (-1, *(1,) * (ndim - 2)) for ndim in range(2, 7)}  # the shape of a number for each, beside x


def sums_around(own: Tensor, constants: "Constants") -> Tensor:
    """Of each channel (dim 1) a number near its mean, and the sums of the squared distances to it and of the distances.

    (3, C), in float32 or float64.
    """
    if own.is_meta or not own.numel():
        return own.new_zeros(3, own.shape[1], dtype=torch.float64 if own.dtype == torch.float64 else torch.float32)
    if not own.is_cpu:
        mean, variance = torch.batch_norm_update_stats(own, None, None, 0.0)
        return torch.stack((mean, variance * (own.numel() // own.shape[1]), torch.zeros_like(mean)))
    # Several times faster than `var_mean`, and no less exact: shift by the rounded mean, then take both sums in one
    # pass of the kernel that batch norm's backward takes its sums with.
    own = own.float() if own.itemsize < 4 else own
    near = own.mean(*OTHERS[own.dim()])
    centred = own - near.view(PER_CHANNEL[own.dim()])
    zeros, ones = constants.like(near)
    _, squares, rest = backward_of_batch_norm(
        centred, centred, ones, zeros, ones, None, None, False, 0.0, [False, True, True]
    )
    return torch.stack((near, squares, rest))


class Constants:
    """Noughts and ones for each channel, which nobody writes to."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = x.shape[0], x.dtype, x.device
        if key not in self._made:
            with torch.inference_mode(False):
                self._made[key] = torch.zeros_like(x), torch.ones_like(x)
        return self._made[key]


class Shares(NamedTuple):
    """How many numbers each rank has, at least one, and which share of all, (ranks, 1) and (ranks,); who has some."""

    counts: Any
    shares: Any
    first: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Shares":
        with torch.inference_mode(False):
            each = torch.tensor(counts, dtype=torch.float64, device=device)
            first = next((place for place, count in enumerate(counts) if count), 0)
            return cls(numbers(each.clamp(min=1)[:, None]), numbers(each / max(sum(counts), 1)), first)


def numbers(x: Tensor) -> Any:
    """A few numbers in float64, to calculate with: on CPUs an array of numpy, of the same memory if x is float64."""
    x = x.detach().double()
    return x.numpy() if x.is_cpu else x


def merged(of_ranks: Tensor, shares: Shares, count: int, eps: float, weight: Tensor | None) -> Tensor:
    """What a norm of `count` numbers a channel needs to know, from each rank's `sums_around`, (ranks, 3, C).

    In float64, (5, C): the mean, the biased and the unbiased variance, the slope, weight / sqrt(variance + eps), and
    what the slope is for the mean, -slope / count. By the formula of Chan, Golub and LeVeque (1979).
    """
    found = torch.empty(5, of_ranks.shape[2], dtype=torch.float64, device=of_ranks.device)
    with np.errstate(all="ignore"):  # infinities are for the model to find, as in PyTorch
        _merge(numbers(found), numbers(of_ranks), shares, max(count, 1), eps, weight)
    return found


def _merge(found: Any, values: Any, shares: Shares, count: int, eps: float, weight: Tensor | None) -> None:
    number, share, first = shares
    near, squares, rest = values[:, 0], values[:, 1], values[:, 2]
    beside = rest / number
    variances = squares / number - beside * beside
    beside = beside + near
    middle = beside[first]  # any number near the mean
    beside = beside - middle
    mean = share @ beside
    found[0] = middle + mean
    found[1] = share @ (variances + beside * beside) - mean * mean
    found[2] = found[1] * (count / max(count - 1, 1))
    slope = (found[1] + eps) ** -0.5
    found[3] = slope if weight is None else slope * numbers(weight)
    found[4] = found[3] / -count
