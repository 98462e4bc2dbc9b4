"""Batches of tiles: every rank goes through the same samples in the same order, and reads its own boxes of a batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
import torch

from mpi4dl.datasets.augment import SHUFFLE_STREAM
from mpi4dl.datasets.base import BadImage, Dataset, DatasetError, Image
from mpi4dl.datasets.lazy import LazyImages
from mpi4dl.datasets.prefetch import Prefetcher
from mpi4dl.datasets.view import View
from mpi4dl.geometry import Box, ceil_div

MASK_DIMS = 2  # labels of so many dims or more are masks; of volumes, those of as many as these


@dataclass(frozen=True)
class Batch:
    """This rank's boxes of a global batch.

    `tiles` are float32 (samples in the box, channels, rows, columns), one for each box, or `LazyImages` of them.
    `labels` and `indices` are
    those of the whole global batch: classes and other integers as int64, floating point in its own type, and masks
    (samples, ..., height, width) as the images are shown. `errors`, if the loader reports them, maps positions in the
    global batch to what is wrong with that image, whose tiles are zeros. A position is there only on ranks that hold a
    part of the image, and perhaps not on all. `problem`, reported too, is what this rank alone may be short of: a file
    that others see, a package.
    """

    tiles: tuple[torch.Tensor | LazyImages, ...]
    labels: torch.Tensor
    indices: tuple[int, ...]
    errors: dict[int, str]
    problem: str | None = None

    @property
    def is_short(self) -> bool:
        """Whether this rank could not read something."""
        return bool(self.errors) or self.problem is not None


class Loader:
    """Goes through a dataset in global batches of `batch_size` images, of which this rank reads its boxes.

    `boxes_of(num_samples)` are the boxes that this rank reads of a global batch of so many images, in positions of that
    batch and pixels of the view: `lambda n: [Tiling.even(grid, (n, height, width)).owned(rank)]`. A rank that holds no
    pixels has none, or empty ones; it reads nothing and still sees the labels.

    An image that cannot be read raises `BadImage` where its batch is wanted; by `on_bad_image` "report" it is named in
    the batch's `errors` instead, for loops whose ranks then agree on what to do without it.

    With `lazy`, tiles are `LazyImages`, of the samples of their boxes, which read pixels when they are asked for; only
    what opening an image finds wrong with it is found beforehand.

    `num_workers` threads read ahead, up to `prefetch` batches; 0 reads in the caller's thread when a batch is wanted.
    The order of samples depends on (`seed`, epoch) alone, never on the number of workers.

    Attributes:
        wait_seconds: how long the consumer has waited for batches, since the loader was made.

    Raises:
        ValueError: a batch size, a number of workers or a depth that cannot be, or nothing left by `drop_last`.
    """

    def __init__(
        self,
        dataset: Dataset,
        view: View,
        batch_size: int,
        boxes_of: Callable[[int], Sequence[Box]],
        *,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch: int = 2,
        on_bad_image: Literal["error", "report"] = "error",
        lazy: bool = False,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            asked = f"batch_size={batch_size}, num_workers={num_workers}, prefetch={prefetch}"
            raise ValueError(f"{asked}: needs a batch_size and a prefetch of at least 1, and 0 or more workers")
        if on_bad_image not in ("error", "report"):
            raise ValueError(f"on_bad_image={on_bad_image!r}: expected error or report")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"{len(dataset)} images to train on do not fill one batch of {batch_size}: choose a smaller batch size"
            )
        self._dataset, self._view, self._batch_size, self._boxes_of = dataset, view, batch_size, boxes_of
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._lazy = lazy
        self._num_workers, self._prefetch, self._reports = num_workers, prefetch, on_bad_image == "report"
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        if self._drop_last:
            return len(self._dataset) // self._batch_size
        return ceil_div(len(self._dataset), self._batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on. Leaving the loop early ends the reading threads.

        Raises:
            ValueError: `start` lies beyond the epoch.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: the epoch has {len(self)} batches, so start must be in 0 to {len(self)}")
        return self._batches(self._order(epoch), epoch, start)

    def _batches(self, order: list[int], epoch: int, start: int) -> Iterator[Batch]:
        def compute(position: int) -> Batch:
            first = (start + position) * self._batch_size
            return self._read(tuple(order[first : first + self._batch_size]), epoch)

        count = len(self) - start
        if self._num_workers == 0:
            yield from self._timed(map(compute, range(count)))
            return
        prefetcher = Prefetcher(compute, count, self._num_workers, self._prefetch)
        try:
            yield from self._timed(prefetcher)
        finally:
            prefetcher.close()

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.wait_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._dataset)))
        return np.random.default_rng((SHUFFLE_STREAM, self._seed, epoch)).permutation(len(self._dataset)).tolist()

    def _read(self, indices: tuple[int, ...], epoch: int) -> Batch:
        errors: dict[int, str] = {}
        problems: list[str] = []
        labels = [_label(self._dataset, index) for index in indices]
        tiles = tuple(self._tile(box, indices, labels, epoch, errors, problems) for box in self._boxes_of(len(indices)))
        shown = [
            torch.from_numpy(self._view.mask(label.numpy(), self._view.variation(index, epoch)))
            if self._is_mask(label)
            else label
            for index, label in zip(indices, labels, strict=True)
        ]
        return Batch(tiles, _stacked(shown, indices), indices, errors, next(iter(problems), None))

    def _tile(
        self,
        box: Box,
        indices: tuple[int, ...],
        labels: Sequence[torch.Tensor],
        epoch: int,
        errors: dict[int, str],
        problems: list[str],
    ) -> torch.Tensor | LazyImages:
        samples, *space = box.shape
        tile = torch.zeros((0 if self._lazy else samples, self._dataset.channels, *space))
        for position in range(*box.batch) if not box.empty else ():
            index = indices[position]
            out = torch.empty(0) if self._lazy else tile[position - box.batch.start]
            try:
                image = self._dataset.image(index)
                self._check_mask(labels[position], image, index)
                if self._lazy:
                    continue
                variation = self._view.variation(index, epoch)
                self._view.tile(image, *box.space, variation=variation, out=out.numpy())
            except DatasetError as error:
                if not self._reports:
                    raise
                if isinstance(error, BadImage):
                    errors[position] = str(error)
                else:
                    problems.append(str(error))
                out.zero_()
        if self._lazy:
            return LazyImages(self._dataset, self._view, indices[slice(*box.batch)], epoch)
        return tile

    def _is_mask(self, label: torch.Tensor) -> bool:
        return label.dim() >= max(MASK_DIMS, len(self._view.size))

    def _check_mask(self, label: torch.Tensor, image: Image, index: int) -> None:
        if self._is_mask(label) and label.shape[-len(image.size) :] != image.size:
            size = " x ".join(map(str, image.size))
            raise ValueError(
                f"the label of sample {index} has shape {tuple(label.shape)}, but its image {size} "
                "pixels: labels of two or more dims are masks (..., height, width) of their image; flatten others"
            )


def _label(dataset: Dataset, index: int) -> torch.Tensor:
    """A label as a tensor: of integers, int64, and else of its own type."""
    found = dataset.label(index)
    try:
        label = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the label of sample {index} is {found!r}: expected a number, numbers, or a mask") from error
    return label if label.is_floating_point() or label.is_complex() else label.long()


def _stacked(labels: Sequence[torch.Tensor], indices: Sequence[int]) -> torch.Tensor:
    for label, index in zip(labels, indices, strict=True):
        if label.shape != labels[0].shape:
            first = f"{tuple(labels[0].shape)} (sample {indices[0]})"
            raise ValueError(f"labels of one batch have shapes {first} and {tuple(label.shape)} (sample {index})")
    dtype = reduce(torch.promote_types, (label.dtype for label in labels))
    return torch.stack([label.to(dtype) for label in labels])
