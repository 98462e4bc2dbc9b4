"""Messages from rank to rank: their length is checked, and what MPI has no room for travels in an envelope.

    plain        a tag up to some limit of MPI's: the message alone
    enveloped    any tag that torch.distributed takes: an envelope with the tag, and the number of the tag under which
                 the message itself comes. Under TORCH_DISTRIBUTED_DEBUG=DETAIL all messages have one, with the shape

The highest tags of MPI are kept for both: [ plain ... | envelopes | messages that have one ]
"""

import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from mpi4dl.comm.backend.errors import Mismatch
from mpi4dl.comm.backend.patience import wait_until_ready
from mpi4dl.comm.pending import Pending

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.backend.wire import Wire

KEPT_TAGS = 1 << 12  # of each kind
MOST = 2**31 - 1
ENVELOPE_BYTES = 256


class Post:
    """The messages of one group."""

    def __init__(self, wire: "Wire", in_full: bool) -> None:
        from mpi4py import MPI

        highest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self.wire = wire
        self.in_full = in_full
        self.messages_from = highest + 1 - KEPT_TAGS
        self.envelopes_from = self.messages_from - KEPT_TAGS
        self._numbers = itertools.cycle(range(KEPT_TAGS))

    def isend(self, tensor: Tensor, to: int, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel() == 0 or not self._needs_envelope(tag):
            return self.wire.isend(tensor, to, tag)
        number = next(self._numbers)
        envelope = f"{number}\n{self._content(tensor, tag)}".encode().ljust(ENVELOPE_BYTES)
        message = self.wire.isend(tensor, to, self.messages_from + number)
        message._requests.append(self.wire.mpi.Isend(envelope, to, self.envelopes_from + tag % KEPT_TAGS))
        return message

    def ireceive(self, tensor: Tensor, source: int | None, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel() == 0:
            return Pending(self.wire.node)
        if not self._needs_envelope(tag):
            return Arrival(self.wire, tensor, source, tag)
        return EnvelopedArrival(self, tensor, source, tag, self._content(tensor, tag))

    def _needs_envelope(self, tag: int) -> bool:
        return self.in_full or tag >= self.envelopes_from

    def _content(self, tensor: Tensor, tag: int) -> str:
        shape = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if self.in_full else f"{tensor.nbytes} bytes"
        return f"{shape} with tag {tag}"[: ENVELOPE_BYTES // 2]


def check_tag(tag: int) -> None:
    if not 0 <= tag <= MOST:
        raise ValueError(f"tag is {tag}, but must be from 0 to {MOST}")


class Arrival(Pending):
    """A message under way to this rank, whose length is checked. `source` None: from any rank, known afterwards.

    MPI says nothing of a message that is shorter than the buffer, the rest of which would be old values.
    """

    def __init__(self, wire: "Wire", tensor: Tensor, source: int | None, tag: int) -> None:
        from mpi4py import MPI

        super().__init__(wire.node)
        self.source = source
        self._rank = wire.rank
        buffer = wire._writable(tensor, False, self)
        self._buffers.append(buffer)
        limit = wire.max_message_bytes
        if source is None and buffer.nbytes > limit:
            raise ValueError(f"a tensor of {buffer.nbytes} bytes can be received from any rank up to {limit}: name src")
        sender = MPI.ANY_SOURCE if source is None else source
        # An empty tensor is not sent either.
        self._open = [
            (wire.mpi.Irecv(wire._bytes(buffer, start, stop), sender, tag), stop - start)
            for start, stop in wire._chunks(buffer.nbytes, limit)
        ]
        self._status = MPI.Status()

    def ready(self) -> bool:
        while self._open and self._arrived(self._open[0][0]):
            _, expected = self._open.pop(0)
            self.source = self._status.source
            if self._status.Get_count() != expected:
                raise Mismatch(self._complaint(expected, f"{self._status.Get_count()}"))
        return not self._open

    def _arrived(self, request: "MPI.Request") -> bool:
        try:
            return request.Test(self._status)
        except RuntimeError as error:
            from mpi4py import MPI

            if not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            _, expected = self._open.pop(0)
            raise Mismatch(self._complaint(expected, "more")) from None

    def _complaint(self, expected: int, arrived: str) -> str:
        source = "any rank" if self.source is None else f"rank {self.source}"
        return (
            f"rank {self._rank} receives {expected} bytes from {source}, which sent {arrived}: the tensors must have "
            "the same size and dtype at both ends"
        )

    def wait(self) -> None:
        wait_until_ready(self, self._node)
        super().wait()


class EnvelopedArrival(Pending):
    """A message whose envelope says under which tag it comes. `source` None: from any rank, known afterwards."""

    def __init__(self, post: Post, tensor: Tensor, source: int | None, tag: int, content: str) -> None:
        from mpi4py import MPI

        super().__init__(post.wire.node)
        self.source = source
        self._post, self._tensor, self._content = post, tensor, content
        self._envelope = bytearray(ENVELOPE_BYTES)
        sender = MPI.ANY_SOURCE if source is None else source
        self._request = post.wire.mpi.Irecv(self._envelope, sender, post.envelopes_from + tag % KEPT_TAGS)
        self._message: Arrival | None = None

    def ready(self) -> bool:
        from mpi4py import MPI

        if self._message is None:
            status = MPI.Status()
            if not self._request.Test(status):
                return False
            self.source = status.source
            number, content = self._envelope.decode().rstrip().split("\n")
            if content != self._content:
                raise Mismatch(
                    f"rank {self._post.wire.rank} receives {self._content} from rank {self.source}, which sent "
                    f"{content}: what is sent and received must be the same at both ends, in the same order"
                )
            self._message = Arrival(self._post.wire, self._tensor, self.source, self._post.messages_from + int(number))
        return self._message.ready()

    def wait(self) -> None:
        wait_until_ready(self, self._node)
        assert self._message is not None
        self._message.wait()
