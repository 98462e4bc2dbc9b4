"""Choose which samples train and which validate, the same way on every rank."""

from collections.abc import Sequence

import numpy as np

from mpi4dl.datasets.augment import SPLIT_STREAM
from mpi4dl.datasets.base import Dataset, DatasetError, Image


class Subset:
    """Some samples of a dataset, in the given order."""

    def __init__(self, whole: Dataset, indices: Sequence[int]) -> None:
        self._whole, self._indices = whole, indices
        self.classes = whole.classes
        self.channels = whole.channels

    def __len__(self) -> int:
        return len(self._indices)

    def label(self, index: int) -> int:
        return self._whole.label(self._indices[index])

    def image(self, index: int) -> Image:
        return self._whole.image(self._indices[index])


def split(dataset: Dataset, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Set `fraction` of every class aside for validation, at least one image of each class that has two or more.

    Raises:
        DatasetError: a fraction outside (0, 1), or one that leaves nothing to train on or to validate with.
    """
    if not 0.0 < fraction < 1.0:
        raise DatasetError(f"validation_fraction={fraction}: the share set aside for validation must be in (0, 1)")
    labels = np.array([dataset.label(i) for i in range(len(dataset))])
    training: list[int] = []
    validation: list[int] = []
    for label in range(len(dataset.classes)):
        members = np.flatnonzero(labels == label)
        np.random.default_rng((SPLIT_STREAM, seed, label)).shuffle(members)
        aside = min(max(1, round(fraction * len(members))), len(members) - 1) if len(members) else 0
        validation += members[:aside].tolist()
        training += members[aside:].tolist()
    if not validation:
        raise DatasetError(
            f"{len(dataset)} images in {len(dataset.classes)} classes leave none to validate with: a class needs two "
            "images or more"
        )
    return Subset(dataset, sorted(training)), Subset(dataset, sorted(validation))
