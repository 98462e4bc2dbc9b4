"""One rank of a grid whose other ranks need not exist: what it would send is counted, and what would come is made up.

On meta tensors nothing is computed either. On real ones this rank does all that it would do among others, rules and
packing included, and it receives zeros. That takes as long as among others, except for waiting.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from mpi4dl import geometry
from mpi4dl.comm import Communicator, Pending
from mpi4dl.comm.blocks import MOST_GATHERED, BlockPlan, Blocks
from mpi4dl.comm.packing import Piece, buffer_for, messages_of, packed, unpack
from mpi4dl.comm.traffic import Recorder
from mpi4dl.parallel.spatial.grid import Grid

COUNTS = "halo_bytes messages gathered_bytes reduced_bytes latencies exchanges rounds over_features".split()


class DryRunCommunicator(Communicator):
    """A communicator of ranks that need not exist: it counts what this rank would send.

    `latencies` are the messages that MPI would send of this rank, those within collectives among them. `exchanges` are
    those of which this rank has a part, and `rounds` these and the collectives. `over_features` are the bytes of sums
    of those that share features; half of what is summed in two halves, by reduce-scatter and all-gather.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        beside: "DryRunCommunicator | None" = None,
        axes: tuple[int, ...] | None = (0,),
        shape: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.size = rank, size
        self.axes, self.shape = axes, shape or (size,)
        self.shares_features = False
        self.recorded = True
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0) if beside is None else beside.counts
        self.recorder: Recorder = Recorder() if beside is None else beside.recorder
        self.node = None  # type: ignore[assignment]

    @cached_property
    def _offsets(self) -> list[tuple[int, ...]]:
        """How far each rank is along the axes."""
        places = np.stack(np.unravel_index(np.arange(self.size), self.shape), 1)
        return list(map(tuple, (places - places[self.rank]).tolist()))

    def _record(self, kind: str, tensor: Tensor) -> None:
        if self.size > 1 and self.recorded:
            self.recorder.add(kind, self.axes, {(): tensor.nbytes})

    @cached_property
    def blocks(self) -> Blocks | None:
        """Of the two gathers, the first one is recorded for both."""
        if self.size <= MOST_GATHERED:
            return None
        plan, kind = BlockPlan.of(self.size), type(self)
        own, alike = plan.spans[plan.block(self.rank)], plan.across(plan.place(self.rank))
        within = kind(own.index(self.rank), len(own), self, self.axes)
        across = kind(alike.index(self.rank), len(alike), self, self.axes)
        across.recorded = False
        return Blocks(plan, self.rank, within, across)

    def iexchange(self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, **kwargs: Any) -> Pending:
        parts: dict[tuple[int, ...], int] = {}
        for peer, tensor in sends:
            assert peer is not None
            offset = self._offsets[peer]
            parts[offset] = parts.get(offset, 0) + tensor.nbytes
            self.counts["halo_bytes"] += tensor.nbytes
            self.counts["messages"] += 1
            if self.shares_features:  # (size - 1) / size of what it is half a sum of
                self.counts["over_features"] += tensor.nbytes * self.size // (2 * (self.size - 1))
        if parts:
            self.recorder.add("exchange", self.axes, parts)
        self.counts["exchanges"] += bool(sends or receives)
        self.counts["rounds"] += bool(sends or receives)
        messages = messages_of(sends)
        self.counts["latencies"] += len(messages)
        leaving = [packed(message) for message in messages if not message.pieces[0].is_meta]
        for message in messages_of(receives):
            if not message.pieces[0].is_meta:
                buffer = buffer_for(message)
                buffer.detach().zero_()
                if buffer is not message.pieces[0]:
                    unpack(message, buffer)
        del leaving
        return Pending(self.node)

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None) -> Pending:
        self._record("reduce", tensor)
        self.counts["rounds"] += self.size > 1
        self.counts["reduced_bytes"] += tensor.nbytes
        self.counts["over_features"] += tensor.nbytes * self.shares_features
        self.counts["latencies"] += self.size - 1
        if op == "sum" and tensor.is_floating_point():
            tensor.detach().mul_(self.size)
        return Pending(self.node)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._record("gather", tensor)
        self.counts["rounds"] += self.size > 1
        self.counts["gathered_bytes"] += tensor.nbytes
        self.counts["latencies"] += self.size - 1
        return tensor.detach().expand(self.size, *tensor.shape).clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        self.counts["rounds"] += 1
        return [value] * self.size

    def nodes(self) -> list[list[int]]:
        return [list(range(self.size))]

    def agree(self, error: str | None = None, **facts: Any) -> None:
        if error is not None:
            raise ValueError(error)


class DryRunGrid(Grid):
    """A grid of which only this rank exists."""

    comm: DryRunCommunicator

    def among_experts(self) -> DryRunCommunicator:
        return DryRunCommunicator(*self.place.experts, self.comm, axes=None)

    def along(self, axes: tuple[int, ...]) -> DryRunCommunicator:
        axes = tuple(axis for axis in self.axes if axis in axes or self.shape[axis] == 1)
        if axes not in self._shared:
            ranks = self.ranks_along(axes)
            shape = tuple(self.shape[axis] for axis in axes)
            own = type(self.comm)(ranks.index(self.rank), len(ranks), self.comm, axes, shape)
            own.shares_features = self.features in axes
            self._shared[axes] = own
        return self._shared[axes]

    @cached_property
    def _shared(self) -> dict[tuple[int, ...], DryRunCommunicator]:
        return {}


def dry_run_grid(
    shape: geometry.GridShape,
    rank: int = 0,
    tracks_batch: bool = False,
    kind: type[DryRunCommunicator] = DryRunCommunicator,
) -> DryRunGrid:
    comm = kind(rank, shape.size, axes=tuple(range(len(shape))), shape=tuple(shape))
    grid = DryRunGrid.of(comm, shape, tracks_batch)
    assert isinstance(grid, DryRunGrid)
    return grid


def rank_in_the_middle(shape: geometry.GridShape, num_samples: int = 0) -> int:
    """The rank who has most of so many samples, most neighbours, and the last part of features, as large as any."""
    in_space, cuts = 1 + len(shape.space), geometry.even_cuts(num_samples, shape.batch)
    way = max(range(shape.batch), key=lambda i: (cuts[i + 1] - cuts[i], -abs(i - shape.batch // 2)))
    return shape.number([way, *(n // 2 for n in shape[1:in_space]), *(n - 1 for n in shape[in_space:])])
