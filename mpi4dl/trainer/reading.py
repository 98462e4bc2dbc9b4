"""The batches of an epoch that all ranks can read, and what the ranks tell each other on the way."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.parallel.microbatches import Microbatch, Read
from mpi4dl.trainer.bad_images import BadImages
from mpi4dl.trainer.news import Ahead, News

Divided = tuple[tuple[Microbatch, ...], Sequence[Read]]


class Reading:
    """Goes through the batches of `epoch` from number `start` on: (batch, microbatches) for each that is left.

    `divide(num_samples)` says how a batch is divided, and what each of this rank's tiles is of;
    `own(bad_image)` what this rank has to tell. `used` counts the epoch's batches that were given out, and those before
    them; `news` is what was told last: in a step, if `hear` got the sums of what `tell` gave, else ahead of a batch.

    Raises:
        UnreadableImages: on all ranks, an image, where that ends the run.
        Refusal: on all ranks, if an epoch has no batch left.
    """

    def __init__(
        self,
        comm: Communicator,
        loader: Any,
        epoch: int,
        start: int,
        bad_images: BadImages,
        divide: Callable[[int], Divided],
        own: Callable[[bool], News],
    ) -> None:
        self._comm, self._bad_images, self._divide, self._own = comm, bad_images, divide, own
        self._num_batches = len(loader)
        self._batches = Ahead[Batch](loader.epoch(epoch, start))
        self._heard = False
        self.used = start
        self.news = News(False, False, False)

    def tell(self) -> News:
        """What this rank has to tell in a step, with what it knows of the batch that comes next."""
        following = self._batches.peek()
        return self._own(following is not None and following.is_short)

    def hear(self, sums: Sequence[float]) -> None:
        """What all ranks told in the step."""
        self.news, self._heard = News.heard(sums), True

    def __iter__(self) -> Iterator[tuple[Batch, tuple[Microbatch, ...]]]:
        for number, batch in enumerate(self._batches, self.used + 1):
            if not self._heard:
                self.news = News.of_all(self._comm, self._own(batch.is_short))
            self._heard = False
            self._bad_images.require_alike(batch)
            microbatches, reads = self._divide(len(batch.indices))
            found = self._bad_images.agree(batch, microbatches, reads) if self.news.bad_image else (batch, microbatches)
            if found is not None:
                self.used = number
                yield found
        if self.used == 0:
            known = min(self._bad_images.known)
            raise Refusal(f"no batch is left of an epoch's {self._num_batches}: {known}")
