"""In which order an epoch goes through the samples: the same on every rank, by (seed, epoch) alone."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mpi4dl.datasets.augment import SHUFFLE_STREAM
from mpi4dl.datasets.base import DatasetError, task_of
from mpi4dl.geometry import ceil_div

Sampling = Literal["shuffled", "balanced"]


def shuffled(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Each sample once."""
    return np.random.default_rng((SHUFFLE_STREAM, seed, epoch)).permutation(num_samples).tolist()


def balanced(labels: Sequence[int], seed: int, epoch: int) -> list[int]:
    """As many samples as there are, of each class that has any equally many, or one more.

    Of a class all samples come before one comes again; which ones a large class shows differs from epoch to epoch.
    """
    random = np.random.default_rng((SHUFFLE_STREAM, seed, epoch))
    of_class = np.asarray(labels)
    classes = random.permutation(np.unique(of_class))
    drawn: list[int] = []
    for place, label in enumerate(classes):
        wanted = (len(of_class) - place + len(classes) - 1) // len(classes)
        members = np.flatnonzero(of_class == label)
        rounds = [random.permutation(members) for _ in range(ceil_div(wanted, len(members)))]
        drawn += np.concatenate(rounds)[:wanted].tolist() if rounds else []
    return random.permutation(drawn).tolist()


def repeats(order: Sequence[int]) -> list[int]:
    """Of each sample of an epoch, how often it came before."""
    seen: dict[int, int] = {}
    found = []
    for index in order:
        found.append(seen.get(index, 0))
        seen[index] = found[-1] + 1
    return found


def classes_of(dataset: Any) -> list[int]:
    """The class of each sample. Raises DatasetError if samples have no class."""
    if task_of(dataset) == "classify":
        found = [dataset.label(index) for index in range(len(dataset))]
        if all(isinstance(label, int | np.integer) for label in found):
            return [int(label) for label in found]
    raise DatasetError(
        f"labels to {task_of(dataset)} are not one class for each sample, by which samples could be counted or "
        "balanced: leave `sampling` shuffled"
    )


def class_counts(dataset: Any) -> tuple[int, ...]:
    """How many samples each class has, such as for weights of classes. Raises DatasetError if they have no class."""
    return tuple(np.bincount(classes_of(dataset), minlength=len(dataset.classes)).tolist())
