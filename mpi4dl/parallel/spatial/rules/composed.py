"""Functions that are made of others which have rules: PyTorch computes them in one, to the same numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.tensor import named, register


def movedim(input: Tensor, source: Any, destination: Any) -> Tensor:
    places = torch.empty(tuple(range(2, 2 + input.dim())), device="meta").movedim(source, destination).shape
    return input.permute([n - 2 for n in places])


def t(input: Tensor) -> Tensor:
    if input.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {input.dim()}D")
    return reversed_dims(input)


def reversed_dims(input: Tensor) -> Tensor:
    return input.permute(list(range(input.dim()))[::-1])


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    if k % 4 == 2:
        return input.flip(first, second)
    if k % 2 == 0:
        return input.clone()
    return input.flip(second if k % 4 == 1 else first).transpose(first, second)


def diff(
    input: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> Tensor:
    """Differences of neighbours along a dim, n times."""
    if n < 0:
        raise RuntimeError(f"torch.diff takes n of 0 or more, but got {n}")
    ends = [x for x in (prepend, input, append) if x is not None and (n or x is input)]
    y = torch.cat(ends, dim) if len(ends) > 1 else input.clone()
    for _ in range(min(n, y.shape[dim])):
        after, before = y.narrow(dim, 1, y.shape[dim] - 1), y.narrow(dim, 0, y.shape[dim] - 1)
        y = after ^ before if y.dtype == torch.bool else after - before
    return y


def beside(dim: int, ndim: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Tensors of at least so many dims, (n) as a row (1, n), and that as an image (1, n, 1), joined along `dim`."""

    def at_least(x: Tensor) -> Tensor:
        x = x.reshape(1) if x.dim() == 0 else x
        x = x.unsqueeze(0) if x.dim() < min(ndim, 2) else x
        return x.unsqueeze(-1) if x.dim() < ndim else x

    def join(tensors: Sequence[Tensor]) -> Tensor:
        shaped = [at_least(x) for x in tensors]
        return torch.cat(shaped, 0 if shaped[0].dim() == 1 else dim)

    return join


def nanmean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return input.nansum(dim, keepdim, dtype=dtype) / (~input.isnan()).sum(dim, keepdim)


def normalize(input: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, True).clamp_min(eps)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """A weight of the directions of v and the lengths g; dim -1: v has one length."""
    return v * (g / torch.linalg.vector_norm(v, dim=[n for n in range(v.dim()) if n != dim], keepdim=True))


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def batch_norm(input: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any) -> Tensor:
    """With its arguments in the order of torch.batch_norm."""
    return F.batch_norm(input, mean, variance, weight, bias, training, *rest[:2])


Rules = list[tuple[list[Any], Callable[..., Any]]]
# Those that know of dims that several axes became.
OF_FLAT: Rules = [
    ([Tensor.mT.__get__], lambda input: input.transpose(-2, -1)),  # type: ignore[attr-defined]
    ([Tensor.H.__get__, Tensor.mH.__get__, *named("adjoint")], lambda input: input.mT.conj()),  # type: ignore[attr-defined]
    ([Tensor.T.__get__], reversed_dims),  # type: ignore[attr-defined]
    (named("t"), t),
    ([torch.constant_pad_nd], lambda input, pad, value=0: F.pad(input, pad, value=value)),
    ([F.normalize], normalize),
    ([torch._weight_norm], weight_norm),
    (named("movedim", "moveaxis"), movedim),
    ([Tensor.view_as, Tensor.reshape_as], lambda input, other: input.reshape(other.shape)),
    ([Tensor.expand_as], lambda input, other: input.expand(*other.shape)),
    (named("unbind"), lambda input, dim=0: tuple(input.select(dim, i) for i in range(input.shape[dim]))),
    (named("broadcast_tensors"), broadcast_tensors),
    (named("_is_all_true"), lambda input: input.all()),
    (named("_is_any_true"), lambda input: input.any()),
    (named("count_nonzero"), lambda input, dim=None: (input != 0).sum(dim)),
    (named("nanmean"), nanmean),
    (named("pairwise_distance"), pairwise_distance),
    (named("dist"), lambda input, other, p=2: torch.linalg.vector_norm(input - other, p)),
    ([Tensor.__rmatmul__], lambda input, other: torch.matmul(other, input)),
]
# Those that get them gathered.
OTHERS: Rules = [
    (named("fliplr"), lambda input: input.flip(1)),
    (named("flipud"), lambda input: input.flip(0)),
    (named("rot90"), rot90),
    (named("diff"), diff),
    (named("hstack"), beside(1, 1)),
    (named("vstack", "row_stack"), beside(0, 2)),
    (named("dstack"), beside(2, 3)),
    (named("column_stack"), lambda tensors: torch.cat([x.reshape(-1, 1) if x.dim() < 2 else x for x in tensors], 1)),
    ([torch.batch_norm], batch_norm),
]
for functions, rule in OF_FLAT:
    register(*functions, flat=True)(rule)
for functions, rule in OTHERS:
    register(*functions)(rule)
