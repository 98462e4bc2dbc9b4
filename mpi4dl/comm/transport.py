"""The primitive under everything that moves between ranks: send these pieces, receive those; halves of an all-reduce.

    tensors on the CPU           MPI reads and writes them as they are; what is small or not dense goes by a buffer
    on a GPU, "staged"           packed there, copied once to pinned memory, from where MPI takes it; and back
    on a GPU, "direct"           packed there; a CUDA-aware MPI reads and writes the GPU's memory
              "nccl"             what is collective is packed there, and goes by NCCL; all else is staged
    meta tensors                 move nothing

Messages of the same ranks and tag match in the order in which they are posted. Those of a GPU are posted when it has
come so far, so whatever is started meanwhile stands in line.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpi4dl.comm.node import Node
from mpi4dl.comm.packing import (
    Message,
    Piece,
    buffer_for,
    flat_for,
    messages_of,
    pack_all,
    packed,
    parts_of,
    unpack,
    unpack_all,
)
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls, Condition, Posted, Receives, Request
from mpi4dl.comm.streams import staging_buffers_of
from mpi4dl.geometry import even_cuts

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.nccl import Nccl

Heard = Callable[[int], None] | None
MAX_MESSAGE_BYTES = 1 << 30  # some MPI libraries fail beyond 2^31 - 1


class PointToPoint:
    """One rank of a group whose ranks send each other tensors. `gpu_wire` is how those on a GPU travel."""

    def __init__(self, mpi: "MPI.Comm", node: Node, gpu_wire: str = "staged", nccl: "Nccl | None" = None) -> None:
        from mpi4py import MPI

        self.mpi = mpi
        self.node = node
        self.rank = mpi.rank
        self.size = mpi.size
        self.gpu_wire = gpu_wire
        self.nccl = nccl
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self._line: deque[object] = deque()  # what is not posted yet
        self._address, self._byte, self._any = MPI.memory.fromaddress, MPI.BYTE, MPI.ANY_SOURCE
        self._status = MPI.Status()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Pending:
        return self.iexchange([Piece(to, tensor)], [], tag)

    def irecv(self, tensor: Tensor, source: int | None, tag: int = 0, heard: Heard = None) -> Pending:
        """Receive into `tensor`, which has the shape and dtype that are sent.

        No source: from any rank; `heard` is called with that rank.

        Raises:
            ValueError: from any rank, more is to come than goes into one message.
        """
        if source is None and tensor.nbytes > self.max_message_bytes:
            raise ValueError(
                f"a tensor of {tensor.nbytes} bytes can be received from any rank up to {self.max_message_bytes}: "
                "name src"
            )
        return self.iexchange([], [Piece(source, tensor)], tag, heard)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        self.irecv(tensor, source, tag).wait()
        return tensor

    def iexchange(
        self,
        sends: Sequence[Piece],
        receives: Sequence[Piece],
        tag: int = 0,
        heard: Heard = None,
        collective: bool = False,
    ) -> Pending:
        """Start to send these pieces to their ranks, and to receive those from theirs.

        Both ends name the same pieces, by their sizes in bytes, in the same order. Tensors may be views of any strides.
        Pieces of a rank to itself are copied at once. `heard(rank)` is called with the source of each message.

        `collective`: both ends make one call for what they send and receive, and all ranks make these calls in one
        order, as `nccl` says.

        Raises:
            Mismatch: when waited for; a rank sent another number of bytes. NCCL would not notice.
        """
        for peer, _ in sends:
            if peer == self.rank and any(source == peer for source, _ in receives):
                sends, receives = self._copy_own(sends, receives)
                break
        leaving, arriving = messages_of(sends), messages_of(receives)
        if not leaving and not arriving:
            return Pending(self.node)
        like = (leaving or arriving)[0].pieces[0]
        if like.is_meta:
            return Pending(self.node)
        if like.is_cuda and collective and self.nccl is not None:
            return self._start_nccl(self.nccl, leaving, arriving)
        if like.is_cuda:
            start = self._start_direct if self.gpu_wire == "direct" else self._start_staged
            return start(leaving, arriving, tag, heard)
        if self._line:
            return self._in_line(partial(self._post, leaving, arriving, tag, heard))
        return self._post(leaving, arriving, tag, heard)

    def _copy_own(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """The pieces to and from other ranks, after this rank has copied its own."""
        own = [x for peer, x in sends if peer == self.rank]
        for into, x in zip([x for peer, x in receives if peer == self.rank], own, strict=True):
            into.detach().copy_(x.detach().view(into.shape))
        return [p for p in sends if p.peer != self.rank], [p for p in receives if p.peer != self.rank]

    def _post(self, leaving: Sequence[Message], arriving: Sequence[Message], tag: int, heard: Heard) -> Pending:
        """Hand messages to MPI, which may read and write their memory from now on."""
        buffers: list[Tensor] = []
        requests: list[Request] = []
        deliveries = []
        if arriving:
            receives: list[Posted] = []
            for message in arriving:
                buffer = buffer_for(message)
                if buffer is not message.pieces[0]:
                    deliveries.append(partial(unpack, message, buffer))
                buffers.append(buffer)
                sender = self._any if message.peer is None else message.peer
                for start, stop in self._chunks(buffer.nbytes, self.max_message_bytes):
                    request = self.mpi.Irecv(self._memory(buffer, start, stop), sender, tag)
                    receives.append(Posted(request, stop - start, message.peer))
            requests.append(Receives(self.rank, receives, self._status, heard))
        if leaving:
            sends = []
            for message in leaving:
                buffer = packed(message)
                buffers.append(buffer)
                assert message.peer is not None
                for start, stop in self._chunks(buffer.nbytes, self.max_message_bytes):
                    sends.append(self.mpi.Isend(self._memory(buffer, start, stop), message.peer, tag))
            requests.append(Calls(sends))
        return Pending(self.node, requests, buffers, deliveries)

    def _memory(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> list[Any]:
        """The bytes from `start` to `stop` of a dense tensor, as MPI takes them."""
        stop = tensor.nbytes if stop is None else stop
        return [self._address(tensor.data_ptr() + start, stop - start), self._byte]

    def _chunks(self, total: int, limit: int) -> Sequence[tuple[int, int]]:
        if total <= limit:
            return ((0, total),)
        return [(start, min(start + limit, total)) for start in range(0, total, limit)]

    def _in_line(self, post: Callable[[], Pending]) -> Pending:
        """Call `post()` once all that was started earlier is posted."""
        return Pending.of_phases(self.node, self._turn(post)) if self._line else post()

    def _turn(self, post: Callable[[], Pending], *before: Request, uses: Tensor | None = None) -> Iterator[Pending]:
        """The same as phases, of which the first also waits for what must be complete `before`, and `uses` memory."""
        ticket = object()
        self._line.append(ticket)
        yield Pending(self.node, [*before, Condition(lambda: self._line[0] is ticket)], [uses])
        try:
            posted = post()
        finally:
            self._line.popleft()
        yield posted

    def _by_host(
        self,
        out: Tensor | None,
        into: Tensor | None,
        post: Callable[..., Pending],
        unpack: Callable[[], Any] | None = None,
    ) -> Pending:
        """`post(host_out, host_in)` communicates copies, on the host, of flat bytes on a GPU; `out` may be `into`.

        `unpack()` is what the GPU does in the end.
        """
        like = into if out is None else out
        assert like is not None
        staging = staging_buffers_of(like.device)
        begun, _ = staging.begin()
        before: list[Request] = []
        host_out = host_in = None
        if out is not None:
            host_out, copied = staging.to_host(out, begun)
            before.append(copied)
        if into is not None:
            host_in = host_out if into is out else staging.take(into.numel())

        def phases() -> Iterator[Pending]:
            yield from self._turn(lambda: post(host_out, host_in), *before, uses=out)
            if host_out is not None and host_out is not host_in:
                staging.give(host_out)
            if host_in is not None and into is not None:
                staging.to_device(host_in, into, begun)
                if unpack is not None:
                    unpack()

        return Pending.of_phases(self.node, phases())

    def _start_staged(self, leaving: Sequence[Message], arriving: Sequence[Message], tag: int, heard: Heard) -> Pending:
        out, into = (flat_for(messages) if messages else None for messages in (leaving, arriving))
        if out is not None:
            pack_all(leaving, out)

        def post(host_out: Tensor | None, host_in: Tensor | None) -> Pending:
            return self._post(parts_of(leaving, host_out), parts_of(arriving, host_in), tag, heard)

        return self._by_host(out, into, post, None if into is None else partial(unpack_all, arriving, into))

    def _start_direct(self, leaving: Sequence[Message], arriving: Sequence[Message], tag: int, heard: Heard) -> Pending:
        """Everything is packed here, on the caller's stream, so that MPI has nothing but dense memory to see."""
        out = [message._replace(pieces=(packed(message),)) for message in leaving]
        into = [message._replace(pieces=(buffer_for(message),)) for message in arriving]
        pieces = (out or into)[0].pieces
        staging = staging_buffers_of(pieces[0].device)
        _, reached = staging.begin()

        def phases() -> Iterator[Pending]:
            yield from self._turn(lambda: self._post(out, into, tag, heard), reached)
            for message, dense in zip(arriving, into, strict=True):
                if dense.pieces[0] is not message.pieces[0]:
                    unpack(message, dense.pieces[0])

        return Pending.of_phases(self.node, phases())

    def _start_nccl(self, nccl: "Nccl", leaving: Sequence[Message], arriving: Sequence[Message]) -> Pending:
        """Nothing stands in line here: NCCL waits for the caller's stream by itself, and knows no order but its own."""
        out = [(peer, packed(message)) for message in leaving if (peer := message.peer) is not None]
        into = [(peer, buffer_for(message)) for message in arriving if (peer := message.peer) is not None]
        works = nccl.exchange(out, into)
        pending = Pending(self.node, [works], [out, into], [works.join])
        for message, (_, dense) in zip(arriving, into, strict=True):
            if dense is not message.pieces[0]:
                pending.then(partial(unpack, message, dense))
        return pending


