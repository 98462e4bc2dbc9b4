"""The batches of an epoch that all ranks can read: bad images, and what ranks tell each other once a step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.parallel.inputs import Microbatch, Read, Shape

# Images that cannot be read: a rank that finds one tells the others, and all stop, or leave it out, together.


class UnreadableImages(Refusal):
    """Images that cannot be read end the run. All ranks raise it together."""


class BadImages:
    """`policy` is "error" or "skip"; `known` says what is wrong with the images that were left out, and `of_index` with
    which. `logs`: each is logged too.
    """

    def __init__(self, comm: Communicator, policy: str, logs: bool = True) -> None:
        self.comm, self.logs = comm, logs
        self.policy = policy
        self.known: set[str] = set()
        self.of_index: dict[int, str] = {}

    @property
    def skipped(self) -> int:
        return len(self.known)

    def require_alike(self, batch: Batch) -> None:
        """Raise Refusal on all ranks if some have another image or label of a sample. Collective if it is compared.

        A dataset of the user's may draw random numbers from wherever it likes, and read another file on each rank.
        """
        if batch.digests is None or self.comm.size == 1:
            return
        mine = torch.tensor(batch.digests, dtype=torch.int64)
        known = torch.where(mine < 0, torch.iinfo(torch.int64).min, -mine)  # so that the largest is the smallest
        most, least = self.comm.all_reduce(torch.stack([mine, known]), "max")
        unlike = ((most >= 0) & (most != -least)).any(1).nonzero().flatten().tolist()
        if unlike:
            raise Refusal(
                f"the dataset gives sample {batch.indices[unlike[0]]} otherwise on some ranks than on others: its "
                "random parts must draw from the generators of Python, NumPy or PyTorch, which get the same state "
                "for a sample on all ranks, and all ranks must see the same files. A dataset that draws for some "
                "samples alone needs `num_workers` 0"
            )

    def agree(
        self, batch: Batch, microbatches: Sequence[Microbatch], reads: Sequence[Read]
    ) -> tuple[Batch, tuple[Microbatch, ...]] | None:
        """The batch without the images that some rank could not read, and how that is divided. Collective.

        `reads` says what each of this rank's tiles is of. Microbatches without images are left out, and a batch without
        any is None. Raises on all ranks: UnreadableImages by policy "error", and Refusal for a problem that is no
        image's.
        """
        errors: dict[int, str] = {}
        for found, problem in self.comm.all_gather_object((batch.errors, batch.problem)):
            if problem is not None:
                raise Refusal(problem)
            errors |= found
        if not errors:
            return batch, tuple(microbatches)
        if self.policy == "error":
            raise UnreadableImages(f"{errors[min(errors)]}; `on_bad_image` skip leaves such images out")
        for position in sorted(errors):
            self.of_index[batch.indices[position]] = errors[position]
            if errors[position] not in self.known:
                self.known.add(errors[position])
                if self.logs:
                    logging.getLogger(__name__).warning("skipped: %s", errors[position])
        keep = [position for position in range(len(batch.indices)) if position not in errors]
        if not keep:
            return None
        left = [microbatch.without(errors) for microbatch in microbatches]
        tiles = tuple(
            tile[[position - read.box.batch.start for position in keep if position in range(*read.box.batch)]]
            for tile, read in zip(batch.tiles, reads, strict=True)
            if not read.microbatch.without(errors).samples.empty
        )
        indices = tuple(batch.indices[position] for position in keep)
        sizes = batch.sizes and tuple(batch.sizes[position] for position in keep)
        weights = None if batch.weights is None else batch.weights[keep]
        batch = replace(batch, tiles=tiles, labels=batch.labels[keep], weights=weights, indices=indices, sizes=sizes)
        batch = replace(batch, errors={}, digests=None)
        return batch, tuple(microbatch for microbatch in left if not microbatch.samples.empty)


# What the ranks of a run tell each other once a step: has it to stop, can one not save, or not read the next batch?
#
# The sum of loss and gradient norm, which every step needs, carries the news of all ranks: a step has that one round
# over all ranks, and no other. So each rank looks at the next batch while it makes a step.


class ControlFlags(NamedTuple):
    """Flags of any rank: a signal asks to stop, a checkpoint cannot be written, an image cannot be read."""

    stop: bool
    cannot_save: bool
    bad_image: bool

    @classmethod
    def of_all(cls, comm: Communicator, mine: "ControlFlags") -> "ControlFlags":
        """The flags of all ranks, by an exchange of its own. Collective."""
        return cls.heard(comm.all_reduce(torch.tensor(mine, dtype=torch.int32)).tolist())

    @classmethod
    def heard(cls, sums: Sequence[float]) -> "ControlFlags":
        """From how many ranks told each of it."""
        return cls(*(count > 0 for count in sums))


Divided = tuple[tuple[Microbatch, ...], Sequence[Read]]
OfSamples = Sequence[Shape] | None  # the size of each sample, where they differ


class Reading:
    """Goes through the batches of `epoch` from number `start` on: (batch, microbatches) for each that is left.

    `divide(num_samples, sizes)` says how a batch is divided, and what each of this rank's tiles is of;
    `own(bad_image)` what this rank has to tell. `used` counts the epoch's batches that were given out, and those before
    them; `news` are the last flags of all ranks: in a step, if `hear` got the sums of what `tell` gave, else ahead of a
    batch.

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
        divide: Callable[[int, OfSamples], Divided],
        own: Callable[[bool], ControlFlags],
    ) -> None:
        self._comm, self._bad_images, self._divide, self._own = comm, bad_images, divide, own
        self._num_batches = len(loader)
        self._batches: Iterator[Batch] = loader.epoch(epoch, start)
        self._next: list[Batch | None] = []  # if it was looked at, None at the end
        self._heard = False
        self.used = start
        self.news = ControlFlags(False, False, False)

    def tell(self) -> ControlFlags:
        """The flags of this rank in a step, with those of the next batch."""
        following = self._peek()
        return self._own(following is not None and following.is_short)

    def hear(self, sums: Sequence[float]) -> None:
        """Take the flags of all ranks in the step."""
        self.news, self._heard = ControlFlags.heard(sums), True

    def _peek(self) -> Batch | None:
        """The next batch, which stays the next one; None at the end."""
        if not self._next:
            self._next.append(next(self._batches, None))
        return self._next[0]

    def __iter__(self) -> Iterator[tuple[Batch, tuple[Microbatch, ...]]]:
        number = self.used
        while (batch := self._peek()) is not None:
            self._next.clear()
            number += 1
            if not self._heard:
                self.news = ControlFlags.of_all(self._comm, self._own(batch.is_short))
            self._heard = False
            self._bad_images.require_alike(batch)
            microbatches, reads = self._divide(len(batch.indices), batch.sizes)
            found = self._bad_images.agree(batch, microbatches, reads) if self.news.bad_image else (batch, microbatches)
            if found is not None:
                self.used = number
                yield found
        if self.used == 0:
            known = min(self._bad_images.known)
            raise Refusal(f"no batch is left of an epoch's {self._num_batches}: {known}")
