"""Patches of slides: ranks share them, and each rank streams a few at a time, as if all were one batch.

    ranks        |        rank 0         |        rank 1         |      an image may have any number of patches
    tiles        |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |      encoder: streamed by patches, without margins
    features     |                  all patches                  |      on every rank, for the aggregator

A streamed tile is here a few whole patches. A rank reads them when it runs the tile, in forward and again in backward.
Batch norms in the encoder use the statistics of all patches, by the same statistics passes as for tiles of images.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise, product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mpi4dl.comm import Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.geometry import BATCH, Box, GridShape, Interval, Split, ceil_div, even_cuts
from mpi4dl.models.patches import PatchModel, chosen, cut, patches_in, tissue
from mpi4dl.parallel.disk import ON_DEVICE, Keep
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype, shapes_of
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.streaming.leading_part import EACH_NORM, Segments, StreamedImages, segments_in
from mpi4dl.parallel.streaming.norms import MODES
from mpi4dl.parallel.streaming.stream_tiles import ImageSource, InputSpec, Pixels, StreamTiles

T = TypeVar("T")


@dataclass(frozen=True)
class PatchOptions:
    """How patches are streamed: a rank processes `at_once` patches at a time. The others are as in `StreamOptions`."""

    at_once: int = 16
    norms: str = "exact"
    segments: int = 1
    keep: Keep = ON_DEVICE
    remark: str = ""

    def __post_init__(self) -> None:
        if self.norms not in MODES:
            raise ValueError(f"norms of streaming are {self.norms!r}, but must be one of {', '.join(MODES)}")
        if min(self.at_once, self.segments) < 1:
            raise ValueError(f"needs at least one patch at once and one segment: {self.at_once} and {self.segments}")


@dataclass(frozen=True)
class Place:
    """The position of a patch: the sample in the whole batch, and the row and column in the grid of patches."""

    sample: int
    row: int
    col: int


@dataclass(frozen=True)
class PatchSource:
    """The patches at these places as a source of small images: (P, C, patch, patch).

    `images` has the samples of the batch from number `first` on. Patches of other samples cannot be read.
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

    @property
    def draws(self) -> bool:
        return self.images.draws

    def read(self, box: Box) -> Tensor:
        """The patches of the box's samples, whole. Neighbours in a row are read together."""
        wanted = self.places[slice(*box.batch)]
        found = [torch.empty((0, *self.shape[1:]), dtype=self.dtype)]
        in_rows = groupby(enumerate(wanted), lambda each: (each[1].sample, each[1].row, each[1].col - each[0]))
        for _, each in in_rows:
            row = [place for _, place in each]
            found.append(cut(self.strip(row[0], len(row)), self.patch))
        return torch.cat(found)

    def strip(self, first: Place, count: int) -> Tensor:
        """`count` patches side by side, as one image: (1, C, patch, count * patch)."""
        top, left = first.row * self.patch, first.col * self.patch
        rows, cols = Interval(top, top + self.patch), Interval(left, left + count * self.patch)
        own = first.sample - self.first
        return self.images.read(Box(Interval(own, own + 1), rows, cols))


class Attended(NamedTuple):
    """The patches of an image, by row and column, and what each counts, (n,) on the host; `name` says what that is."""

    places: tuple[tuple[int, int], ...]
    values: Tensor
    name: str


def _attended(places: Sequence[Place], name: str, values: Sequence[Tensor]) -> Iterator[Attended]:
    for sample, each in enumerate(values):
        yield Attended(tuple((at.row, at.col) for at in places if at.sample == sample), each.float().cpu(), name)


