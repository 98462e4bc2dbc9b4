"""Pieces of tensors as messages: small ones to the same rank travel together, and what is dense as it is.

    pieces     (to 1: a, 2 KB) (to 1: b, 4 KB) (to 2: c, 2 KB) (to 1: d, 1 MB)
    messages    to 1: a b       to 2: c         to 1: d

Both ends name the same pieces in the same order, and so find the same messages.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALONE_BYTES = 1 << 16  # a piece that is so large gains nothing from company, and would have to be copied for it
ALIGNMENT = 64


class Piece(NamedTuple):
    """A tensor, or a view of one, that goes to a rank or comes from it. No rank: from any."""

    peer: int | None
    tensor: Tensor


class Message(NamedTuple):
    """The pieces that one call of MPI moves."""

    peer: int | None
    pieces: tuple[Tensor, ...]
    num_bytes: int


def messages_of(pieces: Sequence[Piece]) -> list[Message]:
    """The messages that these pieces make up; those without elements make none."""
    messages: list[Message] = []
    if len(pieces) < 2 or len({peer for peer, _ in pieces}) == len(pieces):
        for peer, tensor in pieces:
            if tensor.numel():
                messages.append(Message(peer, (tensor,), tensor.nbytes))
        return messages
    open_at: dict[int | None, int] = {}  # where the message is that the next small piece of a rank joins
    for peer, tensor in pieces:
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            continue
        place = open_at.pop(peer, None)
        if place is None or num_bytes >= ALONE_BYTES:
            place = len(messages)
            messages.append(Message(peer, (tensor,), num_bytes))
        else:
            before = messages[place]
            messages[place] = Message(peer, (*before.pieces, tensor), aligned(before.num_bytes) + num_bytes)
        if messages[place].num_bytes < ALONE_BYTES:
            open_at[peer] = place
    return messages


def aligned(num_bytes: int) -> int:
    """The next place at which a piece may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def is_dense(x: Tensor) -> bool:
    """Whether its memory is its values, in order."""
    return x.is_contiguous() and not x.is_neg() and not x.is_conj()


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a dense tensor. Its dims of size 1 may have any stride, which a view would mind."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def slots(pieces: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Where these pieces lie in the flat bytes of a message."""
    found, start = [], 0
    for piece in pieces:
        found.append(flat[start : start + piece.nbytes].view(piece.dtype).view(piece.shape))
        start = aligned(start + piece.nbytes)
    return found


def pack(message: Message, flat: Tensor) -> None:
    copy_all(slots(message.pieces, flat), [piece.detach() for piece in message.pieces])


def unpack(message: Message, flat: Tensor) -> None:
    copy_all([piece.detach() for piece in message.pieces], slots(message.pieces, flat))


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of these values; on a GPU by one kernel, where dtypes and strides allow it."""
    if len(into) > 1 and into[0].is_cuda:
        torch._foreach_copy_(list(into), list(values))
        return
    for x, value in zip(into, values, strict=True):
        x.copy_(value)


def buffer_for(message: Message) -> Tensor:
    """Dense memory for a message: its only piece, where that is dense, or else a new buffer of bytes."""
    first = message.pieces[0]
    if len(message.pieces) == 1 and is_dense(first):
        return first
    return torch.empty(message.num_bytes, dtype=torch.uint8, device=first.device)


def packed(message: Message) -> Tensor:
    """A message in dense memory."""
    if len(message.pieces) == 1:
        x = message.pieces[0].detach()
        return x if is_dense(x) else x.resolve_conj().resolve_neg().contiguous()
    buffer = buffer_for(message)
    pack(message, buffer)
    return buffer


def flat_for(messages: Sequence[Message]) -> Tensor:
    """The memory for all of these messages, flat bytes one after the other: `pack_all` fills it."""
    if len(messages) == 1:
        return as_bytes(buffer_for(messages[0]))
    total = sum(aligned(message.num_bytes) for message in messages)
    return torch.empty(total, dtype=torch.uint8, device=messages[0].pieces[0].device)


def parts_of(messages: Sequence[Message], flat: Tensor | None) -> list[Message]:
    """The same messages, as they lie in `flat`."""
    found, start = [], 0
    for message in messages:
        assert flat is not None
        found.append(message._replace(pieces=(flat[start : start + message.num_bytes],)))
        start += aligned(message.num_bytes)
    return found


def pack_all(messages: Sequence[Message], flat: Tensor) -> None:
    for message, part in zip(messages, parts_of(messages, flat), strict=True):
        if part.pieces[0].data_ptr() != message.pieces[0].data_ptr():
            pack(message, part.pieces[0])


def unpack_all(messages: Sequence[Message], flat: Tensor) -> None:
    for message, part in zip(messages, parts_of(messages, flat), strict=True):
        if part.pieces[0].data_ptr() != message.pieces[0].data_ptr():
            unpack(message, part.pieces[0])


# Objects as messages: pickled. Of a tensor on a GPU the pickle would name that GPU, which is another rank's.


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            return _on_own_gpu, (value.detach().cpu(),)
        return NotImplemented


def _on_own_gpu(x: Tensor) -> Tensor:
    return x.to("cuda")


def dumps(value: Any) -> bytes:
    """A value as bytes. Tensors in it that are on a GPU come to the GPU of who reads it."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads(payload: bytes) -> Any:
    """The value that `dumps` wrote. Only for what ranks of the same job sent."""
    return pickle.loads(payload)
