"""When a wide halo pays: what its messages save, against the rows that neighbours compute too. Numbers, no ranks.

    layer by layer     conv <> conv <> | conv <> conv <>     every <> is an exchange, which takes a latency
    a block            <> conv conv    | <> conv conv        more rows are computed twice, in half the exchanges
    a run of blocks    <<>> conv conv  |    conv conv        and still more

Blocks come one by one, and each is computed by layer, with an exchange of its own, or in the run that began before it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from mpi4dl.comm import Communicator

# The link between ranks as a straight line: a message takes a latency, and so many seconds for each of its bytes.

SMALL_BYTES, LARGE_BYTES = 64, 1 << 21
LINK_REPEATS = {SMALL_BYTES: 40, LARGE_BYTES: 5}
LINK_TAG = 3


class Link(NamedTuple):
    """`latency_seconds` of a message without bytes, and the seconds that each byte adds."""

    latency_seconds: float
    byte_seconds: float

    def seconds(self, messages: float, num_bytes: float) -> float:
        return messages * self.latency_seconds + num_bytes * self.byte_seconds

    def __str__(self) -> str:
        return f"{self.latency_seconds * 1e6:.0f} us and {self.byte_seconds * 2**20 * 1e3:.2g} ms/MiB a message"


ASSUMED = Link(20e-6, 1 / 4e9)  # between processes of one machine, which share memory


def measure_link(comm: "Communicator", device: torch.device, clock: Callable[[], float] = time.perf_counter) -> Link:
    """The link between the first and the last rank, the fastest of a few messages. Collective; alike on all ranks."""
    if comm.size == 1:
        return ASSUMED
    small, large = (_one_way(comm, num_bytes, device, clock) for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    found = None
    if comm.rank == 0:
        found = Link(max(small, 1e-7), max((large - small) / (LARGE_BYTES - SMALL_BYTES), 1e-13))
    link: Link = comm.broadcast_object(found)
    return link


def _one_way(comm: "Communicator", num_bytes: int, device: torch.device, clock: Callable[[], float]) -> float:
    there, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), []
    for _ in range(LINK_REPEATS[num_bytes]):
        start = clock()
        if comm.rank == 0:
            comm.send(there, comm.size - 1, LINK_TAG)
            comm.recv(there, comm.size - 1, LINK_TAG)
        elif comm.rank == comm.size - 1:
            comm.recv(there, 0, LINK_TAG)
            comm.send(there, 0, LINK_TAG)
        seconds.append((clock() - start) / 2)
    return min(seconds)


PASSES = 2  # what is sent forward comes back in backward
DOUBT = 0.05  # what a wide halo takes may be so much more than what was counted


@dataclass(frozen=True)
class RankWork:
    """What a rank does in a forward pass: exchanges, whose messages travel at once, and what it computes.

    `touched_bytes` are those that operators read and write whose FLOPs do not count; `operators` are all.
    """

    exchanges: int = 0
    wire_bytes: int = 0
    flops: float = 0.0
    touched_bytes: int = 0
    operators: int = 0

    def __add__(self, other: "RankWork") -> "RankWork":
        return RankWork(
            self.exchanges + other.exchanges,
            self.wire_bytes + other.wire_bytes,
            self.flops + other.flops,
            self.touched_bytes + other.touched_bytes,
            self.operators + other.operators,
        )


@dataclass(frozen=True)
class Speeds:
    """What ranks and the link between them take: an exchange its latency, and every byte that is sent.

    Forward and backward together: the seconds of each FLOP, of each byte touched, and of each operator.
    """

    link: Link
    flop_seconds: float
    byte_seconds: float
    operator_seconds: float = 0.0

    def seconds(self, work: RankWork) -> float:
        """Of a forward and a backward pass."""
        sent = PASSES * self.link.seconds(work.exchanges, work.wire_bytes)
        done = work.flops * self.flop_seconds + work.touched_bytes * self.byte_seconds
        return sent + done + work.operators * self.operator_seconds


@dataclass(frozen=True)
class Widened:
    """A wide exchange at the entry: the pixels that are fetched on each side, and the work then."""

    margin: int
    work: RankWork


@dataclass(frozen=True)
class Step:
    """One more block of a row: its work by layer, with a wide exchange of its own, and that of the run that it ends.

    A `refusal` says why there is no wide exchange at the block's own entry.
    """

    by_layer: RankWork
    alone: Widened | None
    run: Widened | None
    refusal: str = ""


@dataclass(frozen=True)
class HaloChoice:
    """Where so many blocks, from one on, fetch what they need: by layer (a margin of 0), or at the entry of the first.

    `saved_seconds` is by how much that is faster, forward and backward, than the other way; None if nobody asked.
    """

    num_blocks: int
    margin: int
    by_layer: RankWork
    chosen: RankWork
    reason: str
    saved_seconds: float | None = None

    @property
    def exchanges_saved(self) -> int:
        return self.by_layer.exchanges - self.chosen.exchanges

    @property
    def computed_twice(self) -> float:
        """What is computed more than by layer, of what is computed by layer: of FLOPs, or of bytes without any."""
        if self.by_layer.flops:
            return self.chosen.flops / self.by_layer.flops - 1
        return (self.chosen.touched_bytes - self.by_layer.touched_bytes) / max(1, self.by_layer.touched_bytes)


def each_layer(reason: str, work: RankWork | None = None) -> HaloChoice:
    """The choice to let each layer fetch its own."""
    work = work or RankWork()
    return HaloChoice(1, 0, work, work, reason)


def choose(steps: Iterable[Step], speeds: Speeds | None) -> HaloChoice:
    """How the first of these blocks fetches what it needs, and how many of those behind it take part in that.

    A run grows as long as that is faster than what begins anew with the next block. Without `speeds`, a block that can
    fetches what it needs at its entry, by itself.
    """
    best: HaloChoice | None = None
    seconds = 0.0  # of the best way through the blocks so far
    for number, step in enumerate(steps, 1):
        if speeds is None:
            return _of_block(step)
        anew = speeds.seconds(step.by_layer)
        if step.alone is not None and _pays(step.alone, anew, speeds):
            anew = speeds.seconds(step.alone.work)
        if best is None:
            best, seconds = _of_one(step, speeds), anew
            continue
        if step.run is None or not _pays(step.run, seconds + anew, speeds):
            break
        seconds, layers = speeds.seconds(step.run.work), best.by_layer + step.by_layer
        saved, reason = speeds.seconds(layers) - seconds, f"one exchange for {number} blocks takes less"
        best = HaloChoice(number, step.run.margin, layers, step.run.work, reason, saved)
    assert best is not None
    return best


def _of_block(step: Step) -> HaloChoice:
    if step.alone is None:
        return each_layer(step.refusal, step.by_layer)
    return HaloChoice(1, step.alone.margin, step.by_layer, step.alone.work, "as was asked for")


def _of_one(step: Step, speeds: Speeds) -> HaloChoice:
    if step.alone is None:
        return each_layer(step.refusal, step.by_layer)
    seconds = speeds.seconds(step.by_layer)
    saved = seconds - speeds.seconds(step.alone.work)
    if _pays(step.alone, seconds, speeds):
        return HaloChoice(1, step.alone.margin, step.by_layer, step.alone.work, "one exchange takes less", saved)
    reason = "by layer takes less" if saved <= 0 else f"one exchange saves less than {DOUBT:.0%}"
    return HaloChoice(1, 0, step.by_layer, step.by_layer, reason, max(0.0, -saved))


def _pays(wide: Widened, seconds: float, speeds: Speeds) -> bool:
    """Whether a wide exchange is faster than what takes so many seconds, beyond doubt."""
    return speeds.seconds(wide.work) * (1 + DOUBT) < seconds
