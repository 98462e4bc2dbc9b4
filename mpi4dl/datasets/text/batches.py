"""Batches of token samples, of which a rank reads its own intervals."""

from collections.abc import Sequence

import numpy as np
import torch

from mpi4dl.datasets.shown import Batch
from mpi4dl.datasets.text.dataset import MaskedTokenDataset, TokenDataset
from mpi4dl.geometry import Box


class TokenBatches:
    """The samples of a dataset as batches: tokens (samples, length) and targets (samples, context), int64."""

    noun = "samples of text"

    def __init__(self, dataset: TokenDataset | MaskedTokenDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(
        self, indices: tuple[int, ...], epoch: int, boxes: Sequence[Box], repeats: tuple[int, ...] | None = None
    ) -> Batch:
        """These boxes of samples and tokens, and all targets; a repeat is no other.

        Raises DatasetError if the token file is damaged.
        """
        tiles = []
        for box in boxes:
            tile = np.empty(box.shape, np.int64)
            for row, index in zip(tile, indices[slice(*box.batch)], strict=True):
                row[:] = self._dataset.read(index, box.space[0], epoch).tokens
            tiles.append(torch.from_numpy(tile))
        targets = [self._dataset.read(index, None, epoch).targets for index in indices]
        return Batch(tuple(tiles), torch.from_numpy(np.stack(targets)), indices, {})
