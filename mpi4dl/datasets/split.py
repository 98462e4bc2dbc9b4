"""Choose which samples train and which validate: by a hash of each one's name, so that a new one moves no other."""

import hashlib
from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any, Protocol

from mpi4dl.datasets.base import Dataset, DatasetError, Image, drawn, task_of

_NO_SAMPLES: Mapping[str, bool] = {}


class Named(Dataset, Protocol):
    """A dataset whose samples have names that stay theirs when others come or go."""

    def name(self, index: int) -> str: ...


class Subset:
    """Some samples of a dataset, in the given order."""

    def __init__(self, whole: Named, indices: Sequence[int]) -> None:
        self.whole, self.indices = whole, indices
        self.classes = whole.classes
        self.channels = whole.channels
        self.task = task_of(whole)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def draws(self) -> bool:
        """Whether the samples are varied by random numbers of the dataset's own."""
        return bool(getattr(self.whole, "draws", False))

    @property
    def values(self) -> str | None:
        """The form in which values of volumes are read; None for images."""
        return getattr(self.whole, "values", None)

    @property
    def compared(self) -> bool:
        """Whether ranks compare what they have of a sample."""
        return bool(getattr(self.whole, "compared", False))

    def drawn(self, key: tuple[int, ...]) -> "Subset":
        """The samples as they are drawn by a key."""
        whole = drawn(self.whole, key)
        return self if whole is self.whole else Subset(whole, self.indices)

    def tissue_patches(self, index: int, patch: int, key: tuple[int, ...] = ()) -> Any:
        """The patches of a slide that show tissue, as `SlideFolder.tissue_patches`; None for other images."""
        find = getattr(self.whole, "tissue_patches", None)
        return None if find is None else find(self.indices[index], patch, key)

    def name(self, index: int) -> str:
        return self.whole.name(self.indices[index])

    def label(self, index: int) -> Any:
        return self.whole.label(self.indices[index])

    def image(self, index: int) -> Image:
        return self.whole.image(self.indices[index])


def split(
    dataset: Named,
    fraction: float,
    seed: int = 0,
    validating: Mapping[str, bool] = _NO_SAMPLES,
    *,
    otherwise: str = "make folders train and val",
    validates: bool = True,
) -> tuple[Subset, Subset]:
    """Set `fraction` of the samples aside for validation: those whose name and `seed` hash below it.

    `validating` says it of samples that were split before, by name, and they stay where they were. `otherwise` is what
    can be done instead, for errors. There may be none to validate with where nothing `validates`.

    Raises:
        DatasetError: a fraction outside (0, 1), or one that leaves nothing to train on or to validate with.
    """
    names = [dataset.name(index) for index in range(len(dataset))]
    aside = set_aside(names, fraction, seed, validating, otherwise=otherwise, validates=validates)
    return (
        Subset(dataset, [index for index, held in enumerate(aside) if not held]),
        Subset(dataset, [index for index, held in enumerate(aside) if held]),
    )


def set_aside(
    names: Sequence[str],
    fraction: float,
    seed: int = 0,
    validating: Mapping[str, bool] = _NO_SAMPLES,
    *,
    kind: str = "images",
    otherwise: str = "make folders train and val",
    validates: bool = True,
) -> list[bool]:
    """Which of what has these names validates, as `split` says; errors name its `kind`, and what else can be done.

    Raises:
        DatasetError: a fraction outside (0, 1), or one that leaves nothing to train on or to validate with.
    """
    if not 0.0 < fraction < 1.0:
        raise DatasetError(f"validation_fraction={fraction}: the share set aside for validation must be in (0, 1)")
    places = [place(name, seed) for name in names]
    aside = [validating.get(name, at < fraction) for name, at in zip(names, places, strict=True)]
    if (validates and not any(aside)) or all(aside):
        # A share that would do, rounded to where it still does.
        lacks, remedy = (
            ("validate with", f"more than {ceil(100 * min(places)) / 100}")
            if not any(aside)
            else ("train on", f"less than {floor(100 * max(places)) / 100}")
        )
        raise DatasetError(
            f"`val_fraction` {fraction} leaves none of {len(names)} {kind} to {lacks}, since each goes by a "
            f"hash of its name: choose {remedy}, or {otherwise}"
        )
    return aside


def place(name: str, seed: int) -> float:
    """Where in [0, 1) a name lies, anywhere alike."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
