"""The bytes of all tensors that are alive."""

import gc
from collections.abc import Iterable

from torch import Tensor, nn


class LiveTensors:
    """Counts the storages of tensors that Python knows and that were made after this was."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()

    def num_bytes(self, more: Iterable[Tensor | None] = ()) -> int:
        """Each storage counts once. `more` are tensors that Python might not have met yet, such as gradients."""
        gc.collect()
        known = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        storages = [x.untyped_storage() for x in [*known, *_plain(more)] if not x.is_meta]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr()}.values())


def _plain(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Tensors themselves, and of a DTensor the local one."""
    from torch.distributed.tensor import DTensor

    there = [x for x in tensors if x is not None]
    return [x.to_local() if isinstance(x, DTensor) else x for x in there]
