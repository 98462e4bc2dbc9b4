"""Operators on sequences, images and volumes by one table: what an operator does in 2 dims it does in 1 and in 3."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from tests.parallel.spatial.comparing import Arrangement, Case, Function, Shape, table_test

SIZES: dict[int, tuple[Shape, ...]] = {1: ((17,), (9,)), 2: ((13, 9),), 3: ((7, 9, 6), (9, 5, 8))}


def of(kind: str, count: int) -> Any:
    """The module, or function, of this kind for so many dims."""
    return getattr(nn, f"{kind}{count}d", None) or getattr(F, f"{kind}{count}d")


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "conv": lambda n: of("Conv", n)(4, 6, 3, padding=1),
    "conv, strided": lambda n: of("Conv", n)(4, 6, 3, stride=2, padding=1, bias=False),
    "conv, no padding": lambda n: of("Conv", n)(4, 6, 3, stride=2),
    "conv, dilated": lambda n: of("Conv", n)(4, 6, 3, padding=2, dilation=2),
    "conv, grouped": lambda n: of("Conv", n)(4, 8, 5, padding=2, groups=2),
    "conv, same": lambda n: of("Conv", n)(4, 6, 4, padding="same"),
    "conv, patches": lambda n: of("Conv", n)(4, 6, 2, stride=2),
    "conv, uneven kernel": lambda n: of("Conv", n)(4, 6, (5, 3, 1)[-n:], stride=(1, 2, 1)[-n:], padding=(2, 1, 0)[-n:]),
    "conv, reflect": lambda n: of("Conv", n)(4, 6, 3, padding=1, padding_mode="reflect"),
    "conv, circular": lambda n: of("Conv", n)(4, 6, 3, padding=1, padding_mode="circular"),
    "transposed conv": lambda n: of("ConvTranspose", n)(4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed conv, dilated": lambda n: of("ConvTranspose", n)(4, 6, 3, stride=3, dilation=2, groups=2),
    "max pool": lambda n: of("MaxPool", n)(3, 2, 1),
    "max pool, ceil": lambda n: of("MaxPool", n)(2, 2, ceil_mode=True),
    "max pool, indices": lambda n: of("MaxPool", n)(3, 2, 1, dilation=2, return_indices=True),
    "avg pool": lambda n: of("AvgPool", n)(3, 2, 1),
    "avg pool, ceil": lambda n: of("AvgPool", n)(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "lp pool": lambda n: of("LPPool", n)(2, 3, 2),
    "batch norm": lambda n: of("BatchNorm", n)(4),
    "instance norm": lambda n: of("InstanceNorm", n)(4, affine=True, track_running_stats=True),
    "group norm": lambda n: nn.GroupNorm(2, 4),
    "local response norm": lambda n: nn.LocalResponseNorm(3),
    "dropout of channels": lambda n: of("Dropout", n)(0.0),
    "stack": lambda n: nn.Sequential(
        of("Conv", n)(4, 4, 3, 2, 1),
        of("BatchNorm", n)(4),
        nn.ReLU(),
        of("MaxPool", n)(3, 2, 1),
        of("Conv", n)(4, 4, 2),
    ),
}
WHOLE: dict[str, Callable[[int], nn.Module]] = {
    "adaptive avg pool": lambda n: of("AdaptiveAvgPool", n)(3),
    "adaptive avg pool to one": lambda n: of("AdaptiveAvgPool", n)(1),
    "adaptive max pool": lambda n: of("AdaptiveMaxPool", n)(2, return_indices=True),
    "adaptive max pool, keeps": lambda n: of("AdaptiveMaxPool", n)((2, None, 3)[-n:]),
}
FUNCTIONS: dict[str, Callable[[int], Function]] = {
    **{
        f"pad, {mode}": lambda n, mode=mode: lambda x: F.pad(x, (2, 1, 0, 2, 1, 1)[: 2 * n], mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "pad, negative": lambda n: lambda x: F.pad(x, (-1, 2, 2, -1, -1, -1)[: 2 * n]),
    "crop": lambda n: lambda x: x[(..., *(slice(1, -1),) * n)],
    "every other": lambda n: lambda x: x[..., ::2],
    "roll": lambda n: lambda x: x.roll((1, 2, -3)[:n], (-1, -2, -3)[:n]),
    "flip": lambda n: lambda x: x.flip(*range(-n, 0)),
    "mean": lambda n: lambda x: x - x.mean(tuple(range(-n, 0)), keepdim=True),
    "along the last dim": lambda n: lambda x: x.softmax(-1) + x.cumsum(-1),
    **{
        f"interpolate, {mode} {how}": lambda n, mode=mode, how=how: (
            lambda x: F.interpolate(
                x, mode={"linear": ("linear", "bilinear", "trilinear")[n - 1]}.get(mode, mode), **how
            )
        )
        for mode in ("nearest", "nearest-exact", "linear", "area")
        for how in ({"scale_factor": 2}, {"scale_factor": 0.7}, {"scale_factor": 1.5}, {"size": 7})
    },
    "interpolate, corners": lambda n: (
        lambda x: F.interpolate(
            x, scale_factor=1.7, mode=("linear", "bilinear", "trilinear")[n - 1], align_corners=True
        )
    ),
}


def module_case(make: Callable[[int], nn.Module], count: int, spread: bool) -> Case:
    return Case(lambda: make(count), tuple((2, 4, *size) for size in SIZES[count]), spread)


def function_case(make: Callable[[int], Function], count: int) -> Case:
    return Case(lambda: make(count), tuple((2, 4, *size) for size in SIZES[count]))


CASES: dict[int, dict[str, Case]] = {
    count: {
        **{name: module_case(make, count, True) for name, make in MODULES.items()},
        **{name: module_case(make, count, False) for name, make in WHOLE.items()},
        **{name: function_case(make, count) for name, make in FUNCTIONS.items()},
    }
    for count in (1, 2, 3)
}
ARRANGEMENTS = [
    Arrangement(3),
    Arrangement(2, batch=2),
    Arrangement(4, style="uneven"),
    Arrangement(3, style="wide"),
    Arrangement(2, 2),
    Arrangement(1, 2, depth=2),
    Arrangement(2, 1, depth=2),
    Arrangement(2, 2, depth=1),
    Arrangement(1, 1, depth=2, batch=2),
    Arrangement(1, 1, depth=4, style="uneven"),
    Arrangement(2, 1, depth=2, style="wide"),
]


FEW = [arrangement for arrangement in ARRANGEMENTS if str(arrangement) not in ("1x2x2", "2x2x1", "2x2")]


test_operators_equal_those_of_the_whole = pytest.mark.sample(1)(
    table_test(__name__, [pytest.param(a, marks=() if a in FEW else pytest.mark.exhaustive) for a in ARRANGEMENTS])
)
