"""The ranks of a group must make the same calls: each tells others which call it makes, beside the data.

    always     each rank tells the next one, in a message of its own that travels with the data
    in full    under TORCH_DISTRIBUTED_DEBUG=DETAIL: every rank tells every other, also the shapes, before data moves

MPI itself says nothing of sums of tensors of different sizes, or stops with a message that names no call.
"""

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mpi4dl.comm.backend.errors import Mismatch
from mpi4dl.comm.pending import Pending
from mpi4dl.comm.requests import Calls

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi4dl.comm.backend.wire import Wire

PAGE_BYTES, PAGE_BYTES_IN_FULL = 128, 1024
CALL_TAG = 32764


class Agreement(Pending):
    """What other ranks say of the call that this rank makes, `call`, and then its `data`.

    It is ready when both have arrived; what MPI says of data that do not belong together is not looked at.
    """

    def __init__(self, wire: "Wire", call: str, in_full: bool) -> None:
        super().__init__(wire.node)
        self._rank = wire.rank
        self._page = _page(call, PAGE_BYTES_IN_FULL if in_full else PAGE_BYTES)
        others = [(wire.rank + step) % wire.size for step in range(1, wire.size)]
        told, heard = (others, others) if in_full else (others[:1], others[-1:])
        self._arriving: dict[int, tuple[MPI.Request, bytearray]] = {}
        self._different: dict[int, bytearray] = {}
        for rank in heard:
            page = bytearray(len(self._page))
            self._arriving[rank] = (wire.mpi.Irecv(page, rank, CALL_TAG), page)
        self._requests = [Calls([wire.mpi.Isend(self._page, rank, CALL_TAG) for rank in told])]

    @property
    def silent(self) -> list[int]:
        """The ranks that are known not to have come to this call yet."""
        return sorted(self._arriving)

    def carry(self, data: Sequence[Pending]) -> None:
        self._parts = data

    def test(self) -> bool:
        for rank, (request, page) in list(self._arriving.items()):
            if request.Test():
                del self._arriving[rank]
                if page != self._page:
                    self._different[rank] = page
        if self._arriving:
            return False
        if self._different:
            raise Mismatch(self._complaint())
        return super().test() and all([part.test() for part in self._parts])

    def _complaint(self) -> str:
        calls = {self._rank: self._page, **self._different}
        told = ", but ".join(f"rank {rank} calls {_text(page)}" for rank, page in sorted(calls.items()))
        return f"{told}: all ranks of a group must make the same calls, of the same sizes and dtypes, in one order"


def describe(name: str, detail: object, tensors: Sequence[Tensor], sized: bool, in_full: bool) -> str:
    """A call in words, as all ranks have to make it. `sized`: they have tensors of the same size, or shape in full."""
    if not sized:
        texts = sorted({str(x.dtype) for x in tensors})
    elif in_full:
        texts = [f"{x.dtype} of shape {tuple(x.shape)}" for x in tensors]
    else:
        texts = [f"{x.numel()} x {x.dtype}" for x in tensors]
    counts = [(len(list(alike)), text) for text, alike in itertools.groupby(texts)]
    what = ", ".join(text if count == 1 else f"{count} tensors of {text}" for count, text in counts)
    return f"{name}({detail}) of {what}" if tensors else f"{name}({detail})"


def _page(call: str, num_bytes: int) -> bytes:
    """A call as so many bytes; of what is too long, the end is there as a checksum."""
    text = call.encode()
    if len(text) > num_bytes:
        text = text[: num_bytes - 8] + b"%08x" % zlib.crc32(text)
    return text.ljust(num_bytes)


def _text(page: Sequence[int]) -> str:
    return bytes(page).decode(errors="replace").strip()
