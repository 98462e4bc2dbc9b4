"""Algorithms that sum a gradient over the ranks, and the choice between them by a short measurement.

    library     whatever the MPI library does
    direct      a reduce-scatter and an all-gather, each of one step: every part goes straight to its owner and back
    ring        the same in 2 (size - 1) steps, each of which moves one part to the next rank (Patarasuk and Yuan,
                "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009)
    two-level   a reduce-scatter within each node, `direct` between the ranks that own the same part on all nodes, an
                all-gather within each node: of a buffer, each node sends 2 (nodes - 1) / nodes to other nodes, by all
                of its ranks at once (Bayatpour et al., "Scalable reduction collectives with data partitioning-based
                multi-leader design", 2017)

The sum of an element is computed on one rank and sent to all others, so its bits are the same on all. Values in
bfloat16 and float16 are summed in float32 and rounded once.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.transport import LOW_PRECISION, parts_by_rank, share_parts, swap_parts
from mpi4dl.geometry import even_cuts

ALGORITHMS = ("library", "direct", "ring", "two-level")
CHOICES = ("auto", *ALGORITHMS, "measured")
DIRECT_UP_TO = (2, 8)  # ranks, where nothing is measured; for 16-bit values, which libraries sum in float32
NUM_TAGS = 1 << 14  # more than will ever be under way at once
MEASURED = ((1 << 14, 4), (1 << 18, 2), (1 << 22, 1))  # bytes, and sums in a row
MEASURE_SECONDS = 0.25
DIRECT_BYTES = 1 << 16
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
WORTH_A_CHANGE = 0.9  # of the time of those that come before it


Steps = tuple[tuple[int, str], ...]


class Levels(NamedTuple):
    """The ranks of this rank's node, and those of its number on all nodes; None if some node has no such rank.

    `several`: there is more than one node, and more than one rank on some node.
    """

    within: Communicator
    between: Communicator | None
    leaders: int
    several: bool

    @classmethod
    def of(cls, comm: Communicator, node: int | None = None) -> "Levels":
        """The levels of `comm`. Its nodes are the machines, unless each rank says on which one it is. Collective."""
        within = comm.split_by_node() if node is None else comm.split(node)
        sizes = comm.all_gather_object(within.size)
        leaders = min(sizes)
        between = comm.split(min(within.rank, leaders))
        return cls(within, between if within.rank < leaders else None, leaders, 1 < max(sizes) < comm.size)


def direct(comm: Communicator, flat: Tensor, tag: int) -> Iterator[Pending]:
    parts = parts_by_rank(flat, comm.size)
    swapping, add_up = swap_parts(comm, parts, tag)
    yield swapping
    _keep(add_up(), parts[comm.rank])
    yield share_parts(comm, parts, tag)


def ring(comm: Communicator, flat: Tensor, tag: int) -> Iterator[Pending]:
    total = flat.float() if flat.dtype in LOW_PRECISION else flat
    parts = parts_by_rank(total, comm.size)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        own = parts[(before - step) % comm.size]
        arrived = torch.empty_like(own)
        leaving = parts[(comm.rank - step) % comm.size]
        yield comm.iexchange([Piece(following, leaving)], [Piece(before, arrived)], tag)
        own += arrived
    for step in range(comm.size - 1):
        leaving, arriving = parts[(following - step) % comm.size], parts[(comm.rank - step) % comm.size]
        yield comm.iexchange([Piece(following, leaving)], [Piece(before, arriving)], tag)
    _keep(total, flat)


def two_level(levels: Levels, flat: Tensor, tag: int) -> Iterator[Pending]:
    within, length = levels.within, flat.numel()
    idle = within.size - levels.leaders
    parts = parts_by_rank(flat, within.size, (*even_cuts(length, levels.leaders), *[length] * idle))
    swapping, add_up = swap_parts(within, parts, tag)
    yield swapping
    if levels.between is not None:
        total = add_up()
        yield from direct(levels.between, total, tag)
        _keep(total, parts[within.rank])
    yield share_parts(within, parts, tag)


def _keep(total: Tensor, into: Tensor) -> None:
    if total is not into:
        into.copy_(total)


@dataclass(frozen=True)
class Choice:
    """Which algorithm from how many bytes on, in rising order from 0, and why.

    bfloat16 and float16 go by a table of their own: the library is handed float32, the others send what they get.
    """

    steps: Steps
    low_precision: Steps
    why: str

    @classmethod
    def of(cls, name: str, why: str) -> "Choice":
        return cls(((0, name),), ((0, name),), why)

    def algorithm(self, num_bytes: int, dtype: torch.dtype) -> str:
        steps = self.low_precision if dtype in LOW_PRECISION else self.steps
        return next(name for start, name in reversed(steps) if num_bytes >= start)

    def __str__(self) -> str:
        text = _text(self.steps)
        if self.low_precision != self.steps:
            text += f"; in 16 bits {_text(self.low_precision)}"
        return f"{text} ({self.why})"


def _text(steps: Steps) -> str:
    return ", ".join(f"{name} from {start >> 10} KB" if start else name for start, name in steps)


class AllReduce:
    """Sums tensors over the ranks of a communicator, each by the algorithm that `choice` has for its size.

    Any number of sums may be under way at once. All ranks start them in the same order, and wait in any order.
    Collective; what it sends meets nothing else that is sent in `comm`. Floats on GPUs are summed `by_nccl`, whatever
    the choice, where the ranks of `comm` are joined by it.
    """

    def __init__(self, comm: Communicator, choice: Choice, node: int | None = None, by_nccl: bool = False) -> None:
        self.comm = comm.split(0, comm.rank)
        joined = self.comm.nccl if by_nccl and comm.size > 1 else None
        self._on_gpus = None if joined is None else joined.sums(self.comm)
        self.levels = Levels.of(self.comm, node)
        self.choice = choice
        self._started = 0

    def describe(self) -> str:
        choice = self.choice if self._on_gpus is None else f"NCCL, and what is not on GPUs by {self.choice}"
        return f"all-reduce over {self.comm.size} ranks: {choice}"

    def __call__(self, tensor: Tensor) -> Pending:
        """Start to sum `tensor` over all ranks, in place."""
        target = tensor.detach()
        if target.is_meta or target.numel() == 0 or self.comm.size == 1:
            return Pending(self.comm.node)
        if self._on_gpus is not None and target.is_cuda and target.is_floating_point():
            return self._on_gpus(target)
        if target.is_cuda and self.comm.gpu_wire != "direct":
            return self.comm.by_host(target, self)
        flat = target.contiguous().view(-1)
        pending = self.start(self.choice.algorithm(flat.nbytes, flat.dtype), flat)
        if flat.data_ptr() != target.data_ptr():
            pending.then(lambda: target.copy_(flat.view(target.shape)))
        return pending

    def start(self, name: str, flat: Tensor) -> Pending:
        """Start to sum a flat tensor in place by the algorithm of this name."""
        if name == "library":
            return self.comm.iall_reduce(flat)
        # Ranks may come to the second phase of one sum and the first of the next in any order: a tag tells them apart.
        self._started += 1
        tag = self._started % NUM_TAGS
        if name == "two-level":
            return Pending.of_phases(self.comm.node, two_level(self.levels, flat, tag))
        algorithm = {"direct": direct, "ring": ring}[name]
        return Pending.of_phases(self.comm.node, algorithm(self.comm, flat, tag))


def pick(
    comm: Communicator, asked: str = "auto", node: int | None = None, device: torch.device | str = "cpu"
) -> AllReduce:
    """The algorithm that was asked for, or, if that is "measured", those that are fastest on `device`. Collective.

    Measurements differ, and with them the order in which more than two ranks add up, and the last bits of a sum: "auto"
    is the same in every run. With it, what is on GPUs that NCCL joins goes by NCCL's own all-reduce. The nodes are the
    machines, unless each rank says by `node` on which one it is.

    Raises:
        ValueError: there is no such algorithm.
    """
    if asked not in CHOICES:
        raise ValueError(f"all-reduce is {asked!r}, but must be one of {', '.join(CHOICES)}")
    if asked == "auto":
        names = ["direct" if comm.size <= most else "library" for most in DIRECT_UP_TO]
        choice = Choice(((0, names[0]),), ((0, names[1]),), "the same in every run")
        return AllReduce(comm, choice, node, by_nccl=torch.device(device).type == "cuda")
    if asked != "measured":
        return AllReduce(comm, Choice.of(asked, "as asked"), node)
    all_reduce = AllReduce(comm, Choice.of("library", "one rank"), node)
    if comm.size > 1:
        steps = measure(all_reduce, torch.float32, device, MEASURE_SECONDS / 2)
        low_precision = measure(all_reduce, torch.bfloat16, device, MEASURE_SECONDS / 2)
        all_reduce.choice = Choice(steps, low_precision, "measured")
    return all_reduce


def candidates(size: int, several_nodes: bool, dtype: torch.dtype, num_bytes: int) -> tuple[str, ...]:
    """The algorithms that differ from each other on so many ranks, the one to expect most of first."""
    first = ("library", "direct")
    if dtype in LOW_PRECISION and num_bytes >= DIRECT_BYTES:
        first = ("direct", "library")  # which sends and adds twice the bytes, in float32
    return (*first, *(("ring",) if size > 2 else ()), *(("two-level",) if several_nodes else ()))


def measure(all_reduce: AllReduce, dtype: torch.dtype, device: torch.device | str, seconds: float) -> Steps:
    """Time the candidates in turn; a size for which `seconds` do not suffice gets the first. The same on all ranks."""
    comm, began = all_reduce.comm, time.perf_counter()
    winners: list[tuple[int, str]] = []
    spent = next_round = 0.0
    for number, (num_bytes, repeats) in enumerate(MEASURED, 1):
        names = candidates(comm.size, all_reduce.levels.several, dtype, num_bytes)
        flat = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        rounds: list[list[float]] = []
        while len(rounds) <= MOST_ROUNDS and spent + next_round < seconds * number / len(MEASURED):
            # The first round sets up connections; it does not count, and is short.
            times = [_seconds(all_reduce, name, flat, repeats if rounds else 1) for name in names]
            slowest = torch.tensor([*times, time.perf_counter() - began], dtype=torch.float64)
            *times, spent = comm.all_reduce(slowest, "max").tolist()
            next_round = sum(times)
            rounds.append(times)
        winners.append((num_bytes, names[fastest(rounds[1:]) if len(rounds) >= FEWEST_ROUNDS else 0]))
    return steps_between(winners)


def fastest(rounds: list[list[float]]) -> int:
    """The number of the fastest one by the medians over rounds; one that comes later has to be clearly faster."""
    ratios = [median(times[i] / times[0] for times in rounds) for i in range(len(rounds[0]))]
    best = 0
    for i, ratio in enumerate(ratios):
        if ratio < WORTH_A_CHANGE * ratios[best]:
            best = i
    return best


def steps_between(winners: list[tuple[int, str]]) -> Steps:
    """Who is used from how many bytes on, if these won at these sizes: a change is halfway on a logarithmic scale."""
    steps = [(0, winners[0][1])]
    for (smaller, _), (larger, name) in pairwise(winners):
        if name != steps[-1][1]:
            steps.append((isqrt(smaller * larger), name))
    return tuple(steps)


def _seconds(all_reduce: AllReduce, name: str, flat: Tensor, repeats: int) -> float:
    all_reduce.comm.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        all_reduce.start(name, flat).wait()
    if flat.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
