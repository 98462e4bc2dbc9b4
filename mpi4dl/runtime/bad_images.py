"""Images that cannot be read: a rank that finds one tells the others, and all stop, or leave it out, together."""

import logging
from dataclasses import replace

from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets import Batch
from mpi4dl.geometry import Interval
from mpi4dl.runtime.folder import LOGGER_NAME


class BadImages:
    """`policy` is "error" or "skip"; `skipped` counts the images that were left out."""

    def __init__(self, comm: Communicator, policy: str) -> None:
        self.comm = comm
        self.policy = policy
        self._known: set[str] = set()

    @property
    def skipped(self) -> int:
        return len(self._known)

    def agree(self, batch: Batch, held: Interval) -> Batch | None:
        """The batch without the images that some rank could not read; None if none is left. Collective.

        `held` says which of the batch's images this rank's tile is of. Raises Refusal on all ranks by policy "error".
        """
        errors: dict[int, str] = {}
        for found in self.comm.all_gather_object(batch.errors):
            errors |= found
        if not errors:
            return batch
        if self.policy == "error":
            raise Refusal(f"{errors[min(errors)]}; --on-bad-image skip leaves such images out")
        for position in sorted(errors):
            if errors[position] not in self._known:
                self._known.add(errors[position])
                logging.getLogger(LOGGER_NAME).warning("skipped: %s", errors[position])
        keep = [position for position in range(len(batch.indices)) if position not in errors]
        mine = [position - held.start for position in keep if held.start <= position < held.stop]
        if not keep:
            return None
        indices = tuple(batch.indices[position] for position in keep)
        return replace(batch, tile=batch.tile[mine], labels=batch.labels[keep], indices=indices, errors={})
