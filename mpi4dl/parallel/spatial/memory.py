"""What tensors that share memory know in common: who they are, and which copies PyTorch would have made views.

A view of pixels that other ranks hold, or of all pixels in one dim, is a copy here. A write to one of the two would
then have to reach the other:

      x = spread              y = x.flatten(2)        gathered, so y is a copy
      y.add_(1)               found when x is used next: PyTorch counts the writes to y's memory
      x.add_(1)               refused, as long as y is there; so is a write to a copy that is spread itself
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WRITTEN_COPY = "a view of it that is a copy on tiles, as a reshape that merges pixels, was written in place"
WRITING_COPY = "it would write in place to a copy, where PyTorch would make a view of another tensor"
WRITING_COPIED = "it would write in place to a tensor of which a copy is in use, where PyTorch would have made a view"

IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv div floordiv mod pow and or xor lshift rshift".split()}
NOT_IN_PLACE = {"requires_grad_"}


class Copy(NamedTuple):
    """A copy of a memory: its storage, and a counter of writes to it, if it is a plain tensor."""

    storage: StorageWeakRef
    counter: Tensor | None
    writes: int


class Memory:
    """The memory of one tensor and all its views on this rank."""

    def __init__(self) -> None:
        self.source: Memory | None = None
        self.tensors: list[Callable[[], Any]] = []
        self.copies: list[Copy] = []

    def add_copy(self, copy: Tensor, memory: "Memory | None" = None) -> None:
        """Take note of a copy: nobody may write to one that is spread, which has a `memory`. Writes to a plain one are
        counted by PyTorch.
        """
        counter = None
        if memory is not None:
            memory.source = self
        else:
            counter = copy.detach()
            counter.data = counter.new_empty(0)  # keeps counting, without keeping the storage
        known = Copy(StorageWeakRef(copy.untyped_storage()), counter, 0 if counter is None else counter._version)
        of: Memory | None = self
        while of is not None:  # a copy of a copy is one of both
            of.copies.append(known)
            of = of.source

    def problem_of_reading(self) -> str:
        if any(copy.counter is not None and copy.counter._version != copy.writes for copy in self.copies):
            return WRITTEN_COPY
        return ""

    def problem_of_writing(self) -> str:
        if self.source is not None:
            return WRITING_COPY
        self.copies = [copy for copy in self.copies if not copy.storage.expired()]
        return WRITING_COPIED if self.copies else ""


def writes(function: Any, options: dict[str, Any]) -> bool:
    """Whether a function writes to its first argument: `x.add_(1)`, `x += 1`, `x[0] = 1`, `F.relu(x, inplace=True)`."""
    return _writes_by_name(function) or (bool(options) and options.get("inplace") is True)


@cache
def _writes_by_name(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    by_name = (name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE) or name in IN_PLACE
    return by_name or name == "__setitem__"


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def countable(x: Tensor) -> Tensor:
    """x, or a clone of it where PyTorch would not count the writes to it."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()