# Halves of an all-reduce: every rank comes to hold the sum of one part, and the parts come back to every rank.
#
#     rank 0   [ a0 | b0 | c0 ]            [ a  | .  | .  ]           [ a | b | c ]
#     rank 1   [ a1 | b1 | c1 ]   reduce   [ .  | b  | .  ]   all-    [ a | b | c ]      a = (a0 + a1) + a2
#     rank 2   [ a2 | b2 | c2 ]   scatter  [ .  | .  | c  ]   gather  [ a | b | c ]
#
# Parts go straight to their owners, who add them in the order of the ranks: every run yields the same bits. A rank
# sends (size - 1) / size of the buffer in each half, which no algorithm can undercut (Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009).

LOW_PRECISION = (torch.bfloat16, torch.float16)
# The highest tags that every MPI has: out of the way of what users send.
ALL_TO_ALL_TAG, SCATTER_TAG, GATHER_TAG = 32765, 32766, 32767


def parts_by_rank(flat: Tensor, size: int, cuts: Sequence[int] | None = None) -> list[Tensor]:
    """The parts of a flat tensor, one for each of `size` ranks: views, even ones unless `cuts` says where they begin.

    Raises:
        ValueError: the tensor is not 1-D and contiguous, or `cuts` does not cut it into `size` parts.
    """
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"the tensor has shape {tuple(flat.shape)} and strides {flat.stride()}, but must be 1-D and contiguous: "
            "pass a flat buffer"
        )
    cuts = even_cuts(flat.numel(), size) if cuts is None else cuts
    if len(cuts) != size + 1 or list(cuts) != sorted(cuts) or (cuts[0], cuts[-1]) != (0, flat.numel()):
        raise ValueError(
            f"cuts {list(cuts)} must be {size + 1} numbers that rise from 0 to {flat.numel()}, so that each of {size} "
            f"ranks has a part of {flat.numel()} elements"
        )
    return [flat[start:stop] for start, stop in itertools.pairwise(cuts)]


