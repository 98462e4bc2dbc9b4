"""Batches of tiles: every rank goes through the same samples in the same order, and reads its own boxes of a batch."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Literal, TypeVar

import numpy as np

from mpi4dl.datasets.augment import SHUFFLE_STREAM, Mixup
from mpi4dl.datasets.base import DatasetError, task_of
from mpi4dl.datasets.transform import View
from mpi4dl.datasets.transformed import Batch, TransformedImages
from mpi4dl.geometry import Box, ceil_div

# Compute the items of a sequence ahead of time in threads, and hand them out in order.

T = TypeVar("T")

# How long leaving an iteration waits for readers in the middle of an item; a disk that hangs must not hang the program.
JOIN_SECONDS = 5.0


def prefetched(compute: Callable[[int], T], count: int, num_workers: int, depth: int) -> Generator[T, None, None]:
    """compute(0), compute(1), ..., compute(count - 1), up to `depth` of them ahead of the consumer.

    An error of `compute` is raised in the consumer at the turn of that item, and ends the iteration. Leave it early
    with `close`. The threads are daemons: an iteration that is forgotten stops them as well, and so does the
    interpreter's exit, before it takes itself apart under a thread that is still decoding.
    """
    tasks: _Tasks[T] = SimpleQueue()
    ahead: deque[Future[T]] = deque()
    positions = iter(range(count))
    names = [f"mpi4dl-reader-{i}" for i in range(min(num_workers, count))]
    threads = [Thread(target=_work, args=(compute, tasks), name=name, daemon=True) for name in names]

    def submit(many: int) -> None:
        for position in islice(positions, many):
            ahead.append(Future())
            tasks.put((position, ahead[-1]))

    def handed_out() -> Generator[T, None, None]:
        try:
            while ahead:
                submit(1)
                yield ahead.popleft().result()
        finally:
            stop()

    found = handed_out()
    stop = weakref.finalize(found, _stop, tasks, threads)
    for thread in threads:
        thread.start()
    submit(depth)
    return found


_Tasks = SimpleQueue[tuple[int, Future[T]] | None]  # positions, or None for a thread that ends


def _work(compute: Callable[[int], T], tasks: _Tasks[T]) -> None:
    while (task := tasks.get()) is not None:
        position, future = task
        try:
            future.set_result(compute(position))
        except BaseException as error:
            future.set_exception(error)
        del task, future  # the result is the consumer's


def _stop(tasks: _Tasks[T], threads: Sequence[Thread]) -> None:
    with suppress(Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    if current_thread() in threads:
        return  # the garbage collector ran in a worker
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


# In which order an epoch goes through the samples: the same on every rank, by (seed, epoch) alone.

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


__all__ = ["Batch", "Loader"]


class Loader:
    """Goes through a dataset in global batches of `batch_size` images, of which this rank reads its boxes.

    Without a `view` it goes through samples that read their own batches, such as `text.dataset.TokenBatches`.

    `boxes_of(num_samples)` are the boxes that this rank reads of a global batch of so many images, in positions of that
    batch and pixels of the view: `lambda n: [Tiling.even(grid, (n, height, width)).owned(rank)]`. Where each image has
    its own size, it is called as `boxes_of(num_samples, sizes)`. A rank that holds no
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
        dataset: Any,
        view: View | None,
        batch_size: int,
        boxes_of: Callable[..., Sequence[Box]],
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
        self._samples: Any = dataset
        if view is not None:
            self._samples = TransformedImages(dataset, view, on_bad_image == "report", lazy, mixup)
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
        if not self._shuffle:
            order = list(range(len(self._samples)))
        elif self._classes is not None:
            order = balanced(self._classes, self._seed, epoch)
        else:
            order = shuffled(len(self._samples), self._seed, epoch)
        return self._batches(order, epoch, start)

    def _batches(self, order: list[int], epoch: int, start: int) -> Iterator[Batch]:
        again = repeats(order)

        def compute(position: int) -> Batch:
            first = (start + position) * self._batch_size
            part = slice(first, first + self._batch_size)
            indices = tuple(order[part])
            samples = self._samples
            sizes = samples.sizes(indices, epoch, again[part]) if isinstance(samples, TransformedImages) else None
            boxes = self._boxes_of(len(indices)) if sizes is None else self._boxes_of(len(indices), sizes)
            return replace(samples.read(indices, epoch, boxes, tuple(again[part])), sizes=sizes)

        count = len(self) - start
        if self._num_workers == 0:
            yield from self._timed(map(compute, range(count)))
            return
        with closing(prefetched(compute, count, self._num_workers, self._prefetch)) as batches:
            yield from self._timed(batches)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.wait_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch
