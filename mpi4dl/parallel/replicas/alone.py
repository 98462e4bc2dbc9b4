"""Gradients of parameters that one rank holds alone: they stay where autograd adds them up, and nothing is summed.

A stage of a pipeline without tiles and replicas has such parameters. See `reducer` for those of several ranks.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class Alone:
    """The gradients of `parameters`, as a Reducer of one rank has them, without its hooks, buckets and copies.

    `prepare()` before backward, `finish()` after it; passes in between add up. Then `used` says which parameters have
    a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.used: list[bool] = []
        self.idle: set[int] = set()  # no bucket is, as there are none

    def prepare(self, accumulate: bool = True) -> None:
        """Forget the gradients of the step before. Passes add up either way."""
        for p in self.parameters:
            p.grad = None

    def wake(self, i: int) -> None:
        """Autograd adds up the gradient of a parameter that is trained from now on like any other."""

    def begin_pass(self, last: bool) -> None:
        """Passes differ in nothing."""

    def end_pass(self) -> None:
        """What a pass computed is where it belongs."""

    def finish(self, hooked: Sequence[bool] = ()) -> bool:
        """Hooks have seen all that there is, whichever there are."""
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        self.used = [p.grad is not None for p in self.parameters]
        return False

    def use(self, used: Sequence[bool]) -> None:
        """Some parameters took part in the loss elsewhere: here their gradients are zero."""
        for i, there in enumerate(used):
            if there and not self.used[i]:
                self.used[i], self.parameters[i].grad = True, torch.zeros_like(self.parameters[i])

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def squares(self) -> list[Tensor]:
        """The sum of the squares of the gradients, if there are any."""
        gradients = [gradient for gradient in self._gradients() if gradient.numel()]
        if not gradients:
            return []
        return [torch.stack(torch._foreach_norm(gradients)).double().square().sum()]

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        if factor != 1.0 and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, factor)

    def clamp(self, limit: float) -> None:
        """Limit each element of the gradients."""
        for gradient in self._gradients():
            gradient.clamp_(-limit, limit)

    def change(self, by: Callable[[int, Tensor], Tensor]) -> None:
        """Replace each gradient by `by(i, gradient)`, from the first parameter on."""
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                p.grad.copy_(by(i, p.grad))
