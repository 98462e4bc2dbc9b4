"""Batches of images, each as a view shows it: this rank's boxes of a batch, and the labels of all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from mpi4dl.datasets.base import BadImage, Dataset, DatasetError, Image
from mpi4dl.datasets.lazy import LazyImages
from mpi4dl.datasets.view import View
from mpi4dl.geometry import Box

MASK_DIMS = 2  # labels of so many dims or more are masks; of volumes, those of as many as these


@dataclass(frozen=True)
class Batch:
    """This rank's boxes of a global batch.

    `tiles` are float32 (samples in the box, channels, rows, columns), one for each box, or `LazyImages` of them; int64
    (samples in the box, tokens) of text. `labels` and `indices` are those of the whole batch: classes, tokens and
    other integers as int64, floating point in its own type, and masks (samples, ..., height, width) as the images are
    shown. `errors`, if the loader reports them, maps positions in the global batch to what is wrong with that image,
    whose tiles are zeros. A position is there only on ranks that hold a part of the image, and perhaps not on all.
    `problem`, reported too, is what this rank alone may be short of: a file that others see, a package.
    """

    tiles: tuple[torch.Tensor | LazyImages, ...]
    labels: torch.Tensor
    indices: tuple[int, ...]
    errors: dict[int, str]
    problem: str | None = None

    @property
    def is_short(self) -> bool:
        """Whether this rank could not read something."""
        return bool(self.errors) or self.problem is not None


class ShownImages:
    """The images of a dataset as a view shows them.

    With `reports`, what cannot be read is named in the batch; with `lazy`, tiles are `LazyImages`.
    """

    noun = "images"

    def __init__(self, dataset: Dataset, view: View, reports: bool = False, lazy: bool = False) -> None:
        self._dataset, self._view, self._reports, self._lazy = dataset, view, reports, lazy

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: tuple[int, ...], epoch: int, boxes: Sequence[Box]) -> Batch:
        """The boxes of these images, and the labels of all of them."""
        errors: dict[int, str] = {}
        problems: list[str] = []
        labels = [_label(self._dataset, index) for index in indices]
        tiles = tuple(self._tile(box, indices, labels, epoch, errors, problems) for box in boxes)
        shown = [
            torch.from_numpy(self._view.mask(label.numpy(), self._view.variation(index, epoch)))
            if self._is_mask(label)
            else label
            for index, label in zip(indices, labels, strict=True)
        ]
        return Batch(tiles, _stacked(shown, indices), indices, errors, next(iter(problems), None))

    def _tile(
        self,
        box: Box,
        indices: tuple[int, ...],
        labels: Sequence[torch.Tensor],
        epoch: int,
        errors: dict[int, str],
        problems: list[str],
    ) -> torch.Tensor | LazyImages:
        samples, *space = box.shape
        tile = torch.zeros((0 if self._lazy else samples, self._dataset.channels, *space))
        for position in range(*box.batch) if not box.empty else ():
            index = indices[position]
            out = torch.empty(0) if self._lazy else tile[position - box.batch.start]
            try:
                image = self._dataset.image(index)
                self._check_mask(labels[position], image, index)
                if self._lazy:
                    continue
                variation = self._view.variation(index, epoch)
                self._view.tile(image, *box.space, variation=variation, out=out.numpy())
            except DatasetError as error:
                if not self._reports:
                    raise
                if isinstance(error, BadImage):
                    errors[position] = str(error)
                else:
                    problems.append(str(error))
                out.zero_()
        if self._lazy:
            return LazyImages(self._dataset, self._view, indices[slice(*box.batch)], epoch)
        return tile

    def _is_mask(self, label: torch.Tensor) -> bool:
        return label.dim() >= max(MASK_DIMS, len(self._view.size))

    def _check_mask(self, label: torch.Tensor, image: Image, index: int) -> None:
        if self._is_mask(label) and label.shape[-len(image.size) :] != image.size:
            size = " x ".join(map(str, image.size))
            raise ValueError(
                f"the label of sample {index} has shape {tuple(label.shape)}, but its image {size} "
                "pixels: labels of two or more dims are masks (..., height, width) of their image; flatten others"
            )


def _label(dataset: Dataset, index: int) -> torch.Tensor:
    """A label as a tensor: of integers, int64, and else of its own type."""
    found = dataset.label(index)
    try:
        label = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the label of sample {index} is {found!r}: expected a number, numbers, or a mask") from error
    return label if label.is_floating_point() or label.is_complex() else label.long()


def _stacked(labels: Sequence[torch.Tensor], indices: Sequence[int]) -> torch.Tensor:
    for label, index in zip(labels, indices, strict=True):
        if label.shape != labels[0].shape:
            first = f"{tuple(labels[0].shape)} (sample {indices[0]})"
            raise ValueError(f"labels of one batch have shapes {first} and {tuple(label.shape)} (sample {index})")
    dtype = reduce(torch.promote_types, (label.dtype for label in labels))
    return torch.stack([label.to(dtype) for label in labels])
