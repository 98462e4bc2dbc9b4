"""Max, average, Lp and adaptive pooling, by shifted views too, and unfolding, on tiles are those of the whole image."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl.geometry import Window
from mpi4dl.parallel import cpu_kernels, spatial
from mpi4dl.parallel.spatial.rules.windows import described
from tests.parallel.spatial.comparing import (
    ARRANGEMENTS,
    Case,
    as_drawn,
    chosen,
    functions,
    modules,
    table_test,
)


def large(*makes: Callable[[], nn.Module]) -> dict[str, Case]:
    """Images that are large enough for means by shifted views, and indices of maxima in two bytes."""
    images = {
        "drawn": as_drawn,
        "equal pixels": lambda image: (2 * image).round(),
        "infinities": lambda image: image.masked_fill(image.new_ones(image.shape[-2:]).bool().triu(9), float("-inf")),
        "NaN": lambda image: image.masked_fill(image > 2, float("nan")),
    }
    return {
        f"{make()!r} of a large image, {name}": Case(make, ((3, 4, 67, 59),), image=image)
        for make in makes
        for name, image in images.items()
        if name in ("drawn", "equal pixels") or isinstance(make(), nn.MaxPool2d)
    }


def contrast(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """The maximum of each window, less the mean of its squares, which counts padding: a function without a rule."""
    return F.max_pool2d(x, kernel, stride, padding) - F.avg_pool2d(x.square(), kernel, stride, padding)


def on_tiles(x: Tensor, *numbers: int) -> Tensor:
    """The same by a description of its windows, where x is spread."""
    rule = described(contrast, 2, lambda k, s, p: (Window(k, s, p, p),) * 2, each_channel=True)
    return rule(x, *numbers) if isinstance(x, spatial.SpatialTensor) else contrast(x, *numbers)


SPREAD = {
    "a description of windows, stride 1": lambda x: on_tiles(x, 3, 1, 1),
    "a description of windows, stride 2": lambda x: on_tiles(x, 5, 2, 2),
    "a description of windows, stride 3": lambda x: on_tiles(x, 2, 3, 1),
    "average pooling, a stride of none": lambda x: F.avg_pool2d(x, 2, ()),
    "unfold rows": lambda x: x.unfold(2, 3, 2),
    "unfold columns and rows": lambda x: x.unfold(3, 2, 1).unfold(2, 3, 3),
    "unfold channels": lambda x: x.unfold(1, 2, 1),
    "max pool of equal pixels": lambda x: F.max_pool2d((x > 0).to(x.dtype) * x, 3, 2, 1),
    "pooling a feature that is all negative": lambda x: F.max_pool2d(-x.exp(), 3, 1, 1),
}
WHOLE = {
    "adaptive max of equal pixels": lambda x: F.adaptive_max_pool2d(x.clamp(-0.3, 0.3), 2),
    "adaptive average of one row": lambda x: F.adaptive_avg_pool2d(x[:, :, 1:2], (2, 3)),
    "adaptive average beside infinities": lambda x: F.adaptive_avg_pool2d(
        x.masked_fill(x > 1, math.inf), (3, 5)
    ).nan_to_num(0, 5, 5),
}
CASES = modules(
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
    lambda: nn.LPPool2d(2, (4, 3), stride=(3, 2), ceil_mode=True),
    lambda: nn.Unfold(3, padding=1, stride=2),
    lambda: nn.Unfold((2, 3)),
    lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 2, ceil_mode=True), nn.AvgPool2d(2, 1)),
)
CASES |= large(
    lambda: nn.MaxPool2d(3, 1, 1),
    lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    lambda: nn.MaxPool2d(2, ceil_mode=True),
    lambda: nn.MaxPool2d((3, 5), 1, (1, 2), dilation=2),
    lambda: nn.AvgPool2d(3, 1, 1),
    lambda: nn.AvgPool2d((2, 5), 1, (1, 0), count_include_pad=False),
    lambda: nn.AvgPool2d((1, 4), 1, (0, 2), divisor_override=3),
    lambda: nn.AvgPool2d(5, 3, 2, ceil_mode=True, count_include_pad=False),
)
CASES |= modules(
    lambda: nn.AdaptiveAvgPool2d(1),
    lambda: nn.AdaptiveAvgPool2d((1, 3)),
    lambda: nn.AdaptiveAvgPool2d(7),
    lambda: nn.AdaptiveAvgPool2d((None, 2)),
    lambda: nn.AdaptiveMaxPool2d(1),
    lambda: nn.AdaptiveMaxPool2d((1, 3)),
    lambda: nn.AdaptiveMaxPool2d(7),
    lambda: nn.AdaptiveMaxPool2d((None, 2)),
    spread=False,
)
CASES |= functions(SPREAD) | functions(WHOLE, spread=False)

test_pooling_equals_that_of_the_whole_image = table_test(__name__, chosen(ARRANGEMENTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), [(3, 1, 1, 1, False), (2, 2, 0, 2, True)])
def test_maxima_on_cpus_are_pytorchs_to_the_bit(
    dtype: torch.dtype, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    """Of equal pixels and of those that are not numbers, too; of channels and samples that are pooled in parts."""
    for shape in ((3, 40, 19, 23), (5, 17, 130, 121), (2, 18, 7, 40, 30)):
        dims = len(shape) - 2
        options = [kernel] * dims, [stride] * dims, [padding] * dims, [dilation] * dims, ceil
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).round().to(dtype)
        x[x == 4] = torch.nan
        found = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")(x, *options)
        expected = cpu_kernels.OF_MAX_POOLS[dims].call_boxed(cpu_kernels.CPU, x, *options)
        assert torch.equal(found[0].nan_to_num(99), expected[0].nan_to_num(99))
        assert torch.equal(found[1], expected[1])
        assert [each.stride() for each in found] == [each.stride() for each in expected]
    with pytest.raises(RuntimeError, match=r"input size: \(40x1x100\)"):
        F.max_pool2d(torch.ones(3, 40, 1, 100, dtype=dtype), 2)
