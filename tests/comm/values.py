"""Values for tests of the wire: small whole numbers, exact in every dtype, in every layout that a tensor can have."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def whole_numbers(rank: int, dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """Numbers from 0 to 4 (or both booleans) that every rank can name for any other rank."""
    count = torch.Size(shape).numel()
    steps = torch.arange(count) * 3 + rank * 7 + salt
    numbers = (steps + steps // 5) % 5
    if dtype is torch.bool:
        return (numbers > 1).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers.double() + rank) % 3).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors that equal x, (4, 2, 3, 2), and own memory that does not look like it."""
    yield "contiguous", x.clone()
    yield "channels last", x.clone().contiguous(memory_format=torch.channels_last)
    yield "transposed", x.transpose(0, 3).contiguous().transpose(0, 3)
    padded = x.new_zeros((x.shape[0], x.shape[1], x.shape[2] + 2, x.shape[3] + 1))
    padded[:, :, 1:-1, 1:] = x
    yield "inner part", padded[:, :, 1:-1, 1:]
    strided = x.new_zeros((2 * x.shape[0], *x.shape[1:]))
    strided[::2] = x
    yield "every other row", strided[::2]
    flat = x.new_zeros(x.numel() + 3)
    flat[3:] = x.reshape(-1)
    yield "with an offset", flat[3:].view(x.shape)
    if x.is_complex():
        yield "conjugate", x.conj().resolve_conj().conj()
        yield "negated", torch._neg_view(-x)


class Counting:
    """An MPI communicator that counts the calls of each of its methods: `comm.mpi = Counting(comm.mpi)`."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._mpi, name)
        if not callable(found):
            return found

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return found(*args, **kwargs)

        return counted
