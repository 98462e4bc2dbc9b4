"""A machine as data: nodes, ranks and memory, links by level, and how long messages and collectives take on it.

    [[links]]  socket      ranks 0 1 | 2 3 | 4 5 | 6 7        joins neighbours, so many in a row
    [[links]]  node        ranks 0 1 2 3 | 4 5 6 7
    [[links]]  network     ranks 0 1 2 3 4 5 6 7               two ranks use the first link that joins both

A link has ports, each shared by some neighbouring ranks: what these send through it at the same time adds up.

    seconds of messages that travel together = the longest, over links, of latency + bytes of the fullest port / rate

Latency and rate as in the model of Hockney (1994); collectives by the formulas of Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH" (2005), level by level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpi4dl._wording import counted

Ranks = np.ndarray[Any, np.dtype[np.int64]]
LOOKED_AT = 64  # groups of ranks, of which there may be many that are alike
EXACT = 2.0**53  # up to where sums of whole numbers are exact
ALGORITHMS = ("library", "direct", "ring", "two-level")  # those of comm.allreduce
DISTRIBUTIONS = ("block", "cyclic")


@dataclass(frozen=True)
class LinkLevel:
    """A kind of link: it joins `ranks` neighbours (0: all), of which `shared_by` share a port of `bytes_per_second`."""

    name: str
    latency_seconds: float
    bytes_per_second: float
    ranks: int = 0
    shared_by: int = 1


@dataclass(frozen=True)
class Machine:
    """A machine: `nodes` with `ranks_per_node` ranks, each with `memory` bytes on a `device`.

    `links` are from the nearest to the farthest. `flops_per_second` is what a rank reaches in convolutions and matrix
    products, `bytes_per_second` what it reads and writes elsewhere, as in the optimizer; without the first, units are
    timed. `operator_seconds` is the time in which an operator starts there, `message_seconds` that in which a rank
    hands over one message. `collectives` says by algorithm how many times as long an all-reduce takes as by the
    formula. `distribution` is how a job's ranks come to its nodes, as Slurm calls it: "block", neighbours on one node,
    or "cyclic", each on the next node. `source` says where all this comes from.
    """

    name: str
    nodes: int
    ranks_per_node: int
    links: tuple[LinkLevel, ...]
    memory: int | None = None
    device: str = "CPU"
    flops_per_second: float | None = None
    bytes_per_second: float = 8e9
    operator_seconds: float = 0.0
    message_seconds: float = 5e-6
    collectives: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    distribution: str = "block"

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"machine {self.name}: {problem}")

    def _problem(self) -> str | None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            return f"it has {counted(self.nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}, not at least 1"
        if not self.links:
            return "it has no [[links]], of which it needs at least one"
        sizes = [link.ranks or self.num_ranks for link in self.links]
        for link, size, larger in zip(self.links, sizes, [*sizes[1:], self.num_ranks], strict=True):
            if larger % size or link.shared_by < 1 or (link is self.links[-1] and size != self.num_ranks):
                return (
                    f"link {link.name} joins {size} ranks, shared by {link.shared_by}: each link joins a whole number "
                    "of groups of the one before, and the last one all ranks"
                )
            if not link.bytes_per_second > 0 or not link.latency_seconds >= 0:
                return f"link {link.name} must have a rate above 0 and no negative latency"
        for link, size, inside in zip(self.links, sizes, [1, *sizes], strict=False):
            groups = sorted((inside, link.shared_by))
            if link.shared_by > size or groups[1] % groups[0]:
                return (
                    f"link {link.name} joins {size} ranks with shared_by = {link.shared_by}: no more ranks than those "
                    f"share a port, and a whole part, or a multiple, of the {inside} that the link before joins"
                )
        if self.distribution not in DISTRIBUTIONS:
            return f"`distribution` is one of {', '.join(DISTRIBUTIONS)}, not {self.distribution}"
        unknown = sorted({*self.collectives} - {*ALGORITHMS})
        if unknown:
            return f"[collectives] knows {', '.join(ALGORITHMS)}, not {', '.join(unknown)}"
        if any(not factor > 0 for factor in self.collectives.values()):
            return "[collectives] are factors above 0"
        return None

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def has_gpus(self) -> bool:
        return not self.device.upper().startswith("CPU")

    def num_nodes(self, num_ranks: int) -> int:
        """How many nodes so many ranks take, the last of which may be idle in part."""
        return math.ceil(num_ranks / self.ranks_per_node)

    def slots(self, ranks: Any, num_ranks: int) -> Ranks:
        """Where these ranks of a job of so many are: neighbours of the machine have neighbouring slots."""
        found, nodes = np.asarray(ranks), self.num_nodes(num_ranks)
        if self.distribution == "block":
            return found
        return found % nodes * self.ranks_per_node + found // nodes

    @classmethod
    def of_link(cls, latency_seconds: float, bytes_per_second: float, num_ranks: int, **others: Any) -> "Machine":
        """One node, between whose ranks all links are alike."""
        return cls("this machine", 1, num_ranks, (LinkLevel("memory", latency_seconds, bytes_per_second),), **others)

    @cached_property
    def known_costs(self) -> dict[Any, dict[Any, Any]]:
        """What was found before for the same ranks: costs of exchanges and collectives, and seconds of the latter."""
        return {}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many neighbours each link joins."""
        return tuple(link.ranks or self.num_ranks for link in self.links)

    def levels(self, some: Ranks, others: Ranks) -> Ranks:
        """The number of the link between each two of these ranks."""
        found = np.full(some.shape, len(self.links) - 1)
        for level in range(len(self.links) - 2, -1, -1):
            found[some // self.sizes[level] == others // self.sizes[level]] = level
        return found

    def describe(self) -> str:
        """One line: the machine and its links."""
        links = "; ".join(
            f"{link.name} {1e6 * link.latency_seconds:.3g} us, {link.bytes_per_second / 1e9:.3g} GB/s"
            + (f" for {link.shared_by} ranks" if link.shared_by > 1 else "")
            for link in self.links
        )
        ranks = f"{counted(self.nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}"
        return f"{self.name}: {ranks}, {self.device}; {links}"


class ExchangeCost:
    """The time of messages that travel together: of `pairs[i]`, senders and receivers, each sends what `sizes[i]` says.

    Ranks that are the same twice send nothing.
    """

    def __init__(self, machine: Machine, pairs: Sequence[tuple[Ranks, Ranks]]) -> None:
        self.machine = machine
        found: dict[int, list[Any]] = {}
        for i, (senders, receivers) in enumerate(pairs):
            apart = senders != receivers
            ends = senders[apart], receivers[apart]
            level_of = machine.levels(*ends)
            for level in map(int, np.unique(level_of)):
                found.setdefault(level, []).append((i, [ranks[level_of == level] for ranks in ends]))
        # How many messages of each size go through each port, out of it and into it: ports that are alike but once.
        self._loads = {level: self._ports(machine.links[level], len(pairs), of) for level, of in found.items()}
        sent = [senders[senders != receivers] for senders, receivers in pairs]
        self._most = int(np.bincount(np.concatenate(sent)).max(initial=0)) if sent else 0  # that one rank sends

    @staticmethod
    def _ports(link: LinkLevel, num_sizes: int, messages: Sequence[Any]) -> np.ndarray[Any, Any]:
        last = max(int(ranks.max()) for _, ends in messages for ranks in ends) // link.shared_by
        loads = np.zeros((2, last + 1, num_sizes))
        for i, ends in messages:
            for way, ranks in enumerate(ends):
                loads[way, :, i] = np.bincount(ranks // link.shared_by, minlength=last + 1)
        rows, base = loads.reshape(-1, num_sizes), 1 + loads.max()
        if base**num_sizes > EXACT:  # different ports could get the same number
            return rows
        _, first = np.unique(rows @ base ** np.arange(num_sizes), return_index=True)
        return rows[first]

    def seconds(self, sizes: Sequence[float], times: int = 1) -> float:
        """The seconds of so many exchanges, one after the other, whose bytes are `sizes` together."""
        return float(self.each_seconds(np.array([sizes], dtype=np.float64), np.array([times]))[0])

    def each_seconds(self, sizes: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Those of each row of `sizes`, of so many exchanges as `times` says."""
        longest = np.zeros(len(sizes))
        for level, loads in self._loads.items():
            link = self.machine.links[level]
            fullest = (sizes @ loads.T).max(axis=1) / link.bytes_per_second
            longest = np.maximum(longest, times * link.latency_seconds + fullest)
        return longest + times * self._most * self.machine.message_seconds


class CollectiveStep(NamedTuple):
    """A part of a collective on one kind of link, which joins `members` anew: its latency, and the time of a byte."""

    members: int
    latency: float
    byte_seconds: float

    @property
    def doublings(self) -> int:
        return math.ceil(math.log2(self.members))


class CollectiveCost:
    """The time of collectives of ranks in `groups` (groups, members), of which all are under way at the same time."""

    def __init__(self, machine: Machine, groups: Ranks) -> None:
        self.machine, self.size, self._groups = machine, groups.shape[1], groups
        self._steps: list[CollectiveStep] = []  # from the nearest link to the farthest
        self._links: list[LinkLevel] = []
        left = self.size
        for link, size in zip(machine.links, machine.sizes, strict=True):
            places = np.sort(groups[:: max(1, len(groups) // LOOKED_AT)] // size, axis=1)
            apart = 1 + int((np.diff(places, axis=1) != 0).sum(axis=1).max(initial=0))
            members, left = math.ceil(left / apart), apart
            if members > 1:  # of ranks that share a port all are taken to send
                sharing = 1 if link.shared_by == 1 else int(np.bincount(groups.ravel() // link.shared_by).max())
                self._steps.append(CollectiveStep(members, link.latency_seconds, sharing / link.bytes_per_second))
                self._links.append(link)

    def all_reduce_seconds(self, num_bytes: float, algorithm: str = "library") -> float:
        """How long it takes to sum a buffer of so many bytes, by an algorithm of `comm.allreduce`.

        The library is taken to choose the faster of recursive doubling and two halves, each level by level.
        """
        if self.size == 1:
            return 0.0
        if algorithm == "ring":
            found = self._ring_seconds(num_bytes / self.size)
        elif algorithm == "direct":
            found = 2 * self.reduce_scatter_seconds(num_bytes)
        elif algorithm == "two-level":
            found = self._two_level_seconds(num_bytes)
        else:
            doubling = sum(step.doublings * (step.latency + num_bytes * step.byte_seconds) for step in self._steps)
            found = min(2 * self._half(num_bytes), doubling) + self.machine.message_seconds
        return found * self.machine.collectives.get(algorithm, 1.0)

    def _ring_seconds(self, part_bytes: float) -> float:
        """2 (size - 1) steps, in each of which a rank hands on a part when it has come, and its port is free.

        So a slow link is waited for as often as parts cross it, not in each step.
        """
        here, following = self._groups, np.roll(self._groups, -1, axis=1)
        level = self.machine.levels(here, following)
        latency = np.asarray([link.latency_seconds for link in self.machine.links])[level]
        transfer = part_bytes / np.asarray([link.bytes_per_second for link in self.machine.links])[level]
        for number, link in enumerate(self.machine.links):  # of ranks that share a port, those on the same link
            ports = np.where(level == number, here // link.shared_by, -1)
            used = np.bincount(ports[ports >= 0].ravel()) if (ports >= 0).any() else np.zeros(1)
            transfer *= np.where(ports >= 0, used[ports], 1)
        ready, port_free = np.zeros(here.shape), np.zeros(here.shape)
        for _ in range(2 * (self.size - 1)):
            port_free = np.maximum(ready, port_free) + transfer
            arrived = np.roll(port_free + latency, 1, axis=1)
            ready = np.maximum(ready, arrived) + self.machine.message_seconds
        return float(ready.max())

    def _two_level_seconds(self, num_bytes: float) -> float:
        """A reduce-scatter within each node, `direct` between ranks that own the same part, an all-gather within."""
        inside: list[CollectiveStep] = []
        outside: list[CollectiveStep] = []
        for step, link in zip(self._steps, self._links, strict=True):
            (inside if link.ranks and link.ranks <= self.machine.ranks_per_node else outside).append(step)
        return 2 * (self._scatter(inside, num_bytes) + self._scatter(outside, num_bytes / self._members(inside)))

    @staticmethod
    def _members(steps: Sequence[CollectiveStep]) -> int:
        return math.prod(step.members for step in steps)

    def _half(self, num_bytes: float) -> float:
        """A reduce-scatter or an all-gather, level by level: farther links carry what is left of each rank's part."""
        found, part = 0.0, num_bytes
        for step in self._steps:
            found += step.doublings * step.latency + (step.members - 1) / step.members * part * step.byte_seconds
            part /= step.members
        return found

    def reduce_scatter_seconds(self, num_bytes: float) -> float:
        """How long it takes until each rank has its part of a sum: parts go straight to their owners, all at once.

        To gather the parts of all ranks takes the same messages, the other way round.
        """
        return self._scatter(self._steps, num_bytes)

    def _scatter(self, steps: Sequence[CollectiveStep], num_bytes: float) -> float:
        size = self._members(steps)
        longest, inside, part = 0.0, 1, num_bytes / size
        for step in steps:
            longest = max(longest, step.latency + (step.members - 1) * inside * part * step.byte_seconds)
            inside *= step.members
        return longest + (size - 1) * self.machine.message_seconds

    def all_gather_seconds(self, num_bytes: float) -> float:
        """How long it takes until every rank has the so many bytes of each other one."""
        found, there = self.machine.message_seconds if self.size > 1 else 0.0, 1
        for step in self._steps:
            found += step.doublings * step.latency + (step.members - 1) * there * num_bytes * step.byte_seconds
            there *= step.members
        return found
