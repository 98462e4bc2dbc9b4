"""Batches of tiles: every rank goes through the same samples in the same order, and reads its own boxes of a batch."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, cast

from mpi4dl.datasets.base import Dataset
from mpi4dl.datasets.mixing import Mixup
from mpi4dl.datasets.prefetch import Prefetcher
from mpi4dl.datasets.sampling import Sampling, balanced, classes_of, repeats, shuffled
from mpi4dl.datasets.shown import Batch, ShownImages
from mpi4dl.datasets.view import View
from mpi4dl.geometry import Box, ceil_div

__all__ = ["Batch", "Batches", "Loader"]


class Batches(Protocol):
    """Samples by index, of which a batch can be read; `noun` says what they are."""

    noun: str

    def __len__(self) -> int: ...

    def read(
        self, indices: tuple[int, ...], epoch: int, boxes: Sequence[Box], repeats: tuple[int, ...] | None = None
    ) -> Batch:
        """These boxes of the samples, as they are in this epoch, and what is to be learnt of all of them.

        `repeats` says of each sample how often it came before in the epoch; None: none did.
        """


class Loader:
    """Goes through a dataset in global batches of `batch_size` images, of which this rank reads its boxes.

    Without a `view` it goes through any `Batches`, such as those of text.

    `boxes_of(num_samples)` are the boxes that this rank reads of a global batch of so many images, in positions of that
    batch and pixels of the view: `lambda n: [Tiling.even(grid, (n, height, width)).owned(rank)]`. A rank that holds no
    pixels has none, or empty ones; it reads nothing and still sees the labels.

    An image that cannot be read raises `BadImage` where its batch is wanted; by `on_bad_image` "report" it is named in
    the batch's `errors` instead, for loops whose ranks then agree on what to do without it.

    With `lazy`, tiles are `LazyImages`, of the samples of their boxes, which read pixels when they are asked for; only
    what opening an image finds wrong with it is found beforehand.

    `num_workers` threads read ahead, up to `prefetch` batches; 0 reads in the caller's thread when a batch is wanted.
    The order of samples depends on (`seed`, epoch) alone, never on the number of workers: by `sampling` "shuffled" each
    once, by "balanced" each class equally often; a sample that comes again is varied anew. A dataset that draws random
    numbers of its own is read in the caller's thread (randomness.py). Mixed by `mixup`, a sample's box is read with the
    same of its partner.

    Attributes:
        wait_seconds: how long the consumer has waited for batches, since the loader was made.

    Raises:
        ValueError: a batch size, a number of workers or a depth that cannot be, nothing left by `drop_last`, or samples
            without a class that are to be balanced.
    """

    def __init__(
        self,
        dataset: Dataset | Batches,
        view: View | None,
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
        sampling: Sampling = "shuffled",
        mixup: Mixup | None = None,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            asked = f"batch_size={batch_size}, num_workers={num_workers}, prefetch={prefetch}"
            raise ValueError(f"{asked}: needs a batch_size and a prefetch of at least 1, and 0 or more workers")
        if on_bad_image not in ("error", "report"):
            raise ValueError(f"on_bad_image={on_bad_image!r}: expected error or report")
        self._samples: Batches
        if view is None:
            self._samples = cast(Batches, dataset)
        else:
            self._samples = ShownImages(cast(Dataset, dataset), view, on_bad_image == "report", lazy, mixup)
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"{len(dataset)} {self._samples.noun} to train on do not fill one batch of {batch_size}: choose a "
                "smaller `batch_size`"
            )
        self._batch_size, self._boxes_of = batch_size, boxes_of
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._num_workers = 0 if getattr(dataset, "draws", False) else num_workers
        self._prefetch = prefetch
        self._classes = classes_of(dataset) if sampling == "balanced" else None
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        if self._drop_last:
            return len(self._samples) // self._batch_size
        return ceil_div(len(self._samples), self._batch_size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on. Leaving the loop early ends the reading threads.

        Raises:
            ValueError: `start` lies beyond the epoch.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: the epoch has {len(self)} batches, so start must be in 0 to {len(self)}")
        return self._batches(self._order(epoch), epoch, start)

    def _batches(self, order: list[int], epoch: int, start: int) -> Iterator[Batch]:
        again = repeats(order)

        def compute(position: int) -> Batch:
            first = (start + position) * self._batch_size
            part = slice(first, first + self._batch_size)
            indices = tuple(order[part])
            return self._samples.read(indices, epoch, self._boxes_of(len(indices)), tuple(again[part]))

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
            return list(range(len(self._samples)))
        if self._classes is not None:
            return balanced(self._classes, self._seed, epoch)
        return shuffled(len(self._samples), self._seed, epoch)
