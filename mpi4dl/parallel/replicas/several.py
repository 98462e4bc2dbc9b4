"""Several optimizers, each of some parameters, that make their steps together: one for what steps and what is kept."""

from collections.abc import Sequence
from typing import Any

import torch


class Several(torch.optim.Optimizer):
    """Optimizers of parameters of their own, whose groups and state are theirs and this one's at once.

    Schedules and hooks of each go on as they were. Its class is named after theirs, such as SGD+AdamW. Raises
    ValueError if two of them have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.members = list(optimizers)
        for one in self.members:
            self.state.update(one.state)
            one.state = self.state
        self.__class__ = type("+".join(type(one).__name__ for one in self.members), (Several,), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.members:
            one.step()


def as_one(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer for all of them."""
    return optimizers if isinstance(optimizers, torch.optim.Optimizer) else Several(optimizers)
