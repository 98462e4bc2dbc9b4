"""Images that cannot be read: a rank that finds one tells the others, and all stop, or leave it out, together."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.parallel.microbatches import Microbatch, Read


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
        batch = replace(batch, tiles=tiles, labels=batch.labels[keep], indices=indices, errors={}, digests=None)
        return batch, tuple(microbatch for microbatch in left if not microbatch.samples.empty)
