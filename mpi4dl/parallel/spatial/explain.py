"""What a model costs on a grid: the operators that communicate, and how much. Nothing is computed and nothing is sent.

The model runs on meta tensors, once for every rank of the grid, on a communicator that counts instead of sending.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.comm import Communicator, Pending
from mpi4dl.geometry import Box
from mpi4dl.parallel.spatial.grid import Grid

MAX_RANKS = 64


@dataclass
class Operator:
    """What one call of an operator sends in a forward pass: the most that any one rank does."""

    module: str
    name: str
    output: tuple[int, ...]
    halo_bytes: int = 0
    messages: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0

    @property
    def communicates(self) -> bool:
        return bool(self.messages or self.gathered_bytes or self.reduced_bytes)


@dataclass
class Explanation:
    """The operators of one forward pass, in order. `print` shows those that communicate as a table."""

    operators: list[Operator] = field(default_factory=list)

    @property
    def halo_bytes(self) -> int:
        return sum(operator.halo_bytes for operator in self.operators)

    @property
    def messages(self) -> int:
        return sum(operator.messages for operator in self.operators)

    def __str__(self) -> str:
        head = ("module", "operator", "output", "halo bytes", "messages", "gathered", "reduced")
        rows = [
            (o.module, o.name, "x".join(map(str, o.output)), *map(str, (o.halo_bytes, o.messages, o.gathered_bytes, o.reduced_bytes)))
            for o in self.operators
            if o.communicates
        ]
        total = (
            f"{len(self.operators)} operators", f"{len(rows)} communicate", "",
            *(str(sum(getattr(o, name) for o in self.operators)) for name in ("halo_bytes", "messages", "gathered_bytes", "reduced_bytes")),
        )
        table = [head, *rows, total]
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        lines = ["  ".join(f"{cell:<{w}}" if i < 3 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))) for row in table]
        return "\n".join(line.rstrip() for line in lines)


class Ledger(Communicator):
    """A communicator of ranks that need not exist. It counts what this rank would send."""

    def __init__(self, rank: int, size: int, counts: dict[str, int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.counts = counts if counts is not None else {}
        self.node = None  # type: ignore[assignment]

    def _count(self, what: str, amount: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + amount

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Pending:
        self._count("halo_bytes", tensor.nbytes)
        self._count("messages", 1)
        return Pending(self.node)

    def _ireduce(self, tensor: Tensor, op: str, root: int | None) -> Pending:
        self._count("reduced_bytes", tensor.nbytes)
        return Pending(self.node)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count("reduced_bytes", tensor.nbytes)
        return tensor.new_empty((self.size, *tensor.shape))

    def agree(self, error: str | None = None, **facts: Any) -> None:
        if error is not None:
            raise ValueError(error)

    def split(self, color: int, key: int = 0) -> "Ledger":
        return Ledger(0, self.size, self.counts)
