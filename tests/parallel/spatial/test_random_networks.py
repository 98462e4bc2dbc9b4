"""Random small stacks of window operators, on random images and grids, equal the whole image."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from mpi4dl.comm import Communicator
from tests.parallel.spatial.comparing import Arrangement, Case, compare
from tests.pool.ranks import Ranks

CHANNELS = 3
kernels = st.integers(1, 5)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    return "Conv2d", {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "kernel_size": (draw(kernels), draw(kernels)),
        "stride": (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        "padding": (draw(st.integers(0, 4)), draw(st.integers(0, 4))),
        "dilation": (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        "groups": draw(st.sampled_from([1, CHANNELS])),
        "bias": False,  # before a norm its gradient would be rounding alone
    }


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    stride = draw(st.integers(1, 3))
    return "ConvTranspose2d", {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "kernel_size": draw(kernels),
        "stride": stride,
        "padding": draw(st.integers(0, 2)),
        "output_padding": draw(st.integers(0, stride - 1)),
        "bias": False,
    }


@st.composite
def pools(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kernel = draw(kernels)
    options = {
        "kernel_size": kernel,
        "stride": draw(st.integers(1, 3)),
        "padding": draw(st.integers(0, kernel // 2)),
        "ceil_mode": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return "MaxPool2d", options
    return "AvgPool2d", options | {"count_include_pad": draw(st.booleans())}


others = st.sampled_from(
    [
        ("BatchNorm2d", {"num_features": CHANNELS}),
        ("GroupNorm", {"num_groups": 1, "num_channels": CHANNELS}),
        ("ReLU", {}),
        ("Upsample", {"scale_factor": 2, "mode": "bilinear"}),
        ("Upsample", {"scale_factor": 1.5, "mode": "nearest"}),
        ("ReplicationPad2d", {"padding": (2, 0, 1, 3)}),
        ("ZeroPad2d", {"padding": (1, -1, -1, 2)}),
    ]
)
layers = st.one_of(convolutions(), convolutions(), transposed_convolutions(), pools(), others)
stacks = st.lists(layers, min_size=1, max_size=5)
arrangements = st.sampled_from(
    [
        Arrangement(2, 2),
        Arrangement(4, 1),
        Arrangement(1, 3),
        Arrangement(3, 1, style="uneven"),
        Arrangement(4, 1, style="uneven"),
        Arrangement(2, 2, style="wide"),
        Arrangement(1, 4, style="wide"),
        Arrangement(1, 2, batch=2),
    ]
)
sizes = st.tuples(st.integers(4, 24), st.integers(4, 24))


def stack(specification: list[tuple[str, dict[str, Any]]]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(getattr(nn, name)(**options) for name, options in specification))


def possible(specification: list[tuple[str, dict[str, Any]]], size: tuple[int, int]) -> bool:
    """Whether plain PyTorch accepts this network on this image, and leaves no more than a megapixel."""
    try:
        with torch.device("meta"):
            x = torch.empty(2, CHANNELS, *size)
            for layer in stack(specification)():
                x = layer(x)
                if x.numel() > 1 << 18 or x.numel() == 0:
                    return False
    except (RuntimeError, ValueError):
        return False
    return True


def compare_stack(
    comm: Communicator, specification: list[tuple[str, dict[str, Any]]], size: tuple[int, int], arrangement: Arrangement
) -> list[str]:
    torch.set_default_dtype(torch.float64)
    shape = (2, CHANNELS, *size)
    return compare(comm, Case(stack(specification), (shape,)), shape, arrangement)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(specification=stacks, size=sizes, arrangement=arrangements)
def test_random_stacks_equal_the_whole_image(
    ranks: Ranks, specification: list[tuple[str, dict[str, Any]]], size: tuple[int, int], arrangement: Arrangement
) -> None:
    assume(possible(specification, size))
    assert ranks(arrangement.size).run(compare_stack, specification, size, arrangement) == [[]] * arrangement.size
