"""A model whose layers sleep instead of computing, so that a pipeline can be seen on fewer cores than it has ranks.

forward          input gradient     weight gradient
sleeps `seconds` sleeps `seconds`   sleeps `seconds`: in backward, or later where a schedule puts it off
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS = 3


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
    """The same with a head, so that all stages are alike."""

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


def slow_weights(model: nn.Module, seconds: float) -> None:
    """Let the gradient of each convolution's weight take its time; to be called where the model will be trained."""

    def wait(gradient: Tensor) -> None:
        time.sleep(seconds)

    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.register_hook(wait)
