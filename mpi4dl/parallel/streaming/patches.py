"""Patches of slides, spread over the ranks and visited a few at a time, as if all of them were one batch.

    ranks        |        rank 0         |        rank 1         |      of an image that may have any number of patches
    visits       |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |      encoder: streamed along the batch, no margins
    features     |                  all patches                  |      on every rank, for the aggregator

Patches are read when they are visited, in forward and again in backward. An encoder with batch norm hears of the
statistics of all patches in rounds, as tiles do.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise, product
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, ceil_div, even_cuts
from mpi4dl.models.patches import PatchModel, chosen, cut, patches_in, tissue
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype, shapes_of
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.streaming.leading_part import Segments, StreamedImages, spans_of
from mpi4dl.parallel.streaming.margins import run
from mpi4dl.parallel.streaming.norms import MODES
from mpi4dl.parallel.streaming.visits import Given, ImageSource, Pixels, Visits


@dataclass(frozen=True)
class BagOptions:
    """How patches are visited: how many `at_once`, and norms and segments as in `StreamOptions`.

    `remark` says more of it to the user.
    """

    at_once: int = 16
    norms: str = "exact"
    segments: int = 1
    remark: str = ""

    def __post_init__(self) -> None:
        if self.norms not in MODES:
            raise ValueError(f"norms of streaming are {self.norms!r}, but must be one of {', '.join(MODES)}")
        if min(self.at_once, self.segments) < 1:
            raise ValueError(f"needs at least one patch at once and one segment: {self.at_once} and {self.segments}")


@dataclass(frozen=True)
class Place:
    """Where a patch lies: in which sample of the whole batch, and in which row and column of patches."""

    sample: int
    row: int
    col: int


@dataclass(frozen=True)
class PatchSource:
    """The patches at these places, as images of their own: (P, C, patch, patch).

    `images` are the samples of the batch from number `first` on; patches of others cannot be read.
    """

    images: ImageSource
    first: int
    patch: int
    places: tuple[Place, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.places), self.images.shape[1], self.patch, self.patch))

    @property
    def dtype(self) -> torch.dtype:
        return self.images.dtype

    def read(self, box: Box) -> Tensor:
        """Some patches, whole. Neighbours in a row are read together."""
        wanted = self.places[slice(*box.batch)]
        found = [torch.empty((0, *self.shape[1:]), dtype=self.dtype)]
        in_rows = groupby(enumerate(wanted), lambda each: (each[1].sample, each[1].row, each[1].col - each[0]))
        for _, each in in_rows:
            row = [place for _, place in each]
            found.append(cut(self.strip(row[0], len(row)), self.patch))
        return torch.cat(found)

    def strip(self, first: Place, count: int) -> Tensor:
        """So many patches side by side, as one image: (1, C, patch, count * patch)."""
        top, left = first.row * self.patch, first.col * self.patch
        rows, cols = Interval(top, top + self.patch), Interval(left, left + count * self.patch)
        own = first.sample - self.first
        return self.images.read(Box(Interval(own, own + 1), rows, cols))


class Bags:
    """A `PatchModel` of which ranks share the patches of each batch."""

    def __init__(self, model: PatchModel, options: BagOptions, channels: int) -> None:
        self._model, self._options = model, options
        self.segments = Segments((), options.norms)
        self._grids: dict[Grid, Grid] = {}
        if options.segments > 1:
            self._cut(channels)

    def __call__(self, images: StreamedImages) -> Tensor:
        """(N, K), on every rank."""
        patch = self._model.patch
        patches = self.patches(images)
        counts = [0] * images.samples.size
        for place in patches.places:
            counts[place.sample] += 1
        grid, of_ways = self._grid(images.grid), [sum(counts[a:b]) for a, b in pairwise(images.samples.cuts)]
        visits, given = patch_visits(
            patches.shape, patches.dtype, of_ways, grid.shape, grid.rank, self._options.at_once
        )
        found = self.segments.run(self._model.encoder, patches, given, visits, grid, (patch, patch), images.progress)
        if not isinstance(found, Tensor):
            raise TypeError(f"the encoder returns a {type(found).__name__}: it must be one tensor (patches, features)")
        return self._model.aggregate(gather(found), counts)

    def patches(self, images: StreamedImages) -> PatchSource:
        """Those that are looked at, the same on all ranks. Collective.

        Raises:
            Refusal: an image cannot be read; on all ranks.
        """
        patch, grid, own = self._model.patch, images.grid, images.samples.owned(images.grid.coordinates[BATCH])
        found = PatchSource(_as_source(images, own.length), own.start, patch, ())
        patches_in(images.size, patch)
        rows, cols = (side // patch for side in images.size)
        if self._model.min_tissue == 0:
            all_of_them = product(range(images.samples.size), range(rows), range(cols))
            return replace(found, places=tuple(Place(*each) for each in all_of_them))
        mine: dict[tuple[int, int], Tensor] = {}
        problem: DatasetError | None = None
        ranks = grid.ranks_along(grid.space)  # those that can read the same samples
        strips = list(product(range(*own), range(rows)))
        try:
            for sample, row in strips[ranks.index(grid.rank) :: len(ranks)]:
                strip = found.strip(Place(sample, row, 0), cols)
                mine[sample, row] = tissue(cut(strip, patch), self._model.colour)
        except DatasetError as error:
            problem = error
        shares: dict[tuple[int, int], Tensor] = {}
        for theirs, trouble in grid.comm.all_gather_object((mine, problem)):
            if trouble is not None:
                raise Refusal(str(trouble)) from trouble
            shares |= theirs
        places = [
            Place(sample, number // cols, number % cols)
            for sample in range(images.samples.size)
            for number in chosen(
                torch.cat([shares[sample, row] for row in range(rows)]), self._model.min_tissue
            ).tolist()
        ]
        return replace(found, places=tuple(places))

    def _grid(self, shared: Grid) -> Grid:
        """The same ranks, sharing a batch of patches instead of images."""
        if shared not in self._grids:
            self._grids[shared] = Grid.of(shared.comm, GridShape(shared.size, 1, 1), tracks_batch=True)
        return self._grids[shared]

    def _cut(self, channels: int) -> None:
        """Cut the encoder, so that rounds are shared out evenly to segments. Raises ValueError if it cannot be."""
        encoder, patch = self._model.encoder, self._model.patch
        outline = copy.deepcopy(encoder, memo=shapes_of(encoder)).train()
        shape = GridShape(2, 1, 1)
        visits = Visits(shape, 0, (1, 1), True)
        size = torch.Size((2 * self._options.at_once, channels, patch, patch))
        cuttable = Cuttable(outline, image=tuple(size))
        given = visits.images(size, image_dtype(encoder), Split.at(even_cuts(size[0], shape.size)))

        def rounds_of(end: int) -> int | None:
            found = run(Stage(cuttable.part(0, end), outline), visits, (given,), (patch, patch), 0)
            return None if found is None else found.num_rounds

        spans = spans_of(len(cuttable), self._options.segments, rounds_of)
        self.segments = Segments(tuple(cuttable.part(*span) for span in spans), self._options.norms)


def patch_visits(
    shape: torch.Size, dtype: torch.dtype, counts: Sequence[int], grid: GridShape, rank: int, at_once: int
) -> tuple[Visits, Given]:
    """The visits to patches (P, C, H, W), of which ranks that can read the same samples share so many evenly."""
    ranks = grid.size // len(counts)
    each = max(1, *(ceil_div(count, ranks * at_once) for count in counts))
    visits = Visits(grid, rank, (1, 1), True, each)
    firsts = (0, *accumulate(counts))
    inner = [first + cut for first, n in zip(firsts, counts, strict=False) for cut in even_cuts(n, ranks * each)[1:]]
    return visits, visits.images(shape, dtype, Split.at((0, *inner)))


def visit_patches(model: PatchModel, options: BagOptions, channels: int = 3) -> None:
    """Let a model visit the patches of what an engine passes to it; on plain tensors it runs as before."""
    model.forward = partial(_forward, Bags(model, options, channels), model.forward)  # type: ignore[method-assign]


def _forward(bags: Bags, forward: Any, images: Any) -> Tensor:
    found: Tensor = bags(images) if isinstance(images, StreamedImages) else forward(images)
    return found


def _as_source(images: StreamedImages, num_samples: int) -> ImageSource:
    """The source of all patches of this rank's samples. Raises ValueError if there is no such thing."""
    source = images.source
    whole = torch.Size((num_samples, *source.shape[1:2], *images.size))
    if isinstance(source, Tensor) and source.shape == whole:
        return Pixels(source)
    if isinstance(source, Tensor) or source.shape != whole:
        raise ValueError(
            f"ranks share patches, not tiles: pass a source of whole images {tuple(whole)} to each of them, not "
            f"{tuple(source.shape)}"
        )
    return source
