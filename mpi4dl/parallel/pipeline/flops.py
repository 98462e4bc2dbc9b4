"""Counts the floating-point operations of whatever runs in its context, by PyTorch's own formulas.

PyTorch's FlopCounterMode also tells modules apart. For that it hooks into autograd, and fails where a module hands on a
parameter itself, as a stage of a vision transformer does with the class token.
"""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """`total` is the sum over convolutions, matrix products and attention, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result
