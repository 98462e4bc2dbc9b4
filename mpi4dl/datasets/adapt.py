"""A dataset of the user's own as the loaders need it: its face looked at once, its samples named."""

from collections.abc import Sequence
from typing import Any

from mpi4dl.datasets.base import DatasetError, Image

FACE = ("__len__", "label", "image", "channels")


class OwnDataset:
    """A dataset of the user's; a sample without a name is called by its number.

    Raises:
        DatasetError: it lacks a part of what `base.Dataset` names, or has no samples.
    """

    def __init__(self, whole: Any) -> None:
        kind = type(whole).__name__
        missing = [name for name in FACE if not hasattr(whole, name)]
        if missing:
            raise DatasetError(
                f"the dataset {kind} has no {', '.join(missing)}: it needs __len__, channels, label(index) and "
                "image(index), as mpi4dl.datasets.Dataset says"
            )
        if len(whole) < 1:
            raise DatasetError(f"the dataset {kind} has no samples")
        if not isinstance(whole.channels, int) or whole.channels < 1:
            raise DatasetError(f"the dataset {kind} has {whole.channels!r} channels: it must be a number of at least 1")
        self.whole = whole
        self.classes: tuple[str, ...] = tuple(map(str, getattr(whole, "classes", ())))
        self.channels: int = whole.channels

    def __len__(self) -> int:
        return len(self.whole)

    def name(self, index: int) -> str:
        return str(self.whole.name(index)) if hasattr(self.whole, "name") else str(index)

    def label(self, index: int) -> Any:
        return self.whole.label(index)

    def image(self, index: int) -> Image:
        found: Image = self.whole.image(index)
        return found


def adapt(found: Any) -> OwnDataset | tuple[OwnDataset, OwnDataset]:
    """A dataset, or a pair of them to train on and to validate with. Raises DatasetError."""
    if isinstance(found, Sequence) and not hasattr(found, "image"):
        if len(found) != 2:
            raise DatasetError(f"{len(found)} datasets: expected one, or a pair to train on and to validate with")
        return OwnDataset(found[0]), OwnDataset(found[1])
    return OwnDataset(found)