def swap_parts(
    comm: PointToPoint, parts: list[Tensor], tag: int, collective: bool = False
) -> tuple[Pending, Callable[[], Tensor]]:
    """Send every rank its part; when that is complete, the second result adds up what came for this rank.

    The sum is in float32 for values of low precision, and otherwise in this rank's own part. `collective` is that of
    `PointToPoint.iexchange`.
    """
    own = parts[comm.rank]
    arrived = [own if source == comm.rank else torch.empty_like(own) for source in range(comm.size)]
    others = _others(comm)
    pending = comm.iexchange(
        [Piece(to, parts[to]) for to in reversed(others)],
        [Piece(source, arrived[source]) for source in others],
        tag,
        collective=collective,
    )

    def add_up() -> Tensor:
        if own.dtype in LOW_PRECISION:
            total = arrived[0].float()
            for part in arrived[1:]:
                total += part
            return total
        if comm.size == 1:
            return own
        total = arrived[0]
        for part in arrived[1:-1]:
            total += part
        return torch.add(total, arrived[-1], out=own)

    return pending, add_up


def share_parts(comm: PointToPoint, parts: list[Tensor], tag: int, collective: bool = False) -> Pending:
    """Send this rank's own part to all others, and receive theirs in place."""
    others = _others(comm)
    own = parts[comm.rank]
    leaving, arriving = [Piece(to, own) for to in reversed(others)], [Piece(r, parts[r]) for r in others]
    return comm.iexchange(leaving, arriving, tag, collective=collective)


def put(total: Tensor, into: Tensor) -> None:
    """Copy a sum, unless it is there already: rounded, if it was computed in a wider dtype."""
    if total is not into:
        into.copy_(total)


def _others(comm: PointToPoint) -> list[int]:
    """All other ranks, the one below this one first, so that not all of them turn to the same rank at once."""
    return [(comm.rank - step) % comm.size for step in range(1, comm.size)]
