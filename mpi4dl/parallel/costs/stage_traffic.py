"""How long the rounds take that a dry run recorded on one rank of a stage, for all ranks of the stage on a machine.

    recorded     each exchange by how far its receivers are along the axes of the grid: (0, 0, 1) 4 KiB, (0, 1, 0) ...
    priced       between all pairs of ranks that are so far apart, at the same time, on the links that join them

All ranks of a stage take part in a round, and come to the next when the slowest has done. Replicas with batches of
their own have rounds of their own, at the same time and through the same ports.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpi4dl.comm.blocks import MOST_GATHERED, BlockPlan
from mpi4dl.comm.traffic import Round, Traffic
from mpi4dl.parallel.costs.machine import CollectiveCost, ExchangeCost, Machine, Ranks
from mpi4dl.parallel.plan import Plan

MERGED = 2  # times as many bytes has what was merged of float32, in float64


class WaitSeconds(NamedTuple):
    """Seconds of messages by purpose: halos, statistics of norms and the like, sums over features, experts."""

    halos: float = 0.0
    statistics: float = 0.0
    features: float = 0.0
    experts: float = 0.0

    def __add__(self, other: object) -> "WaitSeconds":
        assert isinstance(other, WaitSeconds)
        return WaitSeconds(*(a + b for a, b in zip(self, other, strict=True)))


NO_WAITS = WaitSeconds()


class StageTraffic:
    """The ranks of a stage of a plan on a machine, and what their rounds take."""

    def __init__(self, machine: Machine, plan: Plan, stage: int) -> None:
        self.machine, self.shape = machine, plan.shape(stage)
        self.arrangement = plan.arrangement(stage)
        own = plan.partners(plan.ranks(0, stage)[0], 0, stage)
        self.ranks: Ranks = machine.slots(own, plan.num_ranks)
        self.features = len(self.shape) - 1 if plan.tensor > 1 else None
        self.replicas: Ranks = np.arange(plan.data if plan.local_batches else 1) * plan.ranks_per_replica
        # Many plans have a stage on the same ranks.
        self._known: dict[Any, Any] = machine.known_costs.setdefault(
            (self.ranks.tobytes(), self.replicas.tobytes(), tuple(self.shape), self.arrangement), {}
        )

    def waits(self, traffic: Traffic) -> WaitSeconds:
        """The seconds of these rounds, by purpose."""
        return self.waits_of((traffic,))[0]

    def waits_of(self, ways: Sequence[Traffic]) -> list[WaitSeconds]:
        """The seconds of the rounds of each of these, by purpose; exchanges of the same ranks are priced together."""
        found = [[0.0] * len(WaitSeconds._fields) for _ in ways]
        exchanges: dict[Any, list[tuple[int, Round]]] = {}
        for i, traffic in enumerate(ways):
            for each in traffic:
                if each.kind == "exchange":
                    exchanges.setdefault((each.axes, tuple(at for at, _ in each.parts)), []).append((i, each))
                else:
                    found[i][self._purpose(each)] += self._of_collective(each)
        for (axes, offsets), rounds in exchanges.items():
            sizes = np.array([[size for _, size in each.parts] for _, each in rounds], dtype=np.float64)
            times = np.array([each.times for _, each in rounds])
            cost = self._exchange(axes, offsets)
            for (i, each), seconds in zip(rounds, cost.each_seconds(sizes, times).tolist(), strict=True):
                found[i][self._purpose(each)] += seconds
        return [WaitSeconds(*seconds) for seconds in found]

    def _purpose(self, found: Round) -> int:
        """The number of its field of WaitSeconds."""
        if found.axes is None:
            return WaitSeconds._fields.index("experts")
        if self.features is not None and [axis for axis in found.axes if self.shape[axis] > 1] == [self.features]:
            return WaitSeconds._fields.index("features")
        return WaitSeconds._fields.index("halos" if found.kind == "exchange" else "statistics")

    def _of_collective(self, found: Round) -> float:
        each = found.parts[0][1] / found.times
        key = found.kind, found.axes, each
        if key not in self._known:
            if found.kind == "reduce":
                self._known[key] = self.collective(found.axes).all_reduce_seconds(each)
            else:
                self._known[key] = self._gather_seconds(found.axes, each)
        return found.times * self._known[key]

    def _gather_seconds(self, axes: tuple[int, ...] | None, num_bytes: float) -> float:
        """How long it takes until each rank has what it merges of so many bytes of each; many do so in blocks."""
        everyone = self.collective(axes)
        if everyone.size <= MOST_GATHERED:
            return everyone.all_gather_seconds(num_bytes)
        plan = BlockPlan.of(everyone.size)
        within, across = self.collective(axes, (plan.most, 1)), self.collective(axes, (plan.num_blocks, plan.fewest))
        return within.all_gather_seconds(num_bytes) + across.all_gather_seconds(MERGED * num_bytes)

    def handing_seconds(self, following: "StageTraffic", num_bytes: float) -> float:
        """How long it takes to hand so many bytes of each rank on to the next stage, or its gradients back.

        Whoever has fewer ranks than the other sends, or receives, those of several.
        """
        here, there = len(self.ranks), len(following.ranks)
        most = np.arange(max(here, there))
        senders = self._of_all(self.ranks[most * here // len(most)])
        receivers = following._of_all(following.ranks[most * there // len(most)])
        return ExchangeCost(self.machine, [(senders, receivers)]).seconds([num_bytes * here / len(most)])

    def collective(self, axes: tuple[int, ...] | None, some: tuple[int, int] | None = None) -> CollectiveCost:
        """That of all ranks that differ along these axes, or of `some` of them: how many, and how far apart."""
        key = "ranks", axes, some
        if key not in self._known:
            groups = self._groups(axes)
            if some is not None:
                members, apart = some
                used = groups.shape[1] // (members * apart) * members * apart
                groups = groups[:, :used].reshape(-1, members, apart).swapaxes(1, 2).reshape(-1, members)
            self._known[key] = CollectiveCost(self.machine, self._of_all(self.ranks[groups]))
        return self._known[key]

    def _exchange(self, axes: tuple[int, ...] | None, offsets: Sequence[tuple[int, ...]]) -> ExchangeCost:
        key = "pairs", axes, offsets
        if key not in self._known:
            groups = self._groups(axes)
            shape = (groups.shape[1],) if axes is None else tuple(self.shape[axis] for axis in axes)
            pairs = []
            for offset in offsets:
                here, there = around(*shape, *offset) if axes is None else neighbours(shape, offset)
                senders, receivers = (self._of_all(self.ranks[groups[:, place]].ravel()) for place in (here, there))
                pairs.append((senders, receivers))
            self._known[key] = ExchangeCost(self.machine, pairs)
        return self._known[key]

    def _of_all(self, ranks: Ranks) -> Ranks:
        """The ranks of a replica, and those at the same places of all others that have rounds of their own."""
        return (ranks + self.replicas.reshape(-1, *[1] * ranks.ndim)).reshape(-1, *ranks.shape[1:])

    def _groups(self, axes: tuple[int, ...] | None) -> Ranks:
        """The places of the grid in groups that differ along these axes alone: (groups, members)."""
        places, used = np.arange(self.shape.size).reshape(self.shape), axes
        if axes is None:  # those that share experts: neighbours among replicas, each with as many ways
            ways, experts = self.arrangement.ways, self.arrangement.experts
            places, used = places.reshape(-1, experts, ways, *self.shape[1:]), (1,)
        assert used is not None
        others = [axis for axis in range(places.ndim) if axis not in used]
        return places.transpose(*others, *used).reshape(-1, math.prod(places.shape[axis] for axis in used))


def around(number: int, offset: int) -> tuple[Ranks, Ranks]:
    """Each of so many, and who is so far behind, around a ring: of exchanges in which each has something for all."""
    here = np.arange(number)
    return here, (here + offset) % number


def neighbours(shape: Sequence[int], offset: Sequence[int]) -> tuple[Ranks, Ranks]:
    """All pairs of places of a grid, by their numbers, of which the second is so far from the first along each axis."""
    places = np.arange(math.prod(shape)).reshape(shape)
    here = tuple(slice(max(0, -step), min(n, n - step)) for n, step in zip(shape, offset, strict=True))
    there = tuple(slice(max(0, step), min(n, n + step)) for n, step in zip(shape, offset, strict=True))
    return places[here].ravel(), places[there].ravel()
