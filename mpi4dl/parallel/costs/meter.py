"""Counts the bytes of tensors as they come and go, without the memory for them: on the meta device too."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
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


class SavedTensors:
    """Counts the bytes that autograd saves for the backward pass, each storage once, without those of `own` tensors.

    `with saved.counting(): ...` counts what is saved in there, on any device, meta too. Storages are kept alive, for
    the address of one that is freed is used again. `turns` says by address in which `turn` each was saved first.
    """

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        self.turn = 0
        self.turns: dict[int, int] = {}
        self.num_bytes = 0
        self._storages: list[torch.UntypedStorage] = []
        self._own: list[torch.UntypedStorage] = []
        self._addresses: set[int] = set()
        self.disregard(own)

    def disregard(self, own: Iterable[Tensor]) -> None:
        """Do not count these tensors from now on."""
        for tensor in own:
            self._own.append(tensor.untyped_storage())
            self._addresses.add(self._own[-1]._cdata)

    def counting(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self.keep, lambda tensor: tensor)

    def let_go(self) -> None:
        """Keep no storage alive from now on, so that a backward pass can free it; `num_bytes` stays."""
        self._storages.clear()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor as saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._addresses and storage._cdata not in self.turns:
            self.turns[storage._cdata] = self.turn
            self.num_bytes += storage.nbytes()
            self._storages.append(storage)
        return tensor
