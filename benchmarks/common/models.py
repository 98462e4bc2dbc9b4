"""Models and images of benchmarks: a transformer as a chain of layers, layers that sleep, images made as they are read.

Sleeping layers show a pipeline on fewer cores than it has ranks:

forward          input gradient     weight gradient
sleeps `seconds` sleeps `seconds`   sleeps `seconds`: in backward, or later where a schedule defers it
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl.geometry import Box

PATCH_PX = 16
HEADS = 8
CHANNELS = 3


class Patches(nn.Module):
    """Images (N, 3, H, W) to a token for each patch of 16 x 16 pixels: (N, H * W / 256, features)."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, features, PATCH_PX, PATCH_PX)

    def forward(self, images_nchw: Tensor) -> Tensor:
        patches: Tensor = self.convolution(images_nchw)
        return patches.flatten(2).transpose(1, 2).contiguous()  # gloo sends nothing else


class Head(nn.Module):
    """Logits (N, classes) of the mean over the tokens."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(features, num_classes)

    def forward(self, tokens_nlc: Tensor) -> Tensor:
        logits: Tensor = self.logits(tokens_nlc.mean(1))
        return logits


def encoder(features: int, num_layers: int, num_classes: int) -> nn.Sequential:
    """Patches, `num_layers` encoder layers, and a head, without dropout."""
    layers = [
        nn.TransformerEncoderLayer(features, HEADS, 4 * features, dropout=0.0, batch_first=True)
        for _ in range(num_layers)
    ]
    return nn.Sequential(Patches(features), *layers, Head(features, num_classes))


class Chain(nn.Module):
    """Layers in a row with tensors as arguments, as a stage of torch.distributed is called."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any) -> Any:
        value = values if len(values) > 1 else values[0]
        for layer in self.layers:
            value = layer(value)
        return value


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """A small convolution, of images (N, 3, H, W), and a long sleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.convolution(x).sigmoid(), self.seconds)


class LastSleepingLayer(nn.Module):
    """The same with a head, so that all stages take as long."""

    def __init__(self, seconds: float, num_classes: int) -> None:
        super().__init__()
        self.layer = SleepingLayer(seconds)
        self.head = nn.Linear(CHANNELS, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean((2, 3)))


def sleeping_model(num_layers: int, seconds: float, num_classes: int) -> nn.Sequential:
    """Layers named "0", "1", ...: cut between them only."""
    layers = [SleepingLayer(seconds) for _ in range(num_layers - 1)]
    return nn.Sequential(*layers, LastSleepingLayer(seconds, num_classes))


class SlowWeights(TorchDispatchMode):
    """Within it the gradient of each convolution's weight takes `seconds` longer, wherever it is computed.

    A hook on it would be refused where ranks add up the gradients of several microbatches.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.convolution_backward.default and args[-1][1]:  # the mask: input, weight, bias
            time.sleep(self.seconds)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Waves:
    """A source of images (N, C, H, W): waves over each other, the same wherever they are read from."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32

    def read(self, box: Box) -> Tensor:
        rows, cols = (torch.arange(*interval, dtype=torch.float32) for interval in box.space)
        samples, channels = torch.arange(*box.batch, dtype=torch.float32), torch.arange(float(self.shape[1]))
        phase = samples.view(-1, 1, 1, 1) + channels.view(1, -1, 1, 1)
        return torch.sin(rows.mul(0.13).view(-1, 1) + phase) + torch.cos(cols.mul(0.07) - phase)
