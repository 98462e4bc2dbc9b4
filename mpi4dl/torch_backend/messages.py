"""Messages from rank to rank: their length is checked, and what MPI has no room for travels in an envelope.

    plain        a tag up to some limit of MPI's: the message alone
    enveloped    any tag that torch.distributed takes: an envelope with the tag, and the number of the tag under which
                 the message itself comes. Under TORCH_DISTRIBUTED_DEBUG=DETAIL all messages have one, with the shape

The tag of a plain message has the kind of its numbers beside the user's tag, since MPI does not compare them. A receive
that waits looks now and then whether a message of another kind came in place of its own.

The highest tags of MPI are kept for both. Envelopes are read as they come, and lie here until somebody asks for them.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.packing import Piece
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls, Condition
from mpi4dl.comm.transport import LOW_PRECISION, SCATTER_TAG, put, swap_parts
from mpi4dl.torch_backend.departure import Mismatch, TimedOut, within

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.torch_backend.departure import Channel

KEPT_TAGS = 1 << 12
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
KIND = {dtype: number for number, dtype in enumerate(DTYPES)}
LOOK_SECONDS = 0.1  # between looks for messages of other kinds
MOST = 2**31 - 1
ENVELOPE_BYTES = 256


class Envelope(NamedTuple):
    """Sender, tag of the user, content, and tag of MPI of a message."""

    source: int
    tag: int
    content: str
    comes_under: int


class Post:
    """The messages of one group, which `channel` counts."""

    def __init__(self, wire: Communicator, channel: "Channel", in_full: bool) -> None:
        from mpi4py import MPI

        self.wire = wire
        self.channel = channel
        self._in_full = in_full
        self._envelopes_under = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self._numbered_from = self._envelopes_under - KEPT_TAGS
        self._plain_below = self._numbered_from // len(DTYPES)
        self._numbers = itertools.cycle(range(KEPT_TAGS))
        self._read: list[Envelope] = []
        self._reading = threading.Lock()

    def isend(self, tensor: Tensor, to: int, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel():
            self.channel.wrote(to)
        if tensor.numel() == 0 or not self._needs_envelope(tag):
            return self.wire.isend(tensor, to, plain_tag(tensor.dtype, tag))
        comes_under = self._numbered_from + next(self._numbers)
        page = f"{tag} {comes_under} {self._content(tensor)}".encode().ljust(ENVELOPE_BYTES)
        envelope = self.wire.mpi.Isend(page[:ENVELOPE_BYTES], to, self._envelopes_under)
        return Pending.all(
            self.wire.node,
            [Pending(self.wire.node, [Calls([envelope])], [page]), self.wire.isend(tensor, to, comes_under)],
        )

    def ireceive(self, tensor: Tensor, source: int | None, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel() == 0:
            return Pending(self.wire.node)
        return Letter(self, tensor, source, tag, self._content(tensor) if self._needs_envelope(tag) else None)

    def _needs_envelope(self, tag: int) -> bool:
        return self._in_full or tag >= self._plain_below

    def _content(self, tensor: Tensor) -> str:
        text = (
            f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            if self._in_full
            else f"{tensor.nbytes} bytes of {tensor.dtype}"
        )
        return text[: ENVELOPE_BYTES // 2]

    def envelope(self, source: int | None, tag: int) -> Envelope | None:
        """Take the first envelope from this rank, or from any, with this tag, if there is one."""
        from mpi4py import MPI

        with self._reading:
            status = MPI.Status()
            while self.wire.mpi.Iprobe(MPI.ANY_SOURCE, self._envelopes_under, status):
                page = bytearray(ENVELOPE_BYTES)
                self.wire.mpi.Recv(page, status.source, self._envelopes_under)
                its_tag, comes_under, content = page.decode().rstrip().split(" ", 2)
                self._read.append(Envelope(status.source, int(its_tag), content, int(comes_under)))
            for found in self._read:
                if found.tag == tag and source in (None, found.source):
                    self._read.remove(found)
                    return found
        return None

    def other_kind(self, source: int | None, tag: int, dtype: torch.dtype) -> torch.dtype | None:
        """The kind of numbers of a plain message that waits here with this tag, if it is another one."""
        from mpi4py import MPI

        sender = MPI.ANY_SOURCE if source is None else source
        others = (each for each in DTYPES if each is not dtype and self.wire.mpi.Iprobe(sender, plain_tag(each, tag)))
        return next(others, None)


def plain_tag(dtype: torch.dtype, tag: int) -> int:
    """The tag of MPI of a message without an envelope."""
    return tag * len(DTYPES) + KIND[dtype]


def check_tag(tag: int) -> None:
    if not 0 <= tag <= MOST:
        raise ValueError(f"tag is {tag}, but must be from 0 to {MOST}")


class Letter(Pending):
    """A message to this rank. `source` None: from any rank, known afterwards.

    With `content` it comes in an envelope, which says under which tag it comes, and that this is what it holds.
    """

    def __init__(self, post: Post, tensor: Tensor, source: int | None, tag: int, content: str | None) -> None:
        super().__init__(post.wire.node)
        self.source = source
        self._post, self._tensor, self._tag, self._content = post, tensor, tag, content
        self._requests = [Condition(self._comes)]
        self._look_at = time.monotonic() + LOOK_SECONDS
        if content is None:
            self._open(plain_tag(tensor.dtype, tag))

    def cancel(self) -> None:
        """Receive it no more, unless it has begun to arrive."""
        for part in self._parts:
            part.cancel()
        self._requests = []

    def _comes(self) -> bool:
        if not self._parts:
            envelope = self._post.envelope(self.source, self._tag)
            if envelope is None:
                return False
            self.source = envelope.source
            if envelope.content != self._content:
                raise Mismatch(
                    f"rank {self._post.wire.rank} receives {self._content} from rank {self.source}, which sent "
                    f"{envelope.content}: the tensors must be the same at both ends"
                )
            self._open(envelope.comes_under)
        if self._parts[0].test():
            return True
        if self._content is None and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            other = self._post.other_kind(self.source, self._tag, self._tensor.dtype)
            if other is not None:
                self.cancel()
                raise Mismatch(
                    f"rank {self._post.wire.rank} receives {self._tensor.dtype} with tag {self._tag}, but {other} was "
                    "sent: the tensors must be the same at both ends"
                )
        return False

    def _open(self, tag: int) -> None:
        message = self._post.wire.irecv(self._tensor, self.source, tag, self._hear)
        self._parts = [message.then(self._note)]

    def _hear(self, source: int) -> None:
        self.source = source

    def _note(self) -> None:
        assert self.source is not None
        self._post.channel.read(self.source)


# A communicator with what torch.distributed asks for beyond `Communicator`: all of it non-blocking.

EXCHANGE_TAG = 32765
BITWISE = ("band", "bor", "bxor")
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which PyTorch itself does not add


class Wire(Communicator):
    """The ranks of one process group. Collectives and messages use one each: users may take any tag for messages."""

    @cached_property
    def _types(self) -> "dict[torch.dtype, MPI.Datatype]":
        from mpi4py import MPI

        return {**super()._types, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T}

    def _operator(self, op: str, dtype: torch.dtype) -> "MPI.Op":
        from mpi4py import MPI

        if op not in BITWISE:
            return super()._operator(op, dtype)
        if dtype is torch.bool:
            return {"band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}[op]
        return {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}[op]

    def check_reduction(self, op: str, dtype: torch.dtype) -> None:
        """Refuse what has no meaning, which MPI libraries refuse in words of their own, or do somehow."""
        floating = dtype.is_floating_point or dtype.is_complex
        if dtype not in self._types and dtype not in LOW_PRECISION:
            raise TypeError(f"{dtype} cannot be reduced: convert it, for instance to torch.float32")
        if op in BITWISE and floating:
            raise TypeError(f"the reduction {op.upper()} works on integers and bool, but the tensor is {dtype}")
        if op in ("min", "max") and dtype.is_complex:
            raise TypeError(f"complex numbers have no order, so {dtype} has no {op.upper()}")
        if op == "avg" and dtype is torch.bool:
            raise TypeError("truths have no average: reduce them with MIN or MAX, or convert them to a number")

    def ireduce(self, tensor: Tensor, op: str = "sum", root: int | None = None, factor: Any = 1) -> Pending:
        """Start to reduce over all ranks, in place, on `root` or on all. "avg" divides the sum once, at the end."""
        self.check_reduction(op, tensor.dtype)
        tensor = tensor.detach()
        if op == "premul_sum":
            tensor.mul_(factor)
        if op not in ("avg", "premul_sum"):
            return super().ireduce(tensor, op, root)
        total = tensor.float() if tensor.dtype in LOW_PRECISION else tensor
        pending = super().ireduce(total, "sum", root)
        if op == "avg" and root in (None, self.rank):
            pending.then(lambda: divide(total, self.size))
        if total is not tensor:
            pending.then(lambda: tensor.copy_(total))
        return pending

    def ireduce_parts(self, parts: Sequence[Tensor], out: Tensor, op: str, factor: Any = 1) -> Pending:
        """Start to reduce part r of all ranks into `out` on rank r. Parts may differ in size; they stay as they are."""
        self.check_reduction(op, out.dtype)
        out = out.detach()
        if op not in ("sum", "avg", "premul_sum") or out.dtype in UNSIGNED:
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            pending = self.ireduce(whole, op, None, factor)
            start = sum(part.numel() for part in parts[: self.rank])
            return pending.then(lambda: out.copy_(whole[start : start + out.numel()].view(out.shape)))
        mine = [part.detach() for part in parts]
        if op == "premul_sum":
            mine = [part * factor for part in mine]
        if self.size == 1:
            out.copy_(mine[0])
            return Pending(self.node)
        mine[self.rank] = out.copy_(mine[self.rank])
        pending, add_up = swap_parts(self, mine, SCATTER_TAG)

        def finish() -> None:
            total = add_up()
            if op == "avg":
                divide(total, self.size)
            put(total, out)

        return pending.then(finish)

    def iswap(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> Pending:
        """Start to send each rank its tensor and to receive from each into its: of any sizes, equal at both ends."""
        dense = {id(tensor): tensor.detach().contiguous() for tensor in outgoing.values()}
        return self.iexchange(
            [Piece(to, dense[id(outgoing[to])]) for to in reversed(self._from_here(outgoing))],
            [Piece(source, incoming[source]) for source in self._from_here(incoming)],
            EXCHANGE_TAG,
        )

    def _from_here(self, ranks: dict[int, Tensor]) -> list[int]:
        """The ranks, this one first and then the one below it, so that not all turn to the same rank at once."""
        return sorted(ranks, key=lambda rank: (self.rank - rank) % self.size)


def divide(total: Tensor, size: int) -> None:
    """Make a sum an average, in place. That of integers is cut off towards zero, as NCCL does."""
    if total.dtype in UNSIGNED:
        total.copy_(torch.from_numpy(total.cpu().numpy() // size))
    elif total.is_floating_point() or total.is_complex():
        total.div_(size)
    else:
        total.div_(size, rounding_mode="trunc")


# A barrier that says who did not come, in gloo's words: rank 0 hears of all other ranks, and then lets them go on.

ARRIVAL_TAG, LEAVE_TAG = 32762, 32763
NUMBER_BYTES = 8
GONE = 1 << 63  # beside a number: who came has given up since


class Numbers(Pending):
    """A number from each of some ranks: any that was not taken back, or `expected`, beside which old ones may come."""

    def __init__(
        self, wire: "Wire", channel: "Channel", sources: Sequence[int], tag: int, expected: int | None = None
    ) -> None:
        super().__init__(wire.node)
        self._wire, self._channel, self._tag, self._expected = wire, channel, tag, expected
        self.heard: dict[int, int] = {}
        self.open = set(sources)

    def test(self) -> bool:
        for source in sorted(self.open):
            number, page = GONE, bytearray(NUMBER_BYTES)
            while self._wire.mpi.Iprobe(source, self._tag):  # the last one counts
                self._wire.mpi.Recv(page, source, self._tag)
                self._channel.read(source)
                number = int.from_bytes(page, "little")
            if number == self._expected if self._expected is not None else number < GONE:
                self.heard[source] = number
                self.open.remove(source)
        return not self.open


def pass_monitored_barrier(
    wire: "Wire",
    channel: "Channel",
    number: int,
    timeout: timedelta,
    all_ranks: bool,
    alarm: Callable[[Iterable[int]], None],
) -> None:
    """Return when all ranks have come to a barrier. `number` is this rank's own: another one each time.

    `channel` counts its messages.

    `alarm` is called now and then with the ranks that are waited for.

    Raises:
        TimedOut: on rank 0, some rank did not come within `timeout`, with the lowest such, or with `all_ranks` all of
            them; on others, rank 0 did not let them go on.
    """
    if wire.rank == 0 and timeout <= timedelta(0):
        raise TimedOut(f"Rank 0 timed out in monitoredBarrier after {timeout}: pass a time in which others can come")
    others = list(range(1, wire.size))

    def tell(rank: int, what: int, tag: int) -> "MPI.Request":
        channel.wrote(rank)
        return wire.mpi.Isend(what.to_bytes(NUMBER_BYTES, "little"), rank, tag)

    def complaint() -> str:
        missing = sorted(waiting.open)
        if wire.rank:
            return (
                f"Rank {wire.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0 for {timeout}: the message of rank 0 says who did not come"
            )
        who = f"Ranks {', '.join(map(str, missing))}" if all_ranks and len(missing) > 1 else f"Rank {missing[0]}"
        return f"{who} failed to pass monitoredBarrier within {timeout}"

    if wire.rank == 0:
        waiting = Numbers(wire, channel, others, ARRIVAL_TAG)
    else:
        waiting = Numbers(wire, channel, [0], LEAVE_TAG, number)
        tell(0, number, ARRIVAL_TAG)
    try:
        wire.node.wait(waiting, within(timeout, complaint, lambda: alarm(waiting.open)))
    except BaseException:
        if wire.rank:
            tell(0, number + GONE, ARRIVAL_TAG)
        raise
    if wire.rank == 0:
        wire.node.wait(Calls([tell(rank, waiting.heard[rank], LEAVE_TAG) for rank in others]))
