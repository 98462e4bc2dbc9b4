"""Matrix products, einsum and linear layers: each rank multiplies what it has; over axes that are summed, all add up.

Dims of the operands that go together have one label, as in einsum. An axis of the image stands under one label alone:

    einsum("nchw,kc->nkhw")   c is not cut: local           einsum("nchw,nkhw->nck")   h, w are summed: all-reduced
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import narrow
from mpi4dl.geometry import Split, Tiling
from mpi4dl.parallel.spatial.flattening import Unlike, between_copies, part_along
from mpi4dl.parallel.spatial.grid import Flat, Layout
from mpi4dl.parallel.spatial.halo import gather_axes, retile, without_flat_dims
from mpi4dl.parallel.spatial.sums import add_up, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, named, refusal, register

Labels = Sequence[Hashable]


def contract(
    name: str, function: Callable[..., Tensor], operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels
) -> Tensor:
    """`function` of the operands, whose dims have these labels; those that `result` has not are summed over."""
    try:
        return _contract(name, function, operands, labels, result)
    except Unlike as unlike:
        opened = [without_flat_dims(x) for x in operands]
        if all(x is y for x, y in zip(opened, operands, strict=True)):
            raise refusal(name, str(unlike)) from None
    return contract(name, function, opened, labels, result)


def _contract(
    name: str, function: Callable[..., Tensor], operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels
) -> Tensor:
    operands = [_one_pixel_gathered(x, i, operands, labels) for i, x in enumerate(operands)]
    operands = _under_one_label(operands, labels, result)
    lead = next((x for x in operands if isinstance(x, SpatialTensor)), None)
    if lead is None:
        return function(*operands)
    held: dict[int, tuple[Hashable, Split]] = {}
    for x, names in zip(operands, labels, strict=True):
        for axis, dim in enumerate(x.layout.dims if isinstance(x, SpatialTensor) else ()):
            if dim is not None:
                split = x.layout.tiling.splits[axis]  # type: ignore[attr-defined]
                label, known = held.setdefault(axis, (names[dim], split))
                if known.size != split.size:
                    raise Unlike("operands have an axis of the image in other units")
                if label != names[dim] or names.count(label) > 1:
                    raise Unlike("an axis of the image would be multiplied with another dim")
                if known != split or label not in result:
                    held[axis] = label, known.narrow()
    flats = _flats(operands, labels, held, result)
    layout = _tiling_of(lead.layout, held)
    once = {label: flat for label, flat in flats.items() if label not in result and not layout.first_along(flat)}
    y = function(*(_part(x, names, held, layout, flats, once) for x, names in zip(operands, labels, strict=True)))
    summed = tuple(axis for axis, (label, _) in held.items() if label not in result)
    dims = [
        list(result).index(held[axis][0]) if axis in held and axis not in summed else None for axis in layout.grid.axes
    ]
    layout = layout.with_dims(dims)
    kept = [flat._replace(dim=list(result).index(label)) for label, flat in flats.items() if label in result]
    return add_up(y, replace(layout, flat=tuple(kept)), summed)


def _flats(
    operands: Sequence[Tensor],
    labels: Sequence[Labels],
    held: dict[int, tuple[Hashable, Split]],
    result: Labels,
) -> dict[Hashable, Flat]:
    """The flat dims by their labels. All operands that share such a dim have it alike."""
    found: dict[Hashable, Flat] = {}
    for x, names in zip(operands, labels, strict=True):
        if isinstance(x, SpatialTensor):
            for flat in x.layout.flat:
                known = found.setdefault(names[flat.dim], flat)
                if known[1:] != flat[1:]:
                    raise Unlike("operands have different axes of the image in a dim")
    for x, names in zip(operands, labels, strict=True):
        if isinstance(x, SpatialTensor):
            for axis, dim in enumerate(x.layout.dims):
                if (
                    dim is not None
                    and names[dim] in found
                    and x.layout.flat_at(dim) is None
                    and x.layout.grid.shape[axis] > 1
                ):
                    raise Unlike("operands have different axes of the image in a dim")
    together = [label for label, _ in held.values() if label not in found]
    if len(set(together)) < len(together):
        raise Unlike("two axes of the image are multiplied with each other")
    return found


def _under_one_label(operands: Sequence[Tensor], labels: Sequence[Labels], result: Labels) -> list[Tensor]:
    """The operands, where an axis that stands under several labels, as in q @ k.T, is gathered under all but one.

    It is kept in the longest of the dims that the result has, or else in the first operand. That of features is kept in
    the last one: of tokens that ranks share they come to have all, rather than all of the parameter.
    """
    kept: dict[int, Hashable] = {}
    for x, names in zip(operands, labels, strict=True):
        features = x.layout.grid.features if isinstance(x, SpatialTensor) else None
        if features is not None and (dim := x.layout.dims[features]) is not None:  # type: ignore[attr-defined]
            kept[features] = names[dim]
    length: dict[int, int] = {}  # of the dim where an axis is kept
    for wanted in (True, False):
        for x, names in zip(operands, labels, strict=True):
            for axis, dim in enumerate(x.layout.dims if isinstance(x, SpatialTensor) else ()):
                if dim is not None and (names[dim] in result or not wanted):
                    longer = wanted and axis in length and x.shape[dim] > length[axis]
                    if longer or axis not in kept:
                        kept[axis], length[axis] = names[dim], x.shape[dim]
    found = []
    for x, names in zip(operands, labels, strict=True):
        if isinstance(x, SpatialTensor):
            axes = [axis for axis, dim in enumerate(x.layout.dims) if dim is not None and names[dim] != kept[axis]]
            if x.layout.grid.features in axes:
                axes.remove(x.layout.grid.axes[-1])
                x = with_all_features(x)
            x = gather_axes(x, axes) if axes and isinstance(x, SpatialTensor) else x
        found.append(x)
    return found


def _tiling_of(lead: Layout, held: dict[int, tuple[Hashable, Split]]) -> Layout:
    """A layout with the splits of all axes that any operand has; its dims say no more than that they are there."""
    tiling: Tiling = lead.tiling
    for axis, (_, split) in held.items():
        tiling = tiling.replace(axis, split)
    return Layout(lead.grid, tiling, tuple(axis if axis in held else None for axis in lead.grid.axes))


def _one_pixel_gathered(x: Tensor, i: int, operands: Sequence[Tensor], labels: Sequence[Labels]) -> Tensor:
    """x, with an axis of one pixel on all ranks if it broadcasts against more pixels of another operand."""
    if not isinstance(x, SpatialTensor):
        return x
    single = []
    for axis, dim in enumerate(x.layout.dims):
        if dim is not None and x.shape[dim] == 1:
            others = [(y, names) for j, (y, names) in enumerate(zip(operands, labels, strict=True)) if j != i]
            if any(labels[i][dim] in names and y.shape[names.index(labels[i][dim])] != 1 for y, names in others):
                single.append(axis)
    return gather_axes(x, single) if single else x


def _part(
    x: Tensor,
    names: Labels,
    held: dict[int, tuple[Hashable, Split]],
    layout: Layout,
    flats: dict[Hashable, Flat],
    once: dict[Hashable, Flat],
) -> Tensor:
    """This rank's part of an operand: of what it has whole, those entries that belong to the axes of the others.

    Along the dims `once`, which are summed, another rank has the entries that every rank has.
    """
    present: tuple[int | None, ...] = (None,) * len(layout.dims)
    if isinstance(x, SpatialTensor):
        present, tiling = x.layout.dims, x.layout.tiling
        for axis, dim in enumerate(present):
            if dim is not None:
                tiling = tiling.replace(axis, held[axis][1])
        x = retile(x, tiling).local
    crop: list[int | None] = [None] * len(layout.dims)
    for label, flat in flats.items():
        if label in names and not any(
            present[factor.axis] is not None for factor in flat.factors if factor.axis is not None
        ):
            dim = names.index(label)
            if x.shape[dim] != 1:
                x = part_along(x, dim, layout, flat)
    for axis, (label, split) in held.items():
        if present[axis] is None and label in names and label not in flats:
            dim = names.index(label)
            if x.shape[dim] == split.size:
                crop[axis] = dim
    for label, flat in once.items():
        if label in names and x.shape[names.index(label)] != 1:
            x = between_copies(x, flat, names.index(label))
    return narrow(x, crop, layout.tiling.whole, layout.held)


def _matrices(left: Tensor, right: Tensor) -> tuple[list[Labels], Labels]:
    """The labels of a matrix product as torch.matmul has it: vectors, matrices, and batches of them that broadcast."""
    batch = max(left.dim(), right.dim(), 2) - 2
    names = [f"batch {i}" for i in range(batch)]
    of_left = ["k"] if left.dim() == 1 else [*names[batch - left.dim() + 2 :], "m", "k"]
    of_right = ["k"] if right.dim() == 1 else [*names[batch - right.dim() + 2 :], "k", "n"]
    outer = ["m"] * (left.dim() > 1) + ["n"] * (right.dim() > 1)
    return [of_left, of_right], [*names, *outer]


def _product(function: Any) -> Callable[..., Tensor]:
    name = function_name(function)

    def rule(input: Tensor, *others: Tensor, **options: Any) -> Tensor:
        if "out" in options:
            raise refusal(name, "it was given out=")
        (other,) = others or options.values()
        labels, result = _matrices(input, other)
        _check(name, (input, other), labels)
        return contract(name, function, (input, other), labels, result)

    return rule


def _check(name: str, operands: Sequence[Tensor], labels: Sequence[Labels]) -> None:
    """Parts might pass where PyTorch refuses the whole."""
    sizes: dict[Hashable, int] = {}
    for x, names in zip(operands, labels, strict=True):
        for size, label in zip(x.shape, names, strict=True):
            broadcasts = 1 in (size, sizes.setdefault(label, size)) and label not in ("k", "in")
            if sizes[label] != size and not broadcasts:
                raise RuntimeError(f"{name}: shapes {[tuple(y.shape) for y in operands]} cannot be multiplied")
            sizes[label] = max(sizes[label], size)


for function in [*named("matmul", "bmm", "mm", "mv"), Tensor.__matmul__]:
    register(function, flat=True)(_product(function))


@register(Tensor.__rmatmul__, flat=True)
def rmatmul(input: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, input)


def _added(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """beta * input + alpha * product; what is multiplied by a beta of 0 may be anything."""

    def rule(input: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **more: Tensor) -> Tensor:
        first, second = [*factors, *more.values()]
        y = product(first, second)
        y = y if alpha == 1 else y * alpha
        return y if beta == 0 else y + (input if beta == 1 else input * beta)

    return rule


for names, product in (("addmm", torch.mm), ("baddbmm", torch.bmm), ("addmv", torch.mv)):
    for function in named(names):
        register(function, flat=True)(_added(product))


@register(F.linear, flat=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with the last dim, the same for every pixel; over a last dim that is cut, the ranks' parts add up.

    It may be cut in the input, or in the weight: then each rank takes its part of what it has whole. A cut of the
    weight's first dim is a cut of the result.
    """
    name = "torch.nn.functional.linear"
    pixels = [f"dim {i}" for i in range(input.dim() - 1)]
    labels: list[Labels] = [[*pixels, "in"], ["out", "in"] if weight.dim() == 2 else ["in"]]
    _check(name, (input, weight), labels)
    result = [*pixels, "out"] if weight.dim() == 2 else pixels
    summed = any(
        isinstance(x, SpatialTensor) and x.layout.cut(names.index("in"))
        for x, names in zip((input, weight), labels, strict=True)
    )
    if bias is None or summed:
        y = contract(name, F.linear, (input, weight), labels, result)
        return y if bias is None else y + bias
    of_bias = ["out"] if weight.dim() == 2 else []
    return contract(name, F.linear, (input, weight, bias), [*labels, of_bias], result)


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
    pixels = [f"dim {i}" for i in range(input1.dim() - 1)]
    labels: list[Labels] = [[*pixels, "k"], [*pixels, "in"], ["out", "k", "in"]]
    _check(name, (input1, input2, weight), labels)
    y = contract(name, F.bilinear, (input1, input2, weight), labels, [*pixels, "out"])
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

    def labels(term: str, dots: int) -> list[str]:
        before, _, after = term.partition("...")
        return [*before, *(f"...{i}" for i in range(most - dots, most)), *after] if "..." in term else [*term]

    names = [labels(term, x.dim() - len(term.replace("...", ""))) for x, term in zip(tensors, terms, strict=True)]
    letters = sorted({letter for term in terms for letter in term.replace("...", "")})
    implied = "..." * ("..." in inputs) + "".join(a for a in letters if inputs.count(a) == 1)
    _check("torch.einsum", tensors, names)
    return contract(
        "torch.einsum",
        lambda *parts: torch.einsum(equation, *parts),
        tensors,
        names,
        labels(output if arrow else implied, most),
    )


@register(*named("outer", "ger"))
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return contract("torch.outer", torch.outer, (input, vec2), (["m"], ["n"]), ["m", "n"])


@register(*named("tensordot"))
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    number = iter(count())
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    over_a, over_b = ([d % x.dim() for d in over] for over, x in zip(dims, (a, b), strict=True))
    of_a: list[Hashable] = [next(number) for _ in range(a.dim())]
    of_b: list[Hashable] = [of_a[over_a[over_b.index(d)]] if d in over_b else next(number) for d in range(b.dim())]
    result = [n for n in of_a if of_a.index(n) not in over_a] + [n for d, n in enumerate(of_b) if d not in over_b]
    return contract(
        "torch.tensordot", lambda x, y: torch.tensordot(x, y, (over_a, over_b)), (a, b), (of_a, of_b), result
    )