class PatchStream:
    """Runs a `PatchModel`: ranks share the patches of each batch, and stream them through the encoder.

    `channels` is the number of channels of the images. Raises ValueError if the encoder cannot be cut into segments.
    """

    def __init__(self, model: PatchModel, options: PatchOptions, channels: int) -> None:
        self._model, self._options = model, options
        self.segments = Segments((), options.norms, options.keep)
        self._grids: dict[Grid, Grid] = {}
        self.seen: tuple[Attended, ...] = ()  # of the last images that were looked at without gradients
        if options.segments > 1:
            self._cut(channels)

    def __call__(self, images: StreamedImages) -> Tensor:
        """The logits (N, K) of the images, on every rank. Collective.

        Raises:
            Refusal: what a cut encoder had read of attributes and globals has changed, or an image cannot be read.
        """
        change = next(self.segments.changes(), None)
        if change is not None:
            raise Refusal(change)
        patch = self._model.patch
        patches = self.patches(images)
        counts = [0] * images.samples.size
        for place in patches.places:
            counts[place.sample] += 1
        grid, of_ways = self._grid(images.grid), [sum(counts[a:b]) for a, b in pairwise(images.samples.cuts)]
        tiles, spec = patch_tiles(patches.shape, patches.dtype, of_ways, grid.shape, grid.rank, self._options.at_once)
        found = self.segments.run(self._model.encoder, patches, spec, tiles, grid, (patch, patch), images.progress)
        if not isinstance(found, Tensor):
            raise TypeError(f"the encoder returns a {type(found).__name__}: it must be one tensor (patches, features)")
        features = gather(found)
        covariates = self._covariates(images)
        if not torch.is_grad_enabled():
            values = self._model.patch_values(features, counts, covariates)
            self.seen = () if values is None else tuple(_attended(patches.places, *values))
        return self._model.aggregate(features, counts, covariates)

    def _covariates(self, images: StreamedImages) -> Tensor | None:
        """Those of each sample, (N, number), float64, as its source says; None of sources without any. Collective."""
        find: Any = getattr(images.source, "covariates", None)
        if not self._model.num_covariates or find is None:
            return None
        own = range(*images.samples.owned(images.grid.coordinates[BATCH]))
        found = _shared_out(images.grid, [(sample,) for sample in own], lambda sample: find(sample - own.start))
        return torch.tensor([found[sample,] for sample in range(images.samples.size)], dtype=torch.float64)

    def patches(self, images: StreamedImages) -> PatchSource:
        """The patches with enough tissue, the same on all ranks. Collective.

        Raises:
            Refusal: on all ranks, if an image cannot be read.
        """
        patch, grid, own = self._model.patch, images.grid, images.samples.owned(images.grid.coordinates[BATCH])
        found = PatchSource(_as_source(images, own.length), own.start, patch, ())
        patches_in(images.size, patch)
        by_slides = self._of_slides(found, images)
        if by_slides is not None:
            return replace(found, places=by_slides)
        rows, cols = (side // patch for side in images.size)
        if self._model.min_tissue == 0:
            everywhere = product(range(images.samples.size), range(rows), range(cols))
            return replace(found, places=tuple(Place(*each) for each in everywhere))

        def share(sample: int, row: int) -> Tensor:
            return tissue(cut(found.strip(Place(sample, row, 0), cols), patch), self._model.colour)

        tissues = _shared_out(grid, list(product(range(*own), range(rows))), share)
        places = [
            Place(sample, number // cols, number % cols)
            for sample in range(images.samples.size)
            for number in chosen(
                torch.cat([tissues[sample, row] for row in range(rows)]), self._model.min_tissue
            ).tolist()
        ]
        return replace(found, places=tuple(places))

    def _of_slides(self, found: PatchSource, images: StreamedImages) -> tuple[Place, ...] | None:
        """The patches that the slides' own tissue masks choose; None for images that have none. Collective."""
        find: Any = getattr(found.images, "tissue_patches", None)
        own = range(*images.samples.owned(images.grid.coordinates[BATCH]))

        def patches(sample: int) -> list[tuple[int, int]] | None:
            return find(sample - found.first, found.patch)

        if find is None:
            return None
        chosen = _shared_out(images.grid, [(sample,) for sample in own], patches)
        if any(each is None for each in chosen.values()):
            return None
        return tuple(Place(sample, *place) for (sample,), places in sorted(chosen.items()) for place in places or ())

    def _grid(self, shared: Grid) -> Grid:
        """A grid of the same ranks, which share a batch of patches instead of images."""
        if shared not in self._grids:
            self._grids[shared] = Grid.of(shared.comm, GridShape(shared.size, 1, 1), tracks_batch=True)
        return self._grids[shared]

    def _cut(self, channels: int) -> None:
        """Cut the encoder into segments, as `segment_spans` says."""
        encoder, patch = self._model.encoder, self._model.patch
        outline = copy.deepcopy(encoder, memo=shapes_of(encoder)).train()
        ranks = GridShape(2, 1, 1)
        tiles = StreamTiles(ranks, 0, (1, 1), True)
        shape = torch.Size((2 * self._options.at_once, channels, patch, patch))
        cuttable = _units_of(outline, tuple(shape), self._options.segments == EACH_NORM)
        spec = tiles.image_spec(shape, image_dtype(encoder), Split.at(even_cuts(shape[0], ranks.size)))
        _, self.segments = segments_in(cuttable, len(cuttable), self._options, tiles, spec, shape)
        self.segments.watch(encoder)


def _units_of(encoder: nn.Module, image: tuple[int, ...], within_blocks: bool) -> Cuttable:
    """The encoder in units, those within blocks if that is asked for, and can be."""
    if within_blocks:
        with suppress(ValueError):
            return Cuttable(encoder, image=image, within_blocks=True)
    return Cuttable(encoder, image=image)


def _shared_out(grid: Grid, keys: Sequence[tuple[int, ...]], compute: Callable[..., T]) -> dict[tuple[int, ...], T]:
    """compute(*key) of all keys, shared out over the ranks that can read the same samples; on all ranks. Collective.

    Raises:
        Refusal: it raised DatasetError on a rank; on all ranks.
    """
    mine: dict[tuple[int, ...], T] = {}
    problem: DatasetError | None = None
    ranks = grid.ranks_along(grid.space)
    try:
        for key in keys[ranks.index(grid.rank) :: len(ranks)]:
            mine[key] = compute(*key)
    except DatasetError as error:
        problem = error
    found: dict[tuple[int, ...], T] = {}
    for theirs, trouble in grid.comm.all_gather_object((mine, problem)):
        if trouble is not None:
            raise Refusal(str(trouble)) from trouble
        found |= theirs
    return found


def patch_tiles(
    shape: torch.Size, dtype: torch.dtype, counts: Sequence[int], grid: GridShape, rank: int, at_once: int
) -> tuple[StreamTiles, InputSpec]:
    """The streamed tiles, and the spec, of patches of this shape (P, C, H, W).

    The ranks of `grid` form `len(counts)` groups, each of which can read the same samples. The ranks of group i share
    its `counts[i]` patches evenly.
    """
    ranks = grid.size // len(counts)
    each = max(1, *(ceil_div(count, ranks * at_once) for count in counts))
    tiles = StreamTiles(grid, rank, (1, 1), True, each)
    firsts = (0, *accumulate(counts))
    inner = [first + cut for first, n in zip(firsts, counts, strict=False) for cut in even_cuts(n, ranks * each)[1:]]
    return tiles, tiles.image_spec(shape, dtype, Split.at((0, *inner)))


def stream_patches(model: PatchModel, options: PatchOptions, channels: int = 3) -> None:
    """Let `model` stream the patches of `StreamedImages`, which an engine passes to it. It still takes tensors."""
    stream = PatchStream(model, options, channels)
    model.forward = partial(_forward, stream, model.forward)  # type: ignore[method-assign]
    model.streamed = stream  # type: ignore[assignment]


def _forward(stream: PatchStream, forward: Any, images: Any, *covariates: Tensor) -> Tensor:
    return stream(images) if isinstance(images, StreamedImages) else forward(images, *covariates)


def _as_source(images: StreamedImages, num_samples: int) -> ImageSource:
    """A source of whole images, the samples of this rank. Raises ValueError if this rank has only tiles of them."""
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
