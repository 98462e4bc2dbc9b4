"""Pooling by shifted views for images that one rank has whole, such as those of a stage that is not cut into tiles.

Within `quick_pooling()` PyTorch's max and average pooling of large plain images on CPUs are those of `shifts`: the same
function, several times faster. Both are linear in the pixels that they look at, so their gradients have gradients too.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpi4dl.geometry import Window
from mpi4dl.parallel.spatial.rules import shifts
from mpi4dl.parallel.spatial.rules.pooling import windows_of
from mpi4dl.parallel.spatial.tensor import named

LAYERS = (nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d, nn.AvgPool3d)


def pools(module: nn.Module) -> bool:
    """Whether a model has layers that `quick_pooling` is for."""
    return any(isinstance(layer, LAYERS) for layer in module.modules())


class quick_pooling(TorchFunctionMode):
    """Within this context large plain images on CPUs are pooled by shifted views."""

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pool = _pools().get(function)
        if pool is not None:
            found = pool(*args, **(kwargs or {}))
            if found is not None:
                return found
        return function(*args, **(kwargs or {}))


@cache
def _pools() -> dict[Any, Callable[..., Tensor | None]]:
    found = {}
    for count in (2, 3):
        for function in named(f"max_pool{count}d"):
            found[function] = _max_pool_of(count)
        for function in named(f"avg_pool{count}d"):
            found[function] = _avg_pool_of(count)
    return found


def _max_pool_of(count: int) -> Callable[..., Tensor | None]:
    def max_pool(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        if return_indices or type(input) is not Tensor or input.dim() != count + 2:
            return None
        windows = windows_of(count, kernel_size, stride, padding, dilation, ceil_mode)
        fitted = _fitted(input, windows)
        if fitted is None:
            return None
        with torch.no_grad():
            found = shifts.maxima(shifts.padded(input, fitted, float("-inf")), windows)
        return None if found is None else _Chosen.apply(input, [found[0]], windows, fitted, *found[1])

    return max_pool


def _avg_pool_of(count: int) -> Callable[..., Tensor | None]:
    def avg_pool(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor | None:
        if type(input) is not Tensor or input.dim() != count + 2 or divisor_override is not None:
            return None
        windows = windows_of(count, kernel_size, stride, padding, 1, ceil_mode)
        if ceil_mode or (not count_include_pad and any(window.before for window in windows)):
            return None  # windows of fewer pixels count fewer
        fitted = _fitted(input, windows)
        return None if fitted is None else _Means.apply(input, windows, fitted)

    return avg_pool


def _fitted(x: Tensor, windows: Sequence[Window]) -> list[int] | None:
    """The padding with which windows fit x exactly; None where PyTorch's kernel is faster, or x too small for it."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # somebody may compute this again elsewhere, as checkpoints do, and find other tensors kept
    size = x.shape[2:]
    shape = [window.output_size(length) for window, length in zip(windows, size, strict=True)]
    if min(shape) < 1 or not shifts.worth(x, (*x.shape[:2], *shape), windows):
        return None
    return shifts.fitting(size, shape, windows, [window.before for window in windows])


class _Chosen(torch.autograd.Function):
    """The pixels of x that were chosen in each window. `known`: they themselves, in a list, as no input of autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, known: list[Tensor], windows: Sequence[Window], around: list[int], *chosen: Tensor
    ) -> Tensor:
        ctx.how = windows, around, x.shape[2:]
        ctx.save_for_backward(*chosen)
        return known.pop() if known else shifts.taken(shifts.padded(x, around, 0.0), chosen, windows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Spread.apply(gradient, *ctx.how, *ctx.saved_tensors), *(None,) * (3 + len(ctx.saved_tensors))


class _Spread(torch.autograd.Function):
    """The adjoint of `_Chosen`."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, windows: Sequence[Window], around: list[int], size: Sequence[int], *chosen: Tensor
    ) -> Tensor:
        ctx.how = windows, around
        ctx.save_for_backward(*chosen)
        fitting = shifts.with_sides(size, around)
        return shifts.trimmed(shifts.of_maxima(gradient, chosen, fitting, windows), around)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Chosen.apply(gradient, [], *ctx.how, *ctx.saved_tensors), *(None,) * (3 + len(ctx.saved_tensors))


class _Means(torch.autograd.Function):
    """The mean of each window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: Sequence[Window], around: list[int]) -> Tensor:
        ctx.how = windows, around, x.shape[2:]
        return shifts.means(shifts.padded(x, around, 0.0), windows, shifts.area(windows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Shared.apply(gradient, *ctx.how), None, None


class _Shared(torch.autograd.Function):
    """The adjoint of `_Means`."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, windows: Sequence[Window], around: list[int], size: Sequence[int]
    ) -> Tensor:
        ctx.how = windows, around
        fitting = shifts.with_sides(size, around)
        return shifts.trimmed(shifts.of_means(gradient, fitting, windows, shifts.area(windows)), around)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Means.apply(gradient, *ctx.how), None, None, None
