"""Batches of images, each as a view shows it: this rank's boxes of a batch, and the labels of all of it."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from mpi4dl.datasets.augment import Blend, Mixup, Variation
from mpi4dl.datasets.base import IGNORED, BadImage, Dataset, DatasetError, Image, drawn, task_of
from mpi4dl.datasets.files import StoredPicture
from mpi4dl.datasets.labels import of_values
from mpi4dl.datasets.split import Subset, in_whole
from mpi4dl.datasets.transform import View
from mpi4dl.datasets.volumes import lies_elsewhere, other_axes
from mpi4dl.geometry import Box

# Images of a batch that are read box by box, when somebody asks: for images that are too large to lie in memory.


@dataclass(frozen=True)
class LazyImages:
    """The samples `indices` of a dataset, as `view` shows them in this epoch.

    `shape` is that of the tensor which they would be, (N, C, *size), and `dtype` its type. With `partners`, as many
    others, each counts `share`, and its partner the rest. `repeats` say how often each came before in the epoch; ():
    none did.
    """

    dataset: Dataset
    view: View
    indices: tuple[int, ...]
    epoch: int
    dtype: torch.dtype = torch.float32
    repeats: tuple[int, ...] = ()
    partners: "LazyImages | None" = None
    share: float = 1.0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.indices), self.dataset.channels, *self.view.size))

    @property
    def draws(self) -> bool:
        """Whether reading draws random numbers of the user's code."""
        return bool(getattr(self.dataset, "draws", False))

    def __getitem__(self, positions: Sequence[int]) -> "LazyImages":
        """Those at these positions."""
        kept = [tuple(of[position] for position in positions) if of else () for of in (self.indices, self.repeats)]
        partners = None if self.partners is None else self.partners[positions]
        return replace(self, indices=kept[0], repeats=kept[1], partners=partners)

    def read(self, box: Box) -> torch.Tensor:
        """Some samples, and some pixels along each axis of space: (samples, C, *space). Raises DatasetError."""
        tile = torch.empty((box.batch.length, self.dataset.channels, *box.shape[1:]), dtype=self.dtype)
        if not box.empty:
            part = slice(*box.batch)
            again = self.repeats[part] or (0,) * len(tile)
            for index, repeat, out in zip(self.indices[part], again, tile, strict=True):
                image = drawn(self.dataset, self.view.key(self.epoch, repeat)).image(index)
                variation = self.view.variation(index, self.epoch, repeat)
                self.view.for_image(image.size, variation).tile(image, *box.space, variation=variation, out=out.numpy())
        if self.partners is not None:
            tile.mul_(self.share).add_(self.partners.read(box), alpha=1.0 - self.share)
        return tile

    def tissue_patches(self, position: int, patch: int) -> list[tuple[int, int]] | None:
        """The patches of a sample that show tissue, by row and column in its view; None if the dataset does not say.

        In training they are a random part of all, where the dataset has a limit. Raises DatasetError.
        """
        find: Any = getattr(self.dataset, "tissue_patches", None)
        index, repeat = self.indices[position], self.repeats[position] if self.repeats else 0
        found = None if find is None else find(index, patch, self.view.key(self.epoch, repeat))
        if found is None:
            return None
        flips = self.view.variation(index, self.epoch, repeat).flips(2)
        last = [side // patch - 1 for side in self.view.size]
        places = [
            (last[0] - row if flips[0] else row, last[1] - col if flips[1] else col) for row, col in found.tolist()
        ]
        return sorted(places)

    def covariates(self, position: int) -> list[float]:
        """The numbers that stand beside a sample, by its line of the table."""
        named: Any = self.dataset
        whole, indices = in_whole(named)
        cells = whole.rows[indices[self.indices[position]]].covariates if self.view.covariates else ()
        pairs = zip(self.view.covariates, cells, strict=True)
        return [number for each, (_, cell) in pairs for number in each.numbers(cell)]


class WeightedLabels(NamedTuple):
    """The labels of a batch, and what the loss of each sample is multiplied by, (N,), float64."""

    labels: torch.Tensor
    weights: torch.Tensor


MASK_DIMS = 2  # labels of so many dims or more are masks; of volumes, those of as many as these


@dataclass(frozen=True)
class Batch:
    """This rank's boxes of a global batch.

    `tiles` are float32 (samples in the box, channels, rows, columns), one for each box, or `LazyImages` of them; int64
    (samples in the box, tokens) of text. `labels` and `indices` are those of the whole batch: classes, tokens and other
    integers as int64, floating point in its own type. Masks (samples, ..., height, width) are transformed like their
    images, and whole on every rank. Mixed classes are shares (samples, classes). `errors`, if the loader reports them,
    maps positions in the global batch to what is wrong with that image, whose tiles are zeros. A position is there only
    on ranks that hold a part of the image, and perhaps not on all. `digests` are, of samples that ranks compare, those
    of the label and of the image, or -1 of what this rank has not. `problem`, reported too, is what this rank alone may
    be short of: a file that others see, a package. `sizes` are those of the samples' views, where each has its own.
    `weights` (samples,), float64, are those of a table in the loss.
    """

    tiles: tuple[torch.Tensor | LazyImages, ...]
    labels: torch.Tensor
    indices: tuple[int, ...]
    errors: dict[int, str]
    problem: str | None = None
    digests: tuple[tuple[int, int], ...] | None = None
    sizes: tuple[tuple[int, ...], ...] | None = None
    weights: torch.Tensor | None = None

    @property
    def targets(self) -> torch.Tensor | WeightedLabels:
        """What the loss of training takes."""
        return self.labels if self.weights is None else WeightedLabels(self.labels, self.weights)

    @property
    def is_short(self) -> bool:
        """Whether this rank could not read something."""
        return bool(self.errors) or self.problem is not None


class TransformedImages:
    """The images of a dataset as a view shows them.

    With `reports`, what cannot be read is named in the batch, masks too; with `lazy`, tiles are `LazyImages`. By
    `mixup` samples are mixed, and then one is lost with its partner.
    """

    noun = "images"

    def __init__(
        self, dataset: Dataset, view: View, reports: bool = False, lazy: bool = False, mixup: Mixup | None = None
    ) -> None:
        self._dataset, self._view, self._reports, self._lazy, self._mixup = dataset, view, reports, lazy, mixup
        weights = dataset.weights if isinstance(dataset, Subset) else None
        self._weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(
        self, indices: tuple[int, ...], epoch: int, boxes: Sequence[Box], repeats: tuple[int, ...] | None = None
    ) -> Batch:
        """The boxes of these images, and the labels of all of them; `repeats`: how often each came before."""
        blend = None if self._mixup is None else self._mixup.draw(epoch, indices)
        again = repeats or (0,) * len(indices)
        reading = _Reading(self._dataset, self._view, indices, epoch, self._reports, blend, again)
        labels = [reading.label(position) for position in range(len(indices))]
        tiles = tuple(self._tile(reading, box, labels) for box in boxes)
        shown = reading.shown(labels)
        for label, index in zip(shown, indices, strict=True):
            if label.shape != shown[0].shape:
                first = f"{tuple(shown[0].shape)} (sample {indices[0]})"
                raise ValueError(f"labels of one batch have shapes {first} and {tuple(label.shape)} (sample {index})")
        dtype = reduce(torch.promote_types, (label.dtype for label in shown))
        stacked = torch.stack([label.to(dtype) for label in shown])
        errors = reading.errors
        if self._mixup is not None and blend is not None:
            stacked = self._mixup.labels(stacked, blend)
            lost = {place: errors[other] for place, other in enumerate(blend.partners) if other in errors}
            errors = lost | errors
        digests = tuple(reading.digests) if getattr(self._dataset, "compared", False) else None
        weights = None if self._weights is None else self._weights[list(indices)]
        return Batch(tiles, stacked, indices, errors, next(iter(reading.problems), None), digests, weights=weights)

    def sizes(
        self, indices: Sequence[int], epoch: int = 0, repeats: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], ...] | None:
        """The size of each image's view; None where all have one. Of an image that cannot be opened, the largest."""
        if not self._view.own_sizes:
            return None
        again = repeats or (0,) * len(indices)
        found = []
        for index, repeat in zip(indices, again, strict=True):
            found.append(self._view.size)
            with suppress(DatasetError):  # which reading it will say
                variation = self._view.variation(index, epoch, repeat)
                found[-1] = self._view.for_image(self._dataset.image(index).size, variation).size
        return tuple(found)

    def _tile(self, reading: "_Reading", box: Box, labels: Sequence[Any]) -> torch.Tensor | LazyImages:
        samples, *space = box.shape
        places = () if box.empty else range(*box.batch)
        if self._lazy:
            for position in places:
                reading.open(position, labels)
                if reading.blend is not None:
                    reading.open(reading.blend.partners[position], labels)
            whole = LazyImages(self._dataset, self._view, reading.indices, reading.epoch, repeats=reading.repeats)
            if reading.blend is not None:
                whole = replace(whole, partners=whole[reading.blend.partners], share=reading.blend.share)
            return whole[range(*box.batch)]
        tile = torch.zeros((samples, self._dataset.channels, *space))
        for position, out in zip(places, tile, strict=False):
            reading.into(out, position, box, labels)
            if reading.blend is not None:
                partner = torch.zeros_like(out)
                reading.into(partner, reading.blend.partners[position], box, labels)
                out.mul_(reading.blend.share).add_(partner, alpha=1.0 - reading.blend.share)
        return tile


