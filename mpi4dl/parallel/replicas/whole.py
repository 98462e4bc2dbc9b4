"""Whole values on one rank, put together from the parts that ranks own."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpi4dl.comm import Communicator

State = dict[str, Any]


class Shard(NamedTuple):
    """A run of elements of the value `name`, which begins at number `start` of it, flattened.

    Of a parameter there may be the optimizer's state: what has as many elements is for these elements, all else for the
    whole parameter; and the number of its group in the optimizer, None if it is in none.
    """

    name: str
    start: int
    value: Tensor
    state: State = {}  # noqa: RUF012
    group: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.value.numel()


def assemble(
    comm: Communicator, parts: Iterable[Shard], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor] | None:
    """Values by name on rank 0, on the host, in these shapes and dtypes; None on other ranks. Collective.

    A value of which no rank has a part is left out.
    """
    mine = list(parts)
    if comm.rank != 0:
        comm.isend_object([(part.name, part.start, part.stop, part.value.dtype) for part in mine], 0).wait()
        for part in mine:
            comm.send(part.value, 0)
        return None
    found: dict[str, Tensor] = {}

    def put(part: Shard) -> None:
        shape, dtype = shapes[part.name]
        flat = found.setdefault(part.name, torch.empty(math.prod(shape), dtype=dtype))
        flat[part.start : part.stop] = part.value.detach().reshape(-1)

    for part in mine:
        put(part)
    for rank in range(1, comm.size):
        for name, start, stop, dtype in comm.recv_object(rank):
            put(Shard(name, start, comm.recv(torch.empty(stop - start, dtype=dtype), rank)))
    return {name: flat.view(shapes[name][0]) for name, flat in found.items()}
