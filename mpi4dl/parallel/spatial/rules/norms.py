"""Vector norms over any dims, and what is made of them: normalized vectors, cosines, distances.

A norm over parts is the norm of the parts' norms, which are gathered: each step is PyTorch's own, derivatives included.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Split
from mpi4dl.parallel.spatial.halo import gather_axes
from mpi4dl.parallel.spatial.rules.reductions import normalize_dims, owned_along, reduced_axes, reduced_layout
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, place_of, refusal, register, wrap

Dims = int | Sequence[int] | None


def _of_all_parts(x: SpatialTensor, dims: Sequence[int], result: Tensor) -> Tensor:
    """What the parts came to, on all ranks: along each reduced axis one entry for every part that has any pixels.

    `result` is this rank's, with one entry along each of `dims`.
    """
    axes, layout = reduced_axes(x.layout, dims), x.layout
    tiling = layout.tiling
    for axis in axes:
        tiling = tiling.replace(axis, Split.at(range(tiling.splits[axis].parts + 1)))
    every: Tensor = gather_axes(SpatialTensor(result, replace(layout, tiling=tiling)), axes)
    for axis in axes:
        split, dim = layout.tiling.splits[axis], layout.dims[axis]
        used = [part for part in range(split.parts) if not split.owned(part).empty]
        if len(used) < split.parts:
            assert dim is not None
            every = every.index_select(dim, torch.tensor(used, dtype=torch.int64, device=every.device))
    return every


def _own_part(x: SpatialTensor, dims: Sequence[int]) -> Tensor:
    """This rank's part along these dims; one pixel that counts nowhere, but hangs on the graph, if it has none."""
    part = owned_along(x, reduced_axes(x.layout, dims))
    if all(part.shape[dim] for dim in dims):
        return part
    if part.is_floating_point():
        return part.sum(tuple(dims), keepdim=True)
    return part.new_zeros([1 if dim in dims else n for dim, n in enumerate(part.shape)])


def norm_over(x: Tensor, order: float, dim: Dims, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """(sum of |x|^p)^(1/p) over these dims, with PyTorch's derivatives where x is zero and where maxima are equal."""
    dims = normalize_dims(x, dim)
    if not isinstance(x, SpatialTensor):
        return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype)
    if not any(x.layout.cut(d) for d in dims):
        y = torch.linalg.vector_norm(x.local, order, dims, keepdim, dtype=dtype)
        return wrap(y, reduced_layout(x.layout, dims, keepdim))
    if x.layout.flat:
        return norm_over(gather_axes(x, ()), order, dim, keepdim, dtype)
    if order in (torch.inf, -torch.inf):
        values = x.abs() if dtype is None else x.abs().to(dtype)
        return values.amax(dims, keepdim) if order > 0 else values.amin(dims, keepdim)
    x = in_plain_dtype(x, torch.linalg.vector_norm)
    result = dtype or x.dtype
    wider = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    own = torch.linalg.vector_norm(_own_part(x, dims), order, dims, True, dtype=wider)
    every = _of_all_parts(x, dims, own)
    return norm_over(every, order or 1, dims, keepdim).to(result)  # of order 0 are counts, which add up


@register(torch.linalg.vector_norm)
def vector_norm(x: Tensor, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return norm_over(x, ord, dim, keepdim, dtype)


@register(torch.norm, Tensor.norm)
def norm(
    input: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Tensor:
    if p == "nuc" or out is not None:
        raise refusal("torch.norm", f"{p=}" if p == "nuc" else "it was given out=")
    return norm_over(input, 2 if p in ("fro", None) else float(p), dim, keepdim, dtype)


@register(torch.linalg.norm)
def linalg_norm(A: Tensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = normalize_dims(A, dim)
    matrix = ord is not None and len(dims) == 2 and not isinstance(dim, int)
    if isinstance(ord, str) and ord != "fro":
        raise refusal("torch.linalg.norm", f"ord={ord!r}")
    if matrix and ord != "fro":
        raise refusal("torch.linalg.norm", "it is the norm of a matrix")
    return norm_over(A, 2 if ord in (None, "fro") else ord, dims, keepdim, dtype)


@register(F.normalize, flat=True)
def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    if out is not None:
        raise refusal("torch.nn.functional.normalize", "it was given out=")
    return input / norm_over(input, p, dim, True).clamp_min(eps)


@register(*named("cosine_similarity"))
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The lengths count as at least eps, which their derivatives do not see."""

    ndim = max(x1.dim(), x2.dim())
    dim = place_of(dim, ndim)
    x1, x2 = (x.reshape([1] * (ndim - x.dim()) + list(x.shape)) if x.dim() < ndim else x for x in (x1, x2))
    count = max(x1.shape[dim], x2.shape[dim])

    def direction(x: Tensor) -> Tensor:
        length = norm_over(x, 2, dim, True)
        if x.shape[dim] != count:  # it broadcasts before its length is taken
            length = length * count**0.5
        return x / (length + (length.detach().clamp_min(eps) - length.detach()))

    return (direction(x1) * direction(x2)).sum(dim)


@register(*named("pairwise_distance"))
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return norm_over(x1 - x2 + eps, p, -1, keepdim)


@register(*named("dist"))
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return norm_over(input - other, p, None)
