"""What kernels of CUDA do with their arguments, where that of the CPU does something else, or does not exist.

From PyTorch's sources, aten/src/ATen/native/cuda/Normalization.cu and .cuh, and native/transformers/cuda/attention.cu,
attention_backward.cu and sdp_utils.cpp. Wrong types raise here as they do there; what is wrong in silence there is
wrong here as well.
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


HALVES = torch.float16, torch.bfloat16


def can_use_flash_attention(given: Any, debug: bool = False) -> bool:
    q, k, v = given.query, given.key, given.value
    return q.dtype in HALVES and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and given.attn_mask is None


def can_use_efficient_attention(given: Any, debug: bool = False) -> bool:
    """The features of a head come in whole vectors of 16 bytes."""
    q, v = given.query, given.value
    return q.dtype in (*HALVES, torch.float32) and q.shape[-1] * q.itemsize % 16 == v.shape[-1] * q.itemsize % 16 == 0


def _checked(flash: bool, *tensors: Tensor) -> None:
    """What both kernels ask of queries, keys, values, outputs and their gradients: (batch, heads, tokens, features)."""
    name, dtypes = ("FlashAttention", HALVES) if flash else ("efficient attention", (*HALVES, torch.float32))
    kind = tensors[0].dtype
    if kind not in dtypes or any(x.dtype != kind for x in tensors):
        raise RuntimeError(f"{name} takes tensors of one type of {dtypes}, not {[x.dtype for x in tensors]}")
    if any(x.dim() != 4 or x.stride(-1) != 1 for x in tensors):
        raise RuntimeError(f"{name} takes 4 dims, the last one contiguous")
    if flash and (tensors[0].shape[-1] % 8 or tensors[0].shape[-1] > 256):
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!")
    if tensors[0].shape[1] > 65_535:
        raise RuntimeError("CUDA error: invalid configuration argument")


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
    return scores.masked_fill(later, -math.inf) if causal else scores


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _attend_back(
    tensors: tuple[Tensor, ...], sums: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, k, v, y = (x.float() for x in tensors)
    if sums.dtype != torch.float32 or not sums.is_contiguous():
        raise RuntimeError("the logsumexp is float32 and contiguous")
    weights = (_scores(q, k, causal, scale) - sums[..., : q.shape[-2], None]).exp()
    of_scores = weights * (gradient @ v.mT - (gradient * y).sum(-1, keepdim=True))
    of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    kind = tensors[0].dtype
    return (of_scores @ k).to(kind), (of_scores.mT @ q).to(kind), (weights.mT @ gradient).to(kind)


def _scaled_dot_product_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _checked(True, q, k, v)
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return *_attend(q, k, v, causal, scale), None, None, q.shape[2], k.shape[2], state, unused, q.new_empty(0)


def _scaled_dot_product_flash_attention_backward(*args: Any, scale: float | None = None) -> Any:
    *tensors, sums, no_queries, no_keys, num_queries, num_keys, p, causal, state, _unused = args
    _checked(True, *tensors)
    assert no_queries is None
    assert no_keys is None
    assert p == 0
    assert state.shape == (2,)
    assert state.dtype == torch.uint64
    assert (num_queries, num_keys) == (tensors[1].shape[2], tensors[2].shape[2])
    assert sums.shape[2] == num_queries
    return _attend_back(tuple(tensors), sums, causal, scale)


def _scaled_dot_product_efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    sums: bool,
    p: float = 0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """The logsumexp is of whole 32 queries, infinite for those that there are not."""
    _checked(False, q, k, v)
    y, found = _attend(q, k, v, causal, scale)
    state = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return (
        y,
        torch.nn.functional.pad(found if sums else found[..., :0], (0, -found.shape[-1] % 32), value=math.inf),
        *state,
    )


def _scaled_dot_product_efficient_attention_backward(*args: Any, scale: float | None = None) -> Any:
    gradient, q, k, v, bias, y, sums, seed, offset, p, mask, causal = (*args, *[False] * (12 - len(args)))
    _checked(False, gradient, q, k, v, y)
    if sums.shape[-1] % 32 or not 0 <= sums.shape[-1] - q.shape[2] < 32:
        raise RuntimeError("the logsumexp is not of whole 32 queries")
    assert bias is None
    assert p == 0
    assert seed.dtype == offset.dtype == torch.int64
    assert list(mask) == [True] * 3 + [False]
    return *_attend_back((gradient, q, k, v, y), sums, causal, scale), None


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
            _scaled_dot_product_flash_attention,
            _scaled_dot_product_flash_attention_backward,
            _scaled_dot_product_efficient_attention,
            _scaled_dot_product_efficient_attention_backward,
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
