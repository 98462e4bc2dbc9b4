"""Counts the bytes of tensors as they come and go, without the memory for them: on the meta device too."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class TensorMeter(TorchDispatchMode):
    """The bytes of the tensors that operators made within it and that are not freed yet: now, and at most.

    `largest_bytes` are those of the largest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        results = function(*args, **(kwargs or {}))
        for storage in _storages(results):
            place, size = storage._cdata, storage.nbytes()
            if place not in given and place not in self._known:
                self._known.add(place)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                self.largest_bytes = max(self.largest_bytes, size)
                weakref.finalize(storage, self._freed, place, size)
        return results

    def _freed(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live_bytes -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()
