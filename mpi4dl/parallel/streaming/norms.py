"""Batch norm while tiles are streamed: with the statistics of the whole batch, or with the running statistics.

exact      the statistics of the batch over all tiles. Each norm needs one more pass over the tiles.
running    the running statistics, as in evaluation mode. The statistics of this batch are merged into them afterwards.
frozen     the running statistics, which do not change.

`running` and `frozen` need one pass. They equal plain PyTorch with these layers in evaluation mode. `running` then
updates the running statistics once, with the moments of the layers' inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.statistics import ChannelMoments, merged
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, substitutes

MODES = ("exact", "running", "frozen")


def moments_of(x: Tensor) -> ChannelMoments:
    """The moments of x (N, C, ...) by channel."""
    values = x.detach().double().transpose(0, 1).flatten(1)
    counts = values.new_full((len(values),), values.shape[1])
    if not values.shape[1]:
        return ChannelMoments(counts, counts, counts)
    squares, mean = torch.var_mean(values, 1, correction=0)
    return ChannelMoments(counts, mean, squares * counts)


class RunningUpdate(NamedTuple):
    """The running statistics (C,) of a norm, and their momentum."""

    running_mean: Tensor
    running_var: Tensor | None
    momentum: float


TileMoments = list[tuple[RunningUpdate, ChannelMoments]]  # for each batch norm, the moments of its input in one tile


class RunningNorms:
    """Lets batch norms use the running statistics, and sums the moments of their inputs over tiles."""

    def __init__(self) -> None:
        self._updates: list[RunningUpdate] = []
        self._moments: list[ChannelMoments] = []

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
                found.append((RunningUpdate(mean, variance, arguments.get("momentum", 0.1)), moments_of(owned(x))))
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
                self._moments[i] = merged([self._moments[i], moments])

    def merge(self, comm: Communicator) -> None:
        """Update the running statistics with the moments of this batch, over the tiles of all ranks. Collective."""
        of_ranks: Sequence[list[ChannelMoments]] = comm.all_gather_object(self._moments)
        for update, parts in zip(self._updates, zip(*of_ranks, strict=True), strict=True):
            total = merged(parts)
            unbiased = total.squares / (total.num_known - 1).clamp(min=1)
            with torch.no_grad():
                for running, value in ((update.running_mean, total.mean), (update.running_var, unbiased)):
                    if running is not None:
                        running.lerp_(value.to(running.dtype), update.momentum)


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_ORDERS = {
    F.batch_norm: _ARGUMENTS,
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_ARGUMENTS[5:], "cudnn_enabled"),
}
