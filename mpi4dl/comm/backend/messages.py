"""Messages from rank to rank: their length is checked, and what MPI has no room for travels in an envelope.

    plain        a tag up to some limit of MPI's: the message alone
    enveloped    any tag that torch.distributed takes: an envelope with the tag, and the number of the tag under which
                 the message itself comes. Under TORCH_DISTRIBUTED_DEBUG=DETAIL all messages have one, with the shape

The highest tags of MPI are kept for both. Envelopes are read as they come, and lie here until somebody asks for them.
"""

import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mpi4dl.comm.backend.errors import Mismatch
from mpi4dl.comm.backend.patience import wait_until_ready
from mpi4dl.comm.pending import Pending

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.backend.departure import Channel
    from mpi4dl.comm.backend.wire import Wire

KEPT_TAGS = 1 << 12
MOST = 2**31 - 1
ENVELOPE_BYTES = 256


class Envelope(NamedTuple):
    """Who writes, under which tag of the user's, what, and under which tag of MPI's it comes."""

    source: int
    tag: int
    content: str
    comes_under: int


class Post:
    """The messages of one group, which `channel` counts."""

    def __init__(self, wire: "Wire", channel: "Channel", in_full: bool) -> None:
        from mpi4py import MPI

        self.wire = wire
        self._channel = channel
        self._in_full = in_full
        self._envelopes_under = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self._plain_below = self._envelopes_under - KEPT_TAGS
        self._numbers = itertools.cycle(range(KEPT_TAGS))
        self._read: list[Envelope] = []
        self._reading = threading.Lock()

    def isend(self, tensor: Tensor, to: int, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel():
            self._channel.wrote(to)
        if tensor.numel() == 0 or not self._needs_envelope(tag):
            return self.wire.isend(tensor, to, tag)
        comes_under = self._plain_below + next(self._numbers)
        page = f"{tag} {comes_under} {self._content(tensor)}".encode().ljust(ENVELOPE_BYTES)
        envelope = self.wire.mpi.Isend(page[:ENVELOPE_BYTES], to, self._envelopes_under)
        message = self.wire.isend(tensor, to, comes_under)
        message._requests.append(envelope)
        return message

    def ireceive(self, tensor: Tensor, source: int | None, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel() == 0:
            return Pending(self.wire.node)
        if not self._needs_envelope(tag):
            return self.arrival(tensor, source, tag)
        return EnvelopedArrival(self, tensor, source, tag, self._content(tensor))

    def arrival(self, tensor: Tensor, source: int | None, tag: int) -> "Arrival":
        message = Arrival(self.wire, tensor, source, tag)

        def note() -> None:
            assert message.source is not None
            self._channel.read(message.source)

        message._finish.append(note)
        return message

    def _needs_envelope(self, tag: int) -> bool:
        return self._in_full or tag >= self._plain_below

    def _content(self, tensor: Tensor) -> str:
        text = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if self._in_full else f"{tensor.nbytes} bytes"
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
        super().__init__(post.wire.node)
        self.source = source
        self._post, self._tensor, self._tag, self._content = post, tensor, tag, content
        self._message: Arrival | None = None

    def ready(self) -> bool:
        if self._message is None:
            envelope = self._post.envelope(self.source, self._tag)
            if envelope is None:
                return False
            self.source = envelope.source
            if envelope.content != self._content:
                raise Mismatch(
                    f"rank {self._post.wire.rank} receives {self._content} from rank {self.source}, which sent "
                    f"{envelope.content}: the tensors must be the same at both ends"
                )
            self._message = self._post.arrival(self._tensor, self.source, envelope.comes_under)
        return self._message.ready()

    def wait(self) -> None:
        wait_until_ready(self, self._node)
        assert self._message is not None
        self._message.wait()
