"""Max, average, Lp and adaptive pooling, by shifted views too, and unfolding, on tiles are those of the whole image."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.geometry import Window
from mpi4dl.parallel.spatial.rules import pooling
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    Case,
    as_drawn,
    chosen,
    functions,
    modules,
    table_test,
)


def of_few_levels(image: Tensor) -> Tensor:
    return (2 * image).round()


def with_a_hole(image: Tensor) -> Tensor:
    return image.masked_fill(image.new_ones(image.shape[-2:]).bool().triu(9), float("-inf"))


def large(*makes: Callable[[], nn.Module]) -> dict[str, Case]:
    """Images large enough for `shifts`: as they are drawn, with equal pixels, and with infinities."""
    images = {"drawn": as_drawn, "equal pixels": of_few_levels, "infinities": with_a_hole}
    return {
        f"{make()!r} of a large image, {name}": Case(make, ((3, 4, 67, 59),), image=image)
        for make in makes
        for name, image in images.items()
        if name != "infinities" or isinstance(make(), nn.MaxPool2d)
    }


CASES = {
    **modules(
        lambda: nn.MaxPool2d(2),
        lambda: nn.MaxPool2d(3, stride=1, padding=1),
        lambda: nn.MaxPool2d(3, stride=2),
        lambda: nn.MaxPool2d(3, stride=2, padding=1),
        lambda: nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        lambda: nn.MaxPool2d(2, ceil_mode=True),
        lambda: nn.MaxPool2d(3, stride=1, padding=1, dilation=2),
        lambda: nn.MaxPool2d((1, 3), stride=(2, 1), padding=(0, 1)),
        lambda: nn.MaxPool2d(5, stride=3, padding=2, ceil_mode=True),
        lambda: nn.AvgPool2d(2),
        lambda: nn.AvgPool2d(2, ceil_mode=True),
        lambda: nn.AvgPool2d(3, stride=1, padding=1),
        lambda: nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
        lambda: nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True),
        lambda: nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
        lambda: nn.AvgPool2d(3, stride=2, padding=1, divisor_override=5),
        lambda: nn.AvgPool2d((3, 2), stride=(2, 1), padding=(1, 0), count_include_pad=False),
        lambda: nn.AvgPool2d(5, stride=3, padding=2, ceil_mode=True),
        lambda: nn.LPPool2d(2, 3),
        lambda: nn.LPPool2d(2, 3, stride=1),
        lambda: nn.LPPool2d(4, 2, stride=2, ceil_mode=True),
        lambda: nn.Unfold(3, padding=1, stride=2),
        lambda: nn.Unfold((2, 3)),
        lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 2, ceil_mode=True), nn.AvgPool2d(2, 1)),
    ),
    **large(
        lambda: nn.MaxPool2d(3, 1, 1),
        lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        lambda: nn.MaxPool2d(2, ceil_mode=True),
        lambda: nn.MaxPool2d((3, 5), 1, (1, 2), dilation=2),
        lambda: nn.AvgPool2d(3, 1, 1),
        lambda: nn.AvgPool2d(5, 3, 2, ceil_mode=True, count_include_pad=False),
    ),
    **modules(
        lambda: nn.AdaptiveAvgPool2d(1),
        lambda: nn.AdaptiveAvgPool2d((1, 3)),
        lambda: nn.AdaptiveAvgPool2d(7),
        lambda: nn.AdaptiveAvgPool2d((None, 2)),
        lambda: nn.AdaptiveMaxPool2d(1),
        lambda: nn.AdaptiveMaxPool2d((1, 3)),
        lambda: nn.AdaptiveMaxPool2d(7),
        lambda: nn.AdaptiveMaxPool2d((None, 2)),
        spread=False,
    ),
    **functions(
        {
            "average pooling, a stride of none": lambda x: F.avg_pool2d(x, 2, ()),
            "unfold rows": lambda x: x.unfold(2, 3, 2),
            "unfold columns and rows": lambda x: x.unfold(3, 2, 1).unfold(2, 3, 3),
            "unfold channels": lambda x: x.unfold(1, 2, 1),
            "max pool of equal pixels": lambda x: F.max_pool2d((x > 0).to(x.dtype) * x, 3, 2, 1),
            "pooling a feature that is all negative": lambda x: F.max_pool2d(-x.exp(), 3, 1, 1),
        }
    ),
    **functions(
        {
            "adaptive max of equal pixels": lambda x: F.adaptive_max_pool2d(x.clamp(-0.3, 0.3), 2),
            "adaptive average of one row": lambda x: F.adaptive_avg_pool2d(x[:, :, 1:2], (2, 3)),
        },
        spread=False,
    ),
}

test_pooling_equals_that_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


# The kernel, stride, dilation of each dim, and the output's size.
SHIFTS = (
    (((3, 1, 1), (3, 1, 1)), (6, 7)),
    (((2, 2, 1), (2, 2, 1)), (3, 4)),
    (((3, 2, 1), (5, 3, 1)), (4, 3)),
    (((1, 1, 1), (3, 2, 2)), (5, 3)),
    (((2, 1, 3), (1, 2, 1)), (5, 4)),
    (((3, 1, 1), (2, 2, 1), (3, 2, 1)), (3, 4, 5)),
)


def case(which: int) -> tuple[list[Window], list[int], tuple[int, ...]]:
    numbers, shape = SHIFTS[which]
    windows = [Window(kernel, stride, dilation=dilation) for kernel, stride, dilation in numbers]
    size = [(n - 1) * window.stride + window.extent for n, window in zip(shape, windows, strict=True)]
    return windows, size, shape


def max_pool(x: Tensor, windows: list[Window]) -> Tensor:
    pool = {2: F.max_pool2d, 3: F.max_pool3d}[len(windows)]
    kernel, stride, dilation = zip(*((w.kernel, w.stride, w.dilation) for w in windows), strict=True)
    return pool(x, kernel, stride, 0, dilation)


@pytest.mark.parametrize("which", range(len(SHIFTS)))
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
        assert torch.allclose(pooling.gradient_of_maxima(g, found[1], windows), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_maxima_leave_to_pytorch_what_cannot_be_compared(value: float) -> None:
    windows, size, _ = case(0)
    x = torch.randn(1, 1, *size)
    x[..., :3, :3] = value
    assert pooling.maxima_by_shifts(x, windows) is None
    assert pooling.maxima_by_shifts(x.nan_to_num(1.0, neginf=0.0).clamp(max=torch.inf), windows) is not None


@pytest.mark.parametrize("which", [i for i, (numbers, _) in enumerate(SHIFTS) if all(d == 1 for *_, d in numbers)])
def test_means_and_their_gradient(which: int) -> None:
    windows, size, _ = case(which)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    pool = {2: F.avg_pool2d, 3: F.avg_pool3d}[len(windows)]
    y = pool(x, [w.kernel for w in windows], [w.stride for w in windows])
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, g)
    area = math.prod(window.kernel for window in windows)
    assert torch.allclose(pooling.means_by_shifts(x.detach(), windows, area), y)
    assert torch.allclose(pooling.gradient_of_means(g, windows, area), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_worth_it(dtype: torch.dtype) -> None:
    x, windows = torch.zeros(1, 16, 32, 32, dtype=dtype), case(0)[0]
    assert pooling.shifts_pay(x, (1, 16, 30, 30), windows) is (dtype != torch.bfloat16)
    assert not pooling.shifts_pay(x[:, :2], (1, 2, 30, 30), windows)
    assert not pooling.shifts_pay(x.contiguous(memory_format=torch.channels_last), (1, 16, 30, 30), windows)
