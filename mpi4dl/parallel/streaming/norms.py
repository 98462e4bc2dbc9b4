"""Batch norm while tiles are visited: with the statistics of the whole image, or with those known before.

exact      statistics of the batch, over all tiles: a round for each norm, in which every visit repeats what was before
running    the running statistics, as in evaluation; those of this batch are merged into them afterwards
frozen     the running statistics, which stay as they are

Under `running` and `frozen` no visit is repeated. They compute what plain PyTorch computes with these layers in
evaluation mode; `running` then updates the statistics once, with the moments that the layers' inputs had meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, substitutes

MODES = ("exact", "running", "frozen")


@dataclass(frozen=True)
class Moments:
    """Of some values: how many, their mean, and the sum of squares of what they differ from it, in float64, by channel.

    They are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979).
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Moments":
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
    """The running statistics of a norm, and their momentum."""

    running_mean: Tensor
    running_var: Tensor | None
    momentum: float


Seen = list[tuple[RunningUpdate, Moments]]  # what each batch norm saw of a tile


class KnownStatistics:
    """Batch norms take the running statistics; what their inputs had is noted, to be merged into them later."""

    def __init__(self) -> None:
        self._updates: list[RunningUpdate] = []
        self._moments: list[Moments] = []

    @contextmanager
    def one_visit(self, noted: bool) -> Iterator[Seen]:
        """Within it a part is run on one tile; `noted`: what its batch norms see is to be merged."""
        seen: Seen = []

        def substitute(function: Any, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            order = _ORDERS.get(function)
            if order is None:
                return rule(*args, **kwargs)
            given = dict(zip(order, args, strict=False)) | kwargs
            x, mean, variance = (given.get(name) for name in ("input", "running_mean", "running_var"))
            if not given.get("training", False) or not isinstance(x, SpatialTensor):
                return rule(*args, **kwargs)
            if mean is None or variance is None:
                raise Refusal("a batch norm of the streamed part has no running statistics: use `stream_norm` exact")
            if noted:
                seen.append((RunningUpdate(mean, variance, given.get("momentum", 0.1)), Moments.of(owned(x))))
            return rule(**given | {"training": False})

        substitutes.append(substitute)
        try:
            yield seen
        finally:
            substitutes.remove(substitute)
        self.add(seen)

    def add(self, seen: Seen) -> None:
        """Merge what the norms saw of a tile."""
        for i, (update, moments) in enumerate(seen):
            if i == len(self._moments):
                self._updates.append(update)
                self._moments.append(moments)
            else:
                self._moments[i] = self._moments[i] + moments

    def merge(self, comm: Communicator) -> None:
        """Let the running statistics follow those of this batch, over the tiles of all ranks. Collective."""
        everywhere: Sequence[list[Moments]] = comm.all_gather_object(self._moments)
        for update, parts in zip(self._updates, zip(*everywhere, strict=True), strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            unbiased = total.squares / max(total.count - 1, 1)
            with torch.no_grad():
                for running, found in ((update.running_mean, total.mean), (update.running_var, unbiased)):
                    if running is not None:
                        running.lerp_(found.to(running.dtype), update.momentum)


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_ORDERS = {
    F.batch_norm: _ARGUMENTS,
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_ARGUMENTS[5:], "cudnn_enabled"),
}
