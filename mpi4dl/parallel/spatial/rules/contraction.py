"""Matrix products, einsum and linear layers: each rank multiplies what it has; over axes that are summed, all add up.

Dims of the operands that go together have one label, as in einsum. An axis of the image stands under one label alone:

    einsum("nchw,kc->nkhw")   c is not cut: local           einsum("nchw,nkhw->nck")   h, w are summed: all-reduced
"""

from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.alignment import Labels, contract
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, named, refusal, register

MM_IF_MANY = "use_mm_for_euclid_dist_if_necessary"


@cache
def _matrices(left: int, right: int) -> tuple[tuple[Labels, Labels], Labels]:
    """The labels of a matrix product as torch.matmul has it: vectors, matrices, and batches of them that broadcast."""
    batch = max(left, right, 2) - 2
    names = [f"batch {i}" for i in range(batch)]
    of_left = ["k"] if left == 1 else [*names[batch - left + 2 :], "m", "k"]
    of_right = ["k"] if right == 1 else [*names[batch - right + 2 :], "k", "n"]
    outer = ["m"] * (left > 1) + ["n"] * (right > 1)
    return (tuple(of_left), tuple(of_right)), (*names, *outer)


def _product(function: Any) -> Callable[..., Tensor]:
    name = function_name(function)

    def rule(input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        (other,) = others or options.values()
        labels, result = _matrices(input.dim(), other.dim())
        _check(name, (input.shape, other.shape), labels)
        return contract(name, function, (input, other), labels, result)

    return rule


@lru_cache(maxsize=1024)
def _check(name: str, shapes: tuple[torch.Size, ...], labels: tuple[Labels, ...]) -> None:
    """Parts might pass where PyTorch refuses the whole."""
    sizes: dict[Hashable, int] = {}
    for shape, names in zip(shapes, labels, strict=True):
        for size, label in zip(shape, names, strict=True):
            broadcasts = 1 in (size, sizes.setdefault(label, size)) and label not in ("k", "in")
            if sizes[label] != size and not broadcasts:
                raise RuntimeError(f"{name}: shapes {[*map(tuple, shapes)]} cannot be multiplied")
            sizes[label] = max(sizes[label], size)


for function in [*named("matmul", "bmm", "mm", "mv"), Tensor.__matmul__]:
    register(function, flat=True)(_product(function))


def _added(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """beta * input + alpha * product; what is multiplied by a beta of 0 may be anything."""

    def rule(input: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **more: Tensor) -> Tensor:
        first, second = [*factors, *more.values()]
        if not (first.is_floating_point() or first.is_complex()):
            beta, alpha = int(beta), int(alpha)  # as PyTorch takes them
        y = product(first, second)
        y = y if alpha == 1 else y * alpha
        return y if beta == 0 else y + (input if beta == 1 else input * beta)

    return rule


for names, product in (("addmm", torch.mm), ("baddbmm", torch.bmm), ("addmv", torch.mv)):
    for function in named(names):
        register(function, flat=True)(_added(product))


@cache
def _of_linear(pixels: int, matrix: bool) -> tuple[tuple[Labels, Labels, Labels], Labels]:
    """The labels of input, weight and bias, and of the result."""
    names, out = tuple(f"dim {i}" for i in range(pixels)), ("out",) * matrix
    return ((*names, "in"), (*out, "in"), out), (*names, *out)


@register(F.linear, flat=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with the last dim, the same for every pixel; over a last dim that is cut, the ranks' parts add up.

    It may be cut in the input, or in the weight: then each rank takes its part of what it has whole. A cut of the
    weight's first dim is a cut of the result.
    """
    name = "torch.nn.functional.linear"
    labels, result = _of_linear(len(input.shape) - 1, len(weight.shape) == 2)
    _check(name, (input.shape, weight.shape), labels[:2])
    summed = any(len(x.shape) - 1 in x.layout.cut_dims for x in (input, weight) if isinstance(x, SpatialTensor))
    if bias is None or summed:
        y = contract(name, F.linear, (input, weight), labels[:2], result)
        return y if bias is None else y + bias
    return contract(name, F.linear, (input, weight, bias), labels, result)


@register(F.bilinear, torch.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last dims of both inputs with each of the weight's matrices; a last dim that is cut is added up."""
    name = "torch.nn.functional.bilinear"
    if isinstance(weight, SpatialTensor) or isinstance(bias, SpatialTensor):
        raise refusal(name, "an argument other than the inputs is a SpatialTensor")
    if input1.shape[:-1] != input2.shape[:-1]:
        raise RuntimeError(
            f"{name}: inputs of {tuple(input1.shape)} and {tuple(input2.shape)} differ before their last"
        )
    pixels = tuple(f"dim {i}" for i in range(input1.dim() - 1))
    labels: tuple[Labels, ...] = ((*pixels, "k"), (*pixels, "in"), ("out", "k", "in"))
    _check(name, (input1.shape, input2.shape, weight.shape), labels)
    y = contract(name, F.bilinear, (input1, input2, weight), labels, (*pixels, "out"))
    return y if bias is None else y + bias


@register(torch.einsum, flat=True)
def einsum(equation: Any, *operands: Any) -> Tensor:
    """An equation in letters, with `...` for dims that broadcast; over axes that the result lacks all ranks add up."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    if not isinstance(equation, str):
        raise refusal("torch.einsum", "its equation is no string")
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(tensors):
        raise ValueError(f"einsum(): {equation!r} has {len(terms)} operands, but {len(tensors)} were given")
    most = max(x.dim() - len(term.replace("...", "")) for x, term in zip(tensors, terms, strict=True))

    def labels(term: str, dots: int) -> tuple[str, ...]:
        before, _, after = term.partition("...")
        return (*before, *(f"...{i}" for i in range(most - dots, most)), *after) if "..." in term else (*term,)

    names = tuple(labels(t, x.dim() - len(t.replace("...", ""))) for x, t in zip(tensors, terms, strict=True))
    letters = sorted({letter for term in terms for letter in term.replace("...", "")})
    implied = "..." * ("..." in inputs) + "".join(a for a in letters if inputs.count(a) == 1)
    _check("torch.einsum", tuple(x.shape for x in tensors), names)
    return contract(
        "torch.einsum",
        lambda *parts: torch.einsum(equation, *parts),
        tensors,
        names,
        labels(output if arrow else implied, most),
    )


@register(torch.cdist, flat=True)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = MM_IF_MANY) -> Tensor:
    """Distances of the rows of both; whether by a product of matrices is decided by the rows of the whole."""
    if any(len(x.shape) - 1 in x.layout.cut_dims for x in (x1, x2) if isinstance(x, SpatialTensor)):
        raise refusal("torch.cdist", "the last dim of an input is spread")
    if compute_mode in (None, MM_IF_MANY):
        is_few = max(x1.shape[-2], x2.shape[-2]) <= 25
        compute_mode = ("donot_" if is_few else "") + "use_mm_for_euclid_dist"
    (left, right), result = _matrices(x1.dim(), x2.dim())
    labels = (left, (*right[:-2], "n", "k"))
    _check("torch.cdist", (x1.shape, x2.shape), labels)
    return contract("torch.cdist", lambda a, b: torch.cdist(a, b, p, compute_mode), (x1, x2), labels, result)


@register(*named("outer", "ger"))
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return contract("torch.outer", torch.outer, (input, vec2), (("m",), ("n",)), ("m", "n"))


@register(*named("tensordot"))
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    over_a, over_b = ([d % x.dim() for d in over] for over, x in zip(dims, (a, b), strict=True))
    of_a = tuple(range(a.dim()))
    of_b = tuple(of_a[over_a[over_b.index(d)]] if d in over_b else a.dim() + d for d in range(b.dim()))
    result = (*(n for n in of_a if n not in over_a), *(n for d, n in enumerate(of_b) if d not in over_b))
    return contract(
        "torch.tensordot", lambda x, y: torch.tensordot(x, y, (over_a, over_b)), (a, b), (of_a, of_b), result
    )
