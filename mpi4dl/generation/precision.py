"""Weights of fewer bits, for generation: bfloat16, or 8 or 4 bits of the matrices of linear layers.

    int8    a scale for each output      int4    a scale and an offset for each 32 inputs of an output

Only matrices of linear layers become integers, as `QuantizedWeight`; all else is bfloat16. The products are PyTorch's
own, in bfloat16, of a fixed number of rows at a time: so no request's depend on how many others there are.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl.generation.packing import ROWS_OF_PRODUCTS
from mpi4dl.parallel.pipeline.held import Held

Precision = Literal["fp32", "bf16", "int8", "int4"]
GROUP = 32  # inputs that share a scale in 4 bits
OUTPUTS = 16  # of which PyTorch takes multiples, in 4 bits


class QuantizedWeight(Tensor):
    """A matrix (outputs, inputs) of integers, to be multiplied with by F.linear and not to be looked at otherwise."""

    bits: int
    packed: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, shape: Sequence[int], bits: int, packed: Tensor, scales: Tensor) -> "QuantizedWeight":
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bfloat16, device=packed.device)
        self.bits, self.packed, self.scales = bits, packed, scales
        return self

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> "QuantizedWeight":
        """The nearest matrix of so many bits."""
        weight = weight.detach().float()
        if bits == 8:
            scales = weight.abs().amax(1).clamp_(min=1e-12) / 127
            numbers = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            return cls(weight.shape, bits, numbers, scales.bfloat16())
        grouped = weight.unflatten(1, (-1, GROUP))
        low, high = grouped.amin(2), grouped.amax(2)
        steps = ((high - low) / 15).clamp_(min=1e-8).bfloat16()
        middle = (low.bfloat16() + 8 * steps.float()).bfloat16()  # what the number 8 stands for
        numbers = ((grouped - middle.float()[..., None]) / steps.float()[..., None]).round_().add_(8).clamp_(0, 15)
        missing = -len(weight) % OUTPUTS  # outputs that PyTorch wants, and nobody sees
        packed = torch._convert_weight_to_int4pack_for_cpu(F.pad(numbers.flatten(1), (0, 0, 0, missing)).int(), 1)
        scales = F.pad(torch.stack([steps, middle], 2), (0, 0, 0, 0, 0, missing))
        return cls(weight.shape, bits, packed, scales.transpose(0, 1).contiguous())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear:
            return _linear(*args, **kwargs or {})
        if function is Tensor.view_as or function is Tensor.detach:
            return args[0]
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a weight of integers: only linear layers can use it")


def _linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x W' + b, for x of whatever number of rows, by blocks of 8."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS_OF_PRODUCTS))
    found = torch.cat([_product(block, weight) for block in padded.split(ROWS_OF_PRODUCTS)])
    found = found[: len(rows), : weight.shape[0]].reshape(*x.shape[:-1], -1)
    return found if bias is None else found + bias


def _product(rows: Tensor, weight: QuantizedWeight) -> Tensor:
    if weight.bits == 8:
        return torch._weight_int8pack_mm(rows, weight.packed, weight.scales)
    return torch._weight_int4pack_mm_for_cpu(rows, weight.packed, GROUP, weight.scales)


def lower_weights(held: Held, precision: Precision) -> None:
    """Let the model have weights of this precision, in place.

    Raises:
        ValueError: 4 bits of a matrix whose inputs are no multiple of 32.
    """
    if precision == "fp32":
        return
    held.to(torch.bfloat16)
    if precision == "bf16":
        return
    bits = int(precision.removeprefix("int"))
    known: dict[int, nn.Parameter] = {}
    for name, module in held.named_modules():
        if isinstance(module, nn.Linear):
            whole = module._parameters["weight"]  # this rank's part, if it is cut
            assert whole is not None
            if bits == 4 and whole.shape[1] % GROUP:
                raise ValueError(
                    f"{name} has {whole.shape[1]} inputs on a rank, but --precision int4 takes multiples of {GROUP}: "
                    "use int8, or fewer ranks for --tensor"
                )
            if id(whole) not in known:
                known[id(whole)] = nn.Parameter(QuantizedWeight.of(whole, bits), requires_grad=False)
            module._parameters["weight"] = known[id(whole)]
