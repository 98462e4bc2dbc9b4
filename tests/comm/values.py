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
    """Tensors that equal x, and own memory that does not look like it."""
    yield "contiguous", x.clone()
    yield "every other", torch.stack([x, x], -1)[..., 0]
    flat = x.new_zeros(x.numel() + 3)
    flat[3:] = x.reshape(-1)
    yield "with an offset", flat[3:].view(x.shape)
    if x.dim() == 4:
        yield "channels last", x.clone().contiguous(memory_format=torch.channels_last)
    if x.dim() >= 2:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
        padded = x.new_zeros((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 1))
        padded[..., 1:-1, 1:] = x
        yield "inner part", padded[..., 1:-1, 1:]
    if x.is_complex():
        yield "conjugate", x.conj().resolve_conj().conj()
        yield "negated", torch._neg_view(-x)


def check(got: Tensor, expected: Tensor, *case: object) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), case
    assert torch.equal(got, expected), (case, got, expected)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


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
