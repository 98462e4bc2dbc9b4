"""Algorithms that sum a gradient over the ranks.

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

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.transport import LOW_PRECISION, parts_by_rank, put, share_parts, swap_parts
from mpi4dl.geometry import even_cuts

ALGORITHMS = ("library", "direct", "ring", "two-level")
CHOICES = ("auto", *ALGORITHMS)
DIRECT_UP_TO = (2, 8)  # ranks; for 16-bit values, which libraries sum in float32
NUM_TAGS = 1 << 14  # more than will ever be under way at once


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
    put(add_up(), parts[comm.rank])
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
    put(total, flat)


def two_level(levels: Levels, flat: Tensor, tag: int) -> Iterator[Pending]:
    within, length = levels.within, flat.numel()
    idle = within.size - levels.leaders
    parts = parts_by_rank(flat, within.size, (*even_cuts(length, levels.leaders), *[length] * idle))
    swapping, add_up = swap_parts(within, parts, tag)
    yield swapping
    if levels.between is not None:
        total = add_up()
        yield from direct(levels.between, total, tag)
        put(total, parts[within.rank])
    yield share_parts(within, parts, tag)


class Choice(NamedTuple):
    """Which algorithm sums, and which one bfloat16 and float16, of which the library is handed float32; and why."""

    name: str
    low_precision: str
    why: str

    @classmethod
    def of(cls, name: str, why: str) -> "Choice":
        return cls(name, name, why)

    def algorithm(self, dtype: torch.dtype) -> str:
        return self.low_precision if dtype in LOW_PRECISION else self.name

    def __str__(self) -> str:
        other = "" if self.low_precision == self.name else f"; in 16 bits {self.low_precision}"
        return f"{self.name}{other} ({self.why})"


class AllReduce:
    """Sums tensors over the ranks of a communicator, each by the algorithm that `choice` has for its type.

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
        pending = self.start(self.choice.algorithm(flat.dtype), flat)
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
    """The algorithm that was asked for; "auto" is one by the number of ranks, the same in every run. Collective.

    With "auto", what is on GPUs that NCCL joins goes by NCCL's own all-reduce. The nodes are the machines, unless each
    rank says by `node` on which one it is.

    Raises:
        ValueError: there is no such algorithm.
    """
    if asked not in CHOICES:
        raise ValueError(f"all-reduce is {asked!r}, but must be one of {', '.join(CHOICES)}")
    if asked != "auto":
        return AllReduce(comm, Choice.of(asked, "as asked"), node)
    names = ["direct" if comm.size <= most else "library" for most in DIRECT_UP_TO]
    choice = Choice(names[0], names[1], "the same in every run")
    return AllReduce(comm, choice, node, by_nccl=torch.device(device).type == "cuda")