@dataclass
class _Reading:
    """A batch that is being read: what was found wrong with it so far, by position, and what this rank is short of."""

    dataset: Dataset
    view: View
    indices: tuple[int, ...]
    epoch: int
    reports: bool
    blend: Blend | None
    repeats: tuple[int, ...]

    def __post_init__(self) -> None:
        self.digests = [(-1, -1)] * len(self.indices)
        self.errors: dict[int, str] = {}
        self.problems: list[str] = []

    @contextmanager
    def _reporting(self, position: int) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            if not self.reports:
                raise
            if isinstance(error, BadImage):
                self.errors[position] = str(error)
            else:
                self.problems.append(str(error))

    def _drawn(self, position: int) -> Any:
        """The dataset whose samples are as this one is drawn."""
        return drawn(self.dataset, self.view.key(self.epoch, self.repeats[position]))

    def _variation(self, position: int) -> Variation:
        return self.view.variation(self.indices[position], self.epoch, self.repeats[position])

    def label(self, position: int) -> Any:
        """A tensor, of integers int64, or else of its own type; a mask that is yet to be read; None if it cannot be."""
        with self._reporting(position):
            found, index = self._drawn(position).label(self.indices[position]), self.indices[position]
            if hasattr(found, "read") and hasattr(found, "size"):
                return found
            try:
                label = torch.as_tensor(found)
            except (TypeError, ValueError, RuntimeError) as error:
                told = f"the label of sample {index} is {found!r}"
                raise ValueError(f"{told}: expected a number, numbers, or a mask") from error
            label = label if label.is_floating_point() or label.is_complex() else label.long()
            if getattr(self.dataset, "compared", False):
                content = np.ascontiguousarray(label.numpy())
                self.digests[position] = (zlib.crc32(content.data), self.digests[position][1])
            return label
        return None

    def open(self, position: int, labels: Sequence[Any]) -> Image | None:
        """The image at a position of the batch; None if it cannot be opened, or is not that of its mask."""
        with self._reporting(position):
            image = self._drawn(position).image(self.indices[position])
            self._check_mask(labels[position], image, self.indices[position])
            find: Any = getattr(self.dataset, "tissue_patches", None)
            if self.view.patch is not None and find is not None:  # a slide that shows none has nothing to look at
                find(self.indices[position], self.view.patch)
            self.digests[position] = (self.digests[position][0], getattr(image, "digest", -1))
            return image
        return None

    def into(self, out: torch.Tensor, position: int, box: Box, labels: Sequence[Any]) -> None:
        """Read a box of the image at a position of the batch; zeros if it cannot be read."""
        image = self.open(position, labels)
        with self._reporting(position):
            if image is not None:
                variation = self._variation(position)
                view = self.view.for_image(image.size, variation)
                view.tile(image, *box.space, variation=variation, out=out.numpy())
                return
        out.zero_()

    def shown(self, labels: Sequence[Any]) -> list[torch.Tensor]:
        """Labels as they are beside the images: masks as a view shows them. Unreadable images have no meaning."""
        found: list[torch.Tensor | None] = []
        for position, label in enumerate(labels):
            shown = label
            if label is not None and self._is_mask(label):
                variation, shown = self._variation(position), None
                with self._reporting(position):
                    if isinstance(label, StoredPicture):
                        found.append(torch.from_numpy(self.view.target(label, variation)))
                        continue
                    mask = label.numpy() if isinstance(label, torch.Tensor) else label
                    shown = torch.from_numpy(self.view.mask(mask, variation, of_values(task_of(self.dataset))))
            found.append(shown)
        like = next((label for label in found if label is not None), torch.full(self.view.size, IGNORED))
        nothing = torch.full_like(like, IGNORED if self._is_mask(like) else 0)
        return [nothing if label is None else label for label in found]

    def _is_mask(self, label: Any) -> bool:
        return not isinstance(label, torch.Tensor) or label.dim() >= max(MASK_DIMS, len(self.view.size))

    def _check_mask(self, label: Any, image: Image, index: int) -> None:
        if label is None or not self._is_mask(label):
            return
        size = " x ".join(map(str, image.size))
        if isinstance(label, StoredPicture):
            label.require_size_of(image)
        elif not isinstance(label, torch.Tensor):
            if tuple(label.size) != tuple(image.size):
                found = " x ".join(map(str, label.size))
                where = getattr(label, "path", f"the mask of sample {index}")
                raise BadImage(where, f"is a mask of {found} pixels, but its image has {size}: they must be equal")
            mine, theirs = (getattr(each, "axes", "") for each in (label, image))
            if mine and theirs and mine != theirs:
                raise BadImage(label.path, other_axes(mine, theirs, "its image"))
            elsewhere = lies_elsewhere(label, image)
            if elsewhere is not None:
                raise BadImage(label.path, elsewhere)
        elif label.shape[-len(image.size) :] != image.size:
            raise ValueError(
                f"the label of sample {index} has shape {tuple(label.shape)}, but its image {size} "
                "pixels: labels of two or more dims are masks (..., height, width) of their image; flatten others"
            )
