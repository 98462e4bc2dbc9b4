"""What kernels of CUDA do with their arguments, where that of the CPU does something else, or does not exist.

From PyTorch's sources, aten/src/ATen/native/cuda/Normalization.cu and .cuh. Wrong types raise here as they do there;
what is wrong in silence there is wrong here as well.
"""

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mpi4dl.parallel.spatial.tensor import SpatialTensor

INT32 = 2**31


def accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _needs(name: str, x: Tensor | None, dtype: torch.dtype) -> None:
    if x is not None and x.dtype != dtype:
        raise RuntimeError(f"Expected {name} to have type {dtype} but got {x.dtype}")


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(C, pixels)."""
    return x.transpose(0, 1).reshape(x.shape[1], -1).to(dtype)


def _channels(row: Tensor, x: Tensor) -> Tensor:
    return row.view(1, -1, *(1,) * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_rows(x, accumulated(x.dtype)), 1, correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if running_mean is None else running_mean.dtype
    for name, values in (("mean", mean), ("invstd", invstd)):
        _needs(name, values, accumulated(dtype))
    _needs("counts", counts, dtype)
    average, squares, count = torch.zeros_like(mean[0]), torch.zeros_like(mean[0]), 0
    for of_rank, deviation, number in zip(mean, invstd, counts.tolist(), strict=True):
        factor = 1 / (count + number) if count + number else math.inf  # infinite for a first rank without pixels
        squares = squares + (1 / deviation**2 - eps) * number + (average - of_rank) ** 2 * (count * number * factor)
        average = count * factor * average + number * factor * of_rank
        count = (int(count + number) + INT32) % (2 * INT32) - INT32
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(average, alpha=momentum)
        running_var.mul_(1 - momentum).add_(squares / (count - 1), alpha=momentum)
    return average, (squares / count + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _needs("mean", mean, accumulated(x.dtype))
    kinds = {t.dtype for t in (weight, bias) if t is not None}
    if len(kinds) > 1 or kinds - {x.dtype, accumulated(x.dtype)}:
        raise RuntimeError(f"Expected weight and bias to have one type, that of {x.dtype} or its sums, but got {kinds}")
    y = (x.to(mean.dtype) - _channels(mean, x)) * _channels(invstd, x)
    y = y if weight is None else y * _channels(weight, x)
    return (y if bias is None else y + _channels(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    _needs("input", x, gradient.dtype)
    _needs("mean", mean, accumulated(x.dtype))
    g, rows = _rows(gradient, mean.dtype), _rows(x, mean.dtype) - mean[:, None]
    plain, scaled = g.sum(1), (g * rows).sum(1)
    kind = mean.dtype if weight is None else weight.dtype
    of_weight = (scaled * invstd).to(kind) if weight_g else None
    of_bias = plain.to(kind, copy=True) if bias_g else None
    return plain if input_g else None, scaled if input_g else None, of_weight, of_bias


def batch_norm_backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _needs("input", x, gradient.dtype)
    _needs("count", count, torch.int32)
    _needs("weight", weight, mean.dtype)
    for name, values in (("mean", mean), ("invstd", invstd), ("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu)):
        _needs(name, values, accumulated(x.dtype))
    per_pixel = 1 / count.sum().to(mean.dtype)
    centred = x.to(mean.dtype) - _channels(mean, x)
    inner = gradient - _channels(sum_dy * per_pixel, x) - centred * _channels(invstd**2 * sum_dy_xmu * per_pixel, x)
    return (inner * _channels(invstd if weight is None else invstd * weight, x)).to(x.dtype)


def native_batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """Without the input's gradient: by saved statistics, if there are any, in evaluation mode too. CPUs ignore them."""
    if save_mean is None or save_invstd is None:
        raise RuntimeError("INTERNAL ASSERT FAILED: save_mean and save_invstd should always be defined")
    if mask[0]:
        return NotImplemented
    mean = save_mean if save_mean.numel() else running_mean
    assert mean is not None
    if save_invstd.numel():
        invstd = save_invstd
    else:
        assert running_var is not None
        invstd = (running_var + eps).rsqrt()
    _, _, of_weight, of_bias = batch_norm_backward_reduce(gradient, x, mean, invstd, weight, False, *mask[1:])
    return None, of_weight, of_bias


