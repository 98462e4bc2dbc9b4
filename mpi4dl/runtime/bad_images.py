"""Images that cannot be read: a rank that finds one tells the others, and all stop, or leave it out, together."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.geometry import Interval
from mpi4dl.parallel.plan import Microbatch
from mpi4dl.runtime.folder import LOGGER_NAME


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
        self, batch: Batch, microbatches: Sequence[Microbatch], held: Sequence[Interval]
    ) -> tuple[Batch, tuple[Microbatch, ...]] | None:
        """The batch without the images that some rank could not read, and how that is divided. Collective.

        `held` says which of the batch's images each of this rank's tiles is of. A batch of which a microbatch would be
        left without images is given up: None. Raises Refusal on all ranks by policy "error".
        """
        errors: dict[int, str] = {}
        for found in self.comm.all_gather_object(batch.errors):
            errors |= found
        if not errors:
            return batch, tuple(microbatches)
        if self.policy == "error":
            raise Refusal(f"{errors[min(errors)]}; --on-bad-image skip leaves such images out")
        for position in sorted(errors):
            if errors[position] not in self.known:
                self.known.add(errors[position])
                logging.getLogger(LOGGER_NAME).warning("skipped: %s", errors[position])
        keep = [position for position in range(len(batch.indices)) if position not in errors]
        left = tuple(microbatch.without(errors) for microbatch in microbatches)
        if any(microbatch.samples.empty for microbatch in left):
            return None
        tiles = tuple(
            tile[[position - part.start for position in keep if part.start <= position < part.stop]]
            for tile, part in zip(batch.tiles, held, strict=True)
        )
        indices = tuple(batch.indices[position] for position in keep)
        return replace(batch, tiles=tiles, labels=batch.labels[keep], indices=indices, errors={}), left
