"""Hooks on the gradients of parameters: called when these are whole, not by autograd, which has one rank's part.

backward    autograd calls p's hooks: each is replaced by one that does nothing while a reducer collects
finish      the gradient is summed over all ranks that hold p
afterwards  the hooks of `register_hook`, in their order, then those of `register_post_accumulate_grad_hook`
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from mpi4dl.comm import Refusal
from mpi4dl.parallel.replicas.reducer import Reducer


class WaitingHook:
    """What autograd is to call in place of a hook. Outside of the reducer's steps it is the hook."""

    def __init__(self, hook: Callable[[Tensor], Any], reducer: Reducer) -> None:
        self.hook = hook
        self._reducer = weakref.ref(reducer)

    def __call__(self, value: Tensor) -> Any:
        alive = self._reducer()
        return None if alive is not None and alive.collecting else self.hook(value)


def _hooks_of(parameter: nn.Parameter) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """Where the user's hooks on a gradient are kept, by what key, and they themselves, in the order of their calls."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        for key, hook in [*(hooks or {}).items()]:
            if not Reducer.is_hook(hook):
                assert hooks is not None
                yield hooks, key, hook


def postpone(parameter: nn.Parameter, reducer: Reducer) -> bool:
    """Let the hooks on a gradient wait for `call_hooks`; returns whether there are any. Handles still remove them."""
    found = [*_hooks_of(parameter)]
    for hooks, key, hook in found:
        hooks[key] = WaitingHook(hook.hook if isinstance(hook, WaitingHook) else hook, reducer)
    return bool(found)


def call_hooks(name: str, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the hooks make of the whole gradient. Raises Refusal if they change the parameter, or leave no gradient."""
    kept, version = parameter.grad, parameter._version
    for hooks, _, hook in _hooks_of(parameter):
        if hooks is parameter._backward_hooks:
            result = hook(gradient)
            gradient = gradient if result is None else result
        else:
            parameter.grad = gradient
            hook(parameter)
            result, parameter.grad = parameter.grad, kept
            if result is None or parameter._version != version:
                raise Refusal(
                    f"a hook on the gradient of {name} steps, or takes the gradient away: leave that to the optimizer"
                )
            gradient = result
        if not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
            what = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            raise ValueError(
                f"a hook on the gradient of {name}, of shape {tuple(parameter.shape)}, returned {what}: return a "
                "tensor of the same shape, or None"
            )
    return gradient
