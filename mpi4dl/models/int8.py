"""Frozen matrices in 8 bits: integers from -127 to 127, times a power of two for each row.

Rounded values are exact in float32 and bfloat16, and rounding them again changes nothing. So a checkpoint has them as
plain values, under plain names, and a run resumes with the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LARGEST = 127
aten = torch.ops.aten
VIEWS = {aten.detach.default, aten.alias.default, aten.t.default, aten.transpose.int}  # what autograd keeps of it


class Int8Matrix(Tensor):
    """A matrix (out, in) of the type of `steps` (out, 1), which holds `integers` (out, in), or what is so transposed.

    Operators get its values, and what they write to all of them is rounded. Other views are copies.
    """

    integers: Tensor
    steps: Tensor
    # As in PyTorch's own subclasses that wrap tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, integers: Tensor, steps: Tensor) -> "Int8Matrix":
        made = Tensor._make_wrapper_subclass(cls, integers.shape, dtype=steps.dtype, device=integers.device)
        made.integers, made.steps = integers, steps
        return made

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.integers.nbytes + self.steps.nbytes

    def values(self) -> Tensor:
        return self.integers.to(self.steps.dtype).mul_(self.steps)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(Int8Matrix(self.integers.clone(), self.steps.clone()), requires_grad=False)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if operator in VIEWS:
            return cls(*(operator(part, *args[1:], **kwargs) for part in (first.integers, first.steps)))
        if operator is aten._to_copy.default:
            steps = operator(first.steps, **kwargs)
            return cls(first.integers.to(steps.device, copy=True), steps)
        taken = pytree.tree_map_only(cls, cls.values, (args, kwargs))
        result = operator(*taken[0], **taken[1])
        if isinstance(first, cls) and operator._schema.is_mutable:  # it wrote to values that nobody keeps
            within = next(d for d in (1, 0) if first.steps.shape[d] == 1)
            for mine, new in zip((first.integers, first.steps), rounded(result, within), strict=True):
                mine.copy_(new)
            return first
        return result


def rounded(matrix: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """The nearest integers (out, in), and the steps of rows (out, 1): NaN where a row is not finite."""
    largest = matrix.abs().amax(dim, keepdim=True) / (LARGEST + 1)
    steps = largest / torch.frexp(largest).mantissa  # the exact power of two; NaN of what is not finite, and of 0
    steps = steps.masked_fill(largest == 0, 1)
    return (matrix / steps).nan_to_num(0).round().clamp(-LARGEST, LARGEST).to(torch.int8), steps


def hold_in_int8(layer: nn.Linear) -> None:
    """Freeze the weight of a layer, rounded to 8 bits."""
    layer.weight = nn.Parameter(Int8Matrix(*rounded(layer.weight.detach())), requires_grad=False)
