"""What the ranks of a run tell each other once a step: has it to stop, can one not save, or not read the next batch?

The sum of loss and gradient norm, which every step needs, carries the news of all ranks: a step has that one round over
all ranks, and no other. So each rank looks at the next batch while it makes a step.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from mpi4dl.comm import Communicator

T = TypeVar("T")


class News(NamedTuple):
    """What is so on some rank: a signal asks to stop, a checkpoint cannot be written, an image cannot be read."""

    stop: bool
    cannot_save: bool
    bad_image: bool

    @classmethod
    def of_all(cls, comm: Communicator, mine: "News") -> "News":
        """What the ranks tell in a round of its own. Collective."""
        return cls.heard(comm.all_reduce(torch.tensor(mine, dtype=torch.int32)).tolist())

    @classmethod
    def heard(cls, sums: Sequence[float]) -> "News":
        """From how many ranks told each of it."""
        return cls(*(count > 0 for count in sums))


class Ahead(Generic[T]):
    """Goes through `items`, of which it can show the next one before its turn."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._seen: list[T | None] = []

    def peek(self) -> T | None:
        """The next item, which stays the next one; None at the end."""
        if not self._seen:
            self._seen.append(next(self._items, None))
        return self._seen[0]

    def __iter__(self) -> Iterator[T]:
        while (item := self.peek()) is not None:
            self._seen.clear()
            yield item
