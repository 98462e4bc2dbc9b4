"""Batch norm while tiles are streamed: with the statistics of the whole batch, or with the running statistics.

exact      the statistics of the batch over all tiles. Each norm needs one more pass over the tiles.
running    the running statistics, as in evaluation mode. The statistics of this batch are merged into them afterwards.
frozen     the running statistics, which do not change.

`running` and `frozen` need one pass. They equal plain PyTorch with these layers in evaluation mode. `running` then
updates the running statistics once, with the moments of the layers' inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, substitutes

MODES = ("exact", "running", "frozen")


@dataclass(frozen=True)
class Moments:
    """Moments of values by channel: `count`, `mean` (C,) and `squares` (C,), the sum of squared deviations, in float64.

    Sums of moments follow Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
        """The moments of x (N, C, ...)."""
        values = x.detach().double().transpose(0, 1).flatten(1)
        if not values.shape[1]:
            return cls(0, values.new_zeros(len(values)), values.new_zeros(len(values)))
        squares, mean = torch.var_mean(values, 1, correction=0)
        return cls(values.shape[1], mean, squares * values.shape[1])

    def __add__(self, other: "Moments") -> "Moments":
        if not self.count or not other.count:
            return self if self.count else other
        count, between = self.count + other.count, other.mean - self.mean
        mean = self.mean + between * (other.count / count)
        return Moments(count, mean, self.squares + other.squares + between**2 * (self.count * other.count / count))


class RunningUpdate(NamedTuple):
    """The running statistics (C,) of a norm, and their momentum."""

    running_mean: Tensor
    running_var: Tensor | None
    momentum: float


TileMoments = list[tuple[RunningUpdate, Moments]]  # for each batch norm, the moments of its input in one tile


class RunningNorms:
    """Lets batch norms use the running statistics, and sums the moments of their inputs over tiles."""

    def __init__(self) -> None:
        self._updates: list[RunningUpdate] = []
        self._moments: list[Moments] = []

    @contextmanager
    def for_tile(self, record: bool) -> Iterator[TileMoments]:
        """A context in which one tile runs. `record`: the moments of its norms' inputs are added to the sums."""
        found: TileMoments = []

        def substitute(function: Any, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            order = _ORDERS.get(function)
            if order is None:
                return rule(*args, **kwargs)
            arguments = dict(zip(order, args, strict=False)) | kwargs
            x, mean, variance = (arguments.get(name) for name in ("input", "running_mean", "running_var"))
            if not arguments.get("training", False) or not isinstance(x, SpatialTensor):
                return rule(*args, **kwargs)
            if mean is None or variance is None:
                raise Refusal("a batch norm of the streamed part has no running statistics: use `stream_norm` exact")
            if record:
                found.append((RunningUpdate(mean, variance, arguments.get("momentum", 0.1)), Moments.of(owned(x))))
            return rule(**arguments | {"training": False})

        substitutes.append(substitute)
        try:
            yield found
        finally:
            substitutes.remove(substitute)
        self.add(found)

    def add(self, found: TileMoments) -> None:
        """Add the moments of one tile."""
        for i, (update, moments) in enumerate(found):
            if i == len(self._moments):
                self._updates.append(update)
                self._moments.append(moments)
            else:
                self._moments[i] = self._moments[i] + moments

    def merge(self, comm: Communicator) -> None:
        """Update the running statistics with the moments of this batch, over the tiles of all ranks. Collective."""
        of_ranks: Sequence[list[Moments]] = comm.all_gather_object(self._moments)
        for update, parts in zip(self._updates, zip(*of_ranks, strict=True), strict=True):
            total = reduce(add, parts)
            unbiased = total.squares / max(total.count - 1, 1)
            with torch.no_grad():
                for running, value in ((update.running_mean, total.mean), (update.running_var, unbiased)):
                    if running is not None:
                        running.lerp_(value.to(running.dtype), update.momentum)


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_ORDERS = {
    F.batch_norm: _ARGUMENTS,
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_ARGUMENTS[5:], "cudnn_enabled"),
}
