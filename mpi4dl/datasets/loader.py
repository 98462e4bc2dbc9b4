"""Batches of tiles: every rank goes through the same samples in the same order, and reads its own boxes of a batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mpi4dl.datasets.augment import SHUFFLE_STREAM
from mpi4dl.datasets.base import BadImage, Dataset
from mpi4dl.datasets.prefetch import Prefetcher
from mpi4dl.datasets.view import View
from mpi4dl.geometry import Box, ceil_div


@dataclass(frozen=True)
class Batch:
    """This rank's boxes of a global batch.

    `tiles` are float32 (samples in the box, channels, rows, columns), one for each box. `labels`, int64, and `indices`
    are those of the whole global batch. `errors` maps positions in the global batch to what is wrong with that image,
    whose tiles are zeros. A position is there only on ranks that hold a part of the image, and perhaps not on all.
    """

    tiles: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    indices: tuple[int, ...]
    errors: dict[int, str]


class Loader:
    """Goes through a dataset in global batches of `batch_size` images, of which this rank reads its boxes.

    `boxes_of(num_samples)` are the boxes that this rank reads of a global batch of so many images, in positions of that
    batch and pixels of the view: `lambda n: [Tiling.even(grid, (n, height, width)).owned(rank)]`. A rank that holds no
    pixels has none, or empty ones; it reads nothing and still sees the labels.

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
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            asked = f"batch_size={batch_size}, num_workers={num_workers}, prefetch={prefetch}"
            raise ValueError(f"{asked}: needs a batch_size and a prefetch of at least 1, and 0 or more workers")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"{len(dataset)} images to train on do not fill one batch of {batch_size}: choose a smaller batch size"
            )
        self._dataset, self._view, self._batch_size, self._boxes_of = dataset, view, batch_size, boxes_of
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._num_workers, self._prefetch = num_workers, prefetch
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
        tiles = tuple(self._tile(box, indices, epoch, errors) for box in self._boxes_of(len(indices)))
        labels = torch.tensor([self._dataset.label(index) for index in indices], dtype=torch.int64)
        return Batch(tiles, labels, indices, errors)

    def _tile(self, box: Box, indices: tuple[int, ...], epoch: int, errors: dict[int, str]) -> torch.Tensor:
        samples, height, width = box.shape
        tile = torch.zeros((samples, self._dataset.channels, height, width))
        for position in range(*box.batch) if not box.empty else ():
            index = indices[position]
            try:
                image = self._dataset.image(index)
                pixels = self._view.tile(image, box.rows, box.cols, self._view.variation(index, epoch))
            except BadImage as error:
                errors[position] = str(error)
                continue
            tile[position - box.batch.start] = torch.from_numpy(pixels)
        return tile