def _places(size: int, output: int, factor: float | None, exact: bool) -> list[int]:
    """Of which row each output row is: UpSample.cuh, nearest_neighbor_compute_source_index."""
    scale = np.float32(1 / factor) if factor else np.float32(size) / np.float32(output)
    rows = [int(np.floor(np.float32(i + 0.5 * exact) * scale)) for i in range(output)]
    return [*range(size)] if size == output else [min(row, size - 1) for row in rows]


def _starts(size: int, output: int, factor: float | None, exact: bool) -> list[int]:
    """From which output row on each row takes gradients: nearest_neighbor_bw_compute_source_index."""
    scale = np.float32(factor) if factor else np.float32(output) / np.float32(size)
    places = [np.float32(i) * scale - np.float32(0.5 * exact) for i in range(size + 1)]
    return [min(int(np.ceil(place)), output) for place in places]


def nearest(exact: bool) -> Callable[..., Tensor]:
    def forward(x: Tensor, output_size: list[int], *factors: float | None) -> Tensor:
        given = factors or (None,) * len(output_size)
        for dim, output, factor in zip(range(2, x.dim()), output_size, given, strict=True):
            if output != x.shape[dim]:
                x = x.index_select(dim, torch.tensor(_places(x.shape[dim], output, factor, exact)))
        return x.clone()

    return forward


def nearest_backward(exact: bool) -> Callable[..., Tensor]:
    def backward(gradient: Tensor, output_size: list[int], input_size: list[int], *factors: float | None) -> Tensor:
        if list(gradient.shape) == list(input_size):
            return gradient.clone()
        given = factors or (None,) * len(output_size)
        for dim, output, factor in zip(range(2, gradient.dim()), output_size, given, strict=True):
            starts = _starts(input_size[dim], output, factor, exact)
            rows = [gradient.narrow(dim, a, max(0, b - a)).sum(dim) for a, b in itertools.pairwise(starts)]
            gradient = torch.stack(rows, dim)
        return gradient

    return backward


def by_chance(function: Any, count: int) -> Callable[..., Any]:
    """A function of `count` arguments, the last two dim and keepdim, which names any of equal values, on each rank
    another one.
    """
    generator = torch.Generator().manual_seed(os.getpid())

    def found(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(args) != count or kwargs:
            return NotImplemented
        values, _ = function(x, *args)
        dim, keepdim = args[-2:]
        equal = x == (values if keepdim else values.unsqueeze(dim))
        return values, torch.rand(x.shape, generator=generator).mul_(equal).argmax(dim, keepdim)

    return found


OF_CHANCE = {
    "aten.kthvalue": by_chance(torch.ops.aten.kthvalue.default, 3),
    "aten.median": by_chance(torch.ops.aten.median.dim, 2),
}
OF_NEAREST = {
    f"aten.{name}{n}d{suffix}": make(exact)
    for n in (1, 2, 3)
    for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True))
    for suffix, make in (("", nearest), ("_backward", nearest_backward))
}
KERNELS: dict[str, Callable[..., Any]] = (
    OF_NEAREST
    | OF_CHANCE
    | {
        f"aten.{kernel.__name__}": kernel
        for kernel in (
            batch_norm_stats,
            batch_norm_gather_stats_with_counts,
            batch_norm_elemt,
            batch_norm_backward_reduce,
            batch_norm_backward_elemt,
            native_batch_norm_backward,
        )
    }
)


SUMS = {getattr(of, name) for of in (torch, Tensor) for name in ("sum", "prod", "cumsum", "cumprod")}


class Autocast(TorchFunctionMode):
    """What CUDA's autocast does to sums of 16 bits, and that of CPUs does not: they are taken and given in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in SUMS:
            return function(*args, **kwargs)
        if isinstance(args[0], SpatialTensor):
            with self:  # for what its rule calls
                return SpatialTensor.__torch_function__(function, types, args, kwargs)
        if args[0].dtype in (torch.float16, torch.bfloat16) and kwargs.get("dtype") is None:
            kwargs = kwargs | {"dtype": torch.float32}
        return function(*args, **kwargs)
