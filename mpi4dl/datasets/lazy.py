"""Images of a batch that are read box by box, when somebody asks: for images that are too large to lie in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mpi4dl.datasets.base import Dataset, drawn
from mpi4dl.datasets.view import View
from mpi4dl.geometry import Box


@dataclass(frozen=True)
class LazyImages:
    """The samples `indices` of a dataset, as `view` shows them in this epoch.

    `shape` is that of the tensor which they would be, (N, C, *size), and `dtype` its type. With `partners` each counts
    `share`, and its partner the rest: see mixing.py. `repeats`, and those of partners, say how often each came before
    in the epoch; (): none did.
    """

    dataset: Dataset
    view: View
    indices: tuple[int, ...]
    epoch: int
    dtype: torch.dtype = torch.float32
    partners: tuple[int, ...] = ()
    share: float = 1.0
    repeats: tuple[int, ...] = ()
    partners_repeats: tuple[int, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.indices), self.dataset.channels, *self.view.size))

    def __getitem__(self, positions: Sequence[int]) -> "LazyImages":
        """Those at these positions."""
        parts = (self.indices, self.partners, self.repeats, self.partners_repeats)
        kept = [tuple(of[position] for position in positions) if of else () for of in parts]
        return replace(self, indices=kept[0], partners=kept[1], repeats=kept[2], partners_repeats=kept[3])

    def read(self, box: Box) -> torch.Tensor:
        """Some samples, and some pixels along each axis of space: (samples, C, *space).

        Raises:
            DatasetError: an image cannot be read.
        """
        tile = self._read(self.indices, self.repeats, box)
        if self.partners:
            others = self._read(self.partners, self.partners_repeats, box)
            tile.mul_(self.share).add_(others, alpha=1.0 - self.share)
        return tile

    def _read(self, indices: tuple[int, ...], repeats: tuple[int, ...], box: Box) -> torch.Tensor:
        tile = torch.empty((box.batch.length, self.dataset.channels, *box.shape[1:]), dtype=self.dtype)
        if not box.empty:
            part = slice(*box.batch)
            again = repeats[part] or (0,) * len(tile)
            for index, repeat, out in zip(indices[part], again, tile, strict=True):
                image = drawn(self.dataset, self.view.key(self.epoch, repeat)).image(index)
                variation = self.view.variation(index, self.epoch, repeat)
                self.view.tile(image, *box.space, variation=variation, out=out.numpy())
        return tile
