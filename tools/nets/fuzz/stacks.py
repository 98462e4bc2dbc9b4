"""Small stacks of operators, on images and grids of all sizes, also with empty parts, equal the whole image."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

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


class Flat(nn.Module):
    """Pixels in one dim, and what is made of them back in the place of the image."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(2) / 2).softmax(1).view(x.shape)


class Summary(nn.Module):
    """A window as large as the image, whose one pixel is told apart from dims of one, and weighs the image."""

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, x.shape[2:])
        return x * pooled.flatten(1).sigmoid().view(*x.shape[:2], 1, 1) + pooled.squeeze(3).unsqueeze(3)


class Extremes(nn.Module):
    """Which rows and columns have the largest pixel, added in place to a crop of what there was."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y[:, :, : max(1, x.shape[2] // 2)] += x.amax((2, 3), keepdim=True) - x.max(3, keepdim=True)[0].mean(2, True)
        return y


class Shuffle(nn.Module):
    """Space to depth and back, of an image that is padded to an even size."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2)


class Residual(nn.Module):
    """Norms in parallel branches, added in place, of which one is looked at first by what writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu_()))
        z = self.norms[2](x * 2)
        y += z
        return F.relu(y, inplace=True)


class Branches(nn.Module):
    """Norms that feed each other's branches, a pool behind one of them, and one whose result nobody wants."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(4))
        self.mix = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.norms[0](x), self.norms[1](x.sigmoid())
        pooled = F.max_pool2d(a.relu(), 3, 1, 1)
        self.norms[3](pooled)
        c = self.norms[2](self.mix(torch.cat([b, pooled], 1)))
        return F.dropout2d(c, 0.0) + a * b


OWN = {kind.__name__: kind for kind in (Flat, Summary, Extremes, Shuffle, Residual, Branches)}

others = st.sampled_from(
    [
        *((name, {}) for name in OWN),
        ("AdaptiveAvgPool2d", {"output_size": (3, 2)}),
        ("AdaptiveMaxPool2d", {"output_size": 2}),
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
norms = st.sampled_from([("BatchNorm2d", {"num_features": CHANNELS}), ("Residual", {}), ("Branches", {})])
stacks = st.lists(layers, min_size=1, max_size=5)
stacks_of_norms = st.lists(st.one_of(norms, layers), min_size=2, max_size=6)
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
sizes = st.tuples(st.integers(1, 24), st.integers(1, 24))


def stack(specification: list[tuple[str, dict[str, Any]]]) -> Callable[[], nn.Module]:
    """What builds the layers; norms are shifted, since rounding decides what ReLU does with a mean of zero."""

    def build() -> nn.Module:
        made = nn.Sequential(*((OWN.get(name) or getattr(nn, name))(**options) for name, options in specification))
        for layer in made.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.normal_(layer.bias)
        return made

    return build


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


class Stack(NamedTuple):
    """Layers, an image, its tiles, and whether norms know what follows them."""

    layers: list[tuple[str, dict[str, Any]]]
    size: tuple[int, int]
    arrangement: Arrangement
    knowing: bool


def compare_stack(comm: Communicator, stacked: Stack) -> list[str]:
    """What is wrong on this arrangement, and on the same grid with all pixels in one corner."""
    torch.set_default_dtype(torch.float64)
    shape = (2, CHANNELS, *stacked.size)
    case = Case(stack(stacked.layers), (shape,), spread=False)
    return [
        f"{laid}: {wrong}"
        for laid in (stacked.arrangement, stacked.arrangement._replace(style="empty"))
        for wrong in compare(comm, case, shape, laid, stacked.knowing)
    ]


@st.composite
def cases(draw: st.DrawFn) -> Stack:
    knowing = draw(st.booleans())
    layers, size = draw(stacks_of_norms if knowing else stacks), draw(sizes)
    assume(possible(layers, size))
    return Stack(layers, size, draw(arrangements), knowing)


def problem(ranks: Ranks, case: Stack) -> str | None:
    """What is wrong with layers on tiles, on any rank."""
    found = ranks(case.arrangement.num_ranks).run(compare_stack, case)
    return "; ".join(dict.fromkeys(itertools.chain(*found))) or None
