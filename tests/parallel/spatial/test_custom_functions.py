"""Functions of the user's own with a backward pass, `torch.autograd.Function`, are exact on tiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator
from mpi4dl.parallel import spatial
from tests.parallel.spatial.comparing import (
    SOME_ARRANGEMENTS,
    Arrangement,
    Case,
    arrange,
    functions,
    modules,
    table_test,
)
from tests.pool.ranks import on_ranks


class Swish(torch.autograd.Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True,)
        return gradient * (x.sigmoid() + x * x.sigmoid() * (1 - x.sigmoid()))


class Reversed(torch.autograd.Function):
    """Gradient reversal, whose result is its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Doubled(torch.autograd.Function):
    """Has a method for what it keeps, which is its result."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient + 0 * ctx.saved_tensors[0]


class Step(torch.autograd.Function):
    """A straight-through estimator, and a result without a gradient; the backward pass is not linear in the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.argmax(1, keepdim=True)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return (x > 0).to(x.dtype), largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, none: None) -> Tensor:
        assert none is None
        return gradient.clamp(-0.01, 0.01) + gradient.mean((2, 3), keepdim=True)


class Standardized(torch.autograd.Function):
    """Statistics of the whole image, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.deviation = (x.var((2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
        y = (x - x.mean((2, 3), keepdim=True)) / ctx.deviation
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (g - g.mean((2, 3), keepdim=True) - y * (g * y).mean((2, 3), keepdim=True)) / ctx.deviation


class Pooled(torch.autograd.Function):
    """A result that every rank has whole; its gradient is changed before it is spread again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        n, c, h, w = ctx.shape
        return (gradient.clamp(-1, 1) / (h * w)).view(n, c, 1, 1).expand(n, c, h, w)


class Product(torch.autograd.Function):
    """Of two tensors that may broadcast: autograd sums the gradient of the smaller one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradients[0] * y + gradients[1], gradients[0] * x + gradients[1]


class Scaling(nn.Module):
    """A parameter, which has a gradient of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 4).view(1, 4, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Product.apply(x.sin(), self.weight)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "swish": Swish.apply,
    "reversed": lambda x: Reversed.apply(x * 2, 0.7) * x,
    "set up": lambda x: Doubled.apply(x).cos(),
    "step": lambda x: Step.apply(x)[0] * x + Step.apply(x)[1],
    "standardized": lambda x: Standardized.apply(x).sin(),
    "pooled": lambda x: x * Pooled.apply(x)[:, :, None, None],
    "product": lambda x: Product.apply(x, x.flip(1)),
    "one after the other": lambda x: Swish.apply(Standardized.apply(Reversed.apply(x, 2.0))),
    "written in place": lambda x: Swish.apply(x).mul_(2),
    "of tokens": lambda x: Swish.apply(x.flatten(2)).view(x.shape),
    "of features": lambda x: x * Swish.apply(x.mean((2, 3)))[:, :, None, None],
}
CASES: dict[str, Case] = {**functions(FUNCTIONS), **modules(Scaling)}


test_custom_functions_equal_plain = table_test(__name__, SOME_ARRANGEMENTS)


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Again(torch.autograd.Function):
    """Differentiates within its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, gradient)[0]


@on_ranks(2)
def test_custom_functions_that_are_refused(comm: Communicator) -> None:
    image = torch.randn(1, 3, 8, 8, requires_grad=True)
    for function, why in (
        (Written, "Function .*: it writes to its input"),
        (Again, r"torch\.autograd\.grad.* take it outside"),
    ):
        with pytest.raises(spatial.NoRule, match=why):
            spatial.gather(function.apply(arrange(image, comm, Arrangement(1, 2)) * 1)).sum().backward()
