"""Images that cannot be read: a rank that finds one tells the others, and all stop, or leave it out, together."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.parallel.microbatches import Microbatch, Read


class UnreadableImages(Refusal):
    """Images that cannot be read end the run. All ranks raise it together."""


class BadImages:
    """`policy` is "error" or "skip"; `known` says what is wrong with the images that were left out."""

    def __init__(self, comm: Communicator, policy: str) -> None:
        self.comm = comm
        self.policy = policy
        self.known: set[str] = set()

    @property
    def skipped(self) -> int:
        return len(self.known)

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
            if errors[position] not in self.known:
                self.known.add(errors[position])
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
        batch = replace(batch, tiles=tiles, labels=batch.labels[keep], indices=indices, errors={})
        return batch, tuple(microbatch for microbatch in left if not microbatch.samples.empty)
