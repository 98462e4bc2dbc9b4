"""Weighted sums of the rows and of the columns of this rank's part of an image, and their adjoint, which is such sums.

    rows        0     1     2     3           a sum has a row as its first tap, another one as its second, and so on:
                 \\   / \\   / \\   /            all first taps are picked and weighted at once, then all second ones
    sums          0     1     2               backward: the gradient of a row sums those of the sums that it is in

Nothing is saved for backward but which rows, with which weights.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

CACHED_BYTES = 1 << 20  # so large are images that stay in the cache of a core from one tap to the next


class Tap(NamedTuple):
    """One of the rows of each sum that has so many.

    `having`: which sums those are, None for all. `rows`: that row of each. `weight` (sums,), None for weights of 1.
    """

    having: Tensor | None
    rows: Tensor
    weight: Tensor | None


class Sums(NamedTuple):
    """So many sums, and the taps that they are made of."""

    length: int
    taps: Sequence[Tap]


class Weighing(NamedTuple):
    """The sums of rows, and those of gradients of sums that are the gradients of the rows."""

    forward: Sums
    backward: Sums


def sums_of(taps: Sequence[Sequence[tuple[int, float]]], weighted: bool, like: Tensor) -> Sums:
    """The sums whose taps are these rows with their weights, in the dtype and on the device of `like`."""
    found = []
    for number in range(max(map(len, taps), default=0)):
        having = [i for i, of_sum in enumerate(taps) if number < len(of_sum)]
        rows = torch.tensor([taps[i][number][0] for i in having], dtype=torch.int64, device=like.device)
        weight = torch.tensor([taps[i][number][1] for i in having], dtype=like.dtype, device=like.device)
        some = torch.tensor(having, device=like.device) if len(having) < len(taps) else None
        found.append(Tap(some, rows, weight if weighted else None))
    return Sums(len(taps), found)


def transposed(taps: Sequence[Sequence[tuple[int, float]]], num_rows: int) -> list[list[tuple[int, float]]]:
    """For each row the sums that it is in, with its weights."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(num_rows)]
    for number, of_sum in enumerate(taps):
        for row, weight in of_sum:
            found[row].append((number, weight))
    return found


def channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel of x (N, C, H, W) lie side by side, and not only since there is but a pixel."""
    return x.stride(1) == 1 and x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1


def weigh(x: Tensor, rows: Weighing | None, cols: Weighing | None) -> Tensor:
    """The sums of rows, and of columns, of x (N, C, H, W), in its memory format; None leaves them as they are."""
    y: Tensor = _Weigh.apply(x, rows, cols)
    return y


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Weighing | None, cols: Weighing | None) -> Tensor:
        ctx.last, ctx.weighings = channels_last(x), (rows, cols)
        return _sum(x, ctx.last, [None if each is None else each.forward for each in ctx.weighings])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradient, ctx.last, [None if each is None else each.backward for each in ctx.weighings]), None, None


def _sum(x: Tensor, last: bool, both: Sequence[Sums | None]) -> Tensor:
    """Sums of rows and of columns, not added up in 16 bits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if last:
        return _sum_both(x.permute(0, 2, 3, 1).to(wide), (1, 2), both).permute(0, 3, 1, 2).to(x.dtype)
    if not x.is_cpu or all(sums is None or len(sums.taps) < 2 for sums in both):
        return _sum_both(x.to(wide), (2, 3), both).to(x.dtype)
    sizes = [n if sums is None else sums.length for n, sums in zip(x.shape[-2:], both, strict=True)]
    images = x.reshape(prod(x.shape[:2]), 1, *x.shape[2:])
    result = x.new_empty(len(images), 1, *sizes)
    once = max(1, CACHED_BYTES // max(1, images[:1].nbytes, result[:1].nbytes))
    for some, into in zip(images.split(once), result.split(once), strict=True):
        into.copy_(_sum_both(some.to(wide), (2, 3), both))
    return result.view(*x.shape[:2], *sizes)


def _sum_both(x: Tensor, dims: tuple[int, int], both: Sequence[Sums | None]) -> Tensor:
    """Sums along two dims, first along that which gets smaller."""
    along = [(dim, sums) for dim, sums in zip(dims, both, strict=True) if sums is not None]
    for dim, sums in sorted(along, key=lambda each: each[1].length / max(1, x.shape[each[0]])):
        x = _sum_along(x, dim, sums)
    return x


def _sum_along(x: Tensor, dim: int, sums: Sums) -> Tensor:
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    # The dims in which PyTorch picks rows fastest, and without one of size 1, which would make it slow.
    inner = [prod(after)] if after else []
    flat = x.reshape(prod(before), x.shape[dim], *inner)
    y: Tensor | None = None
    for having, rows, weight in sums.taps:
        picked, weight = flat.index_select(1, rows), weight.unsqueeze(1) if inner and weight is not None else weight
        if having is not None:
            y = flat.new_zeros(prod(before), sums.length, *inner) if y is None else y
            y.index_add_(1, having, picked if weight is None else picked.mul_(weight))
        elif y is None:
            y = picked if weight is None else picked.mul_(weight)
        else:
            y = y.add_(picked) if weight is None else y.addcmul_(picked, weight)
    y = flat.new_zeros(prod(before), sums.length, *inner) if y is None else y
    return y.view(*before, sums.length, *after)
