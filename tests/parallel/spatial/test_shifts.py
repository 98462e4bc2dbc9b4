"""Pooling by shifted views gives PyTorch's maxima, means and gradients, of equal pixels and infinities too."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.geometry import Window
from mpi4dl.parallel.spatial.rules import pooling

# The kernel, stride, dilation of each dim, and the output's size.
CASES = (
    (((3, 1, 1), (3, 1, 1)), (6, 7)),
    (((2, 2, 1), (2, 2, 1)), (3, 4)),
    (((3, 2, 1), (5, 3, 1)), (4, 3)),
    (((1, 1, 1), (3, 2, 2)), (5, 3)),
    (((2, 1, 3), (1, 2, 1)), (5, 4)),
    (((3, 1, 1), (2, 2, 1), (3, 2, 1)), (3, 4, 5)),
)


def case(which: int) -> tuple[list[Window], list[int], tuple[int, ...]]:
    numbers, shape = CASES[which]
    windows = [Window(kernel, stride, dilation=dilation) for kernel, stride, dilation in numbers]
    size = [(n - 1) * window.stride + window.extent for n, window in zip(shape, windows, strict=True)]
    return windows, size, shape


def max_pool(x: Tensor, windows: list[Window]) -> Tensor:
    pool = {2: F.max_pool2d, 3: F.max_pool3d}[len(windows)]
    kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in windows), strict=True)
    return pool(x, kernel, stride, 0, dilation)


@pytest.mark.parametrize("which", range(len(CASES)))
@pytest.mark.parametrize("gradient", ["finite", "infinite"])
def test_maxima_and_their_gradient_of_equal_pixels(which: int, gradient: str) -> None:
    windows, size, _ = case(which)
    for levels in (2, 4, 1000):  # of few levels most windows have several maxima
        x = torch.randint(-levels, levels, (2, 3, *size)).double().requires_grad_()
        y = max_pool(x, windows)
        g = torch.randn_like(y)
        if gradient == "infinite":
            g.view(-1)[::7] = float("inf")
        (expected,) = torch.autograd.grad(y, x, g)
        found = pooling.maxima_by_shifts(x.detach(), windows)
        assert found is not None
        assert torch.equal(found[0], y)
        assert torch.allclose(pooling.gradient_of_maxima(g, found[1], size, windows), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_maxima_leave_to_pytorch_what_cannot_be_compared(value: float) -> None:
    windows, size, _ = case(0)
    x = torch.randn(1, 1, *size)
    x[..., :3, :3] = value
    assert pooling.maxima_by_shifts(x, windows) is None
    assert pooling.maxima_by_shifts(x.nan_to_num(1.0, neginf=0.0).clamp(max=torch.inf), windows) is not None


@pytest.mark.parametrize("which", [i for i, (numbers, _) in enumerate(CASES) if all(d == 1 for *_, d in numbers)])
def test_means_and_their_gradient(which: int) -> None:
    windows, size, _ = case(which)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    pool = {2: F.avg_pool2d, 3: F.avg_pool3d}[len(windows)]
    y = pool(x, [w.kernel for w in windows], [w.stride for w in windows])
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, g)
    area = math.prod(window.kernel for window in windows)
    assert torch.allclose(pooling.means_by_shifts(x.detach(), windows, area), y)
    assert torch.allclose(pooling.gradient_of_means(g, size, windows, area), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_worth_it(dtype: torch.dtype) -> None:
    x, windows = torch.zeros(1, 16, 32, 32, dtype=dtype), case(0)[0]
    assert pooling.shifts_pay(x, (1, 16, 30, 30), windows) is (dtype != torch.bfloat16)
    assert not pooling.shifts_pay(x[:, :2], (1, 2, 30, 30), windows)
    assert not pooling.shifts_pay(x.contiguous(memory_format=torch.channels_last), (1, 16, 30, 30), windows)
