"""What is put back as it was: modes after an evaluation, and what a refused step changed beside gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpi4dl.checkpoints.randomness import random_state, set_random_state


class Undo:
    """The buffers of `model`, the states of the random number generators, and how often `executor` ran, as they are."""

    def __init__(self, model: nn.Module, executor: Any) -> None:
        self._executor, self._num_runs = executor, executor.num_runs
        self._random = random_state()
        self._buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def undo(self) -> None:
        for buffers, name, buffer, version, value in self._buffers:
            buffers[name] = buffer if buffer._version == version else buffer.copy_(value)
        set_random_state(self._random)
        self._executor.num_runs = self._num_runs


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context all modules are in evaluation mode; then each is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
