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
from mpi4dl.comm.communicator import Communicator
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls, Condition

if TYPE_CHECKING:
    from mpi4dl.comm.backend.departure import Channel

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

    def __init__(self, wire: Communicator, channel: "Channel", in_full: bool) -> None:
        from mpi4py import MPI

        self.wire = wire
        self.channel = channel
        self._in_full = in_full
        self._envelopes_under = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767
        self._plain_below = self._envelopes_under - KEPT_TAGS
        self._numbers = itertools.cycle(range(KEPT_TAGS))
        self._read: list[Envelope] = []
        self._reading = threading.Lock()

    def isend(self, tensor: Tensor, to: int, tag: int) -> Pending:
        check_tag(tag)
        if tensor.numel():
            self.channel.wrote(to)
        if tensor.numel() == 0 or not self._needs_envelope(tag):
            return self.wire.isend(tensor, to, tag)
        comes_under = self._plain_below + next(self._numbers)
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


class Letter(Pending):
    """A message to this rank. `source` None: from any rank, known afterwards.

    With `content` it comes in an envelope, which says under which tag it comes, and that this is what it holds.
    """

    def __init__(self, post: Post, tensor: Tensor, source: int | None, tag: int, content: str | None) -> None:
        super().__init__(post.wire.node)
        self.source = source
        self._post, self._tensor, self._tag, self._content = post, tensor, tag, content
        self._requests = [Condition(self._comes)]
        if content is None:
            self._open(tag)

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
        return self._parts[0].test()

    def _open(self, tag: int) -> None:
        message = self._post.wire.irecv(self._tensor, self.source, tag, self._hear)
        self._parts = [message.then(self._note)]

    def _hear(self, source: int) -> None:
        self.source = source

    def _note(self) -> None:
        assert self.source is not None
        self._post.channel.read(self.source)
