"""The leading part of a model's first stage, which is streamed: which units it has, and how the stage runs it.

first stage    unit 0 .. unit k-1               |   unit k .. unit n-1
               streamed tile by tile,           |   on the whole outputs of those, as without streaming
               in one segment or several        |
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._progress import quietly
from mpi4dl.comm import Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.geometry import BATCH, GridShape, Split, Tiling, even_cuts
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype
from mpi4dl.parallel.pipeline.stage import Recipe, Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import from_tiling
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.margins import CannotStream, PartProfile, StreamPlan, profile_with_margin
from mpi4dl.parallel.streaming.norms import MODES, RunningNorms
from mpi4dl.parallel.streaming.stream import Progress, Streaming
from mpi4dl.parallel.streaming.stream_tiles import ImageSource, InputSpec, OwnSamples, StreamTiles

KNOWN_PLANS = 64  # shapes of batches whose plans are kept before all are dropped: slides have any number of patches


@dataclass
class Segments:
    """A part of a model, or all of it, in segments that are streamed one after the other.

    Outputs are kept whole between segments. The tiles of a segment start from them, so they read a smaller margin, and
    their statistics passes repeat less.

    Args:
        recipes: the program of each segment; none for a single segment that is all of the module. It need not be
            traceable then.
        norms: the mode of batch norms, one of `norms.MODES`.
    """

    recipes: tuple[Recipe, ...]
    norms: str
    _parts: list["_Segment"] = field(default_factory=list)
    _known_plans: dict[Any, tuple[StreamPlan, ...]] = field(default_factory=dict)

    def run(
        self,
        module: nn.Module,
        source: Tensor | ImageSource,
        images: InputSpec,
        tiles: StreamTiles,
        grid: Grid,
        size: tuple[int, ...],
        progress: Progress = quietly,
    ) -> Any:
        """The output of the last segment. `source` has the images, of spec `images` and of `size`, such as (H, W)."""
        parts = self._parts_of(module)
        found: tuple[Any, ...] = (source,)
        for number, (part, plan) in enumerate(zip(parts, self._plans(parts, images, tiles, grid, size), strict=True)):
            name = f"segment {number + 1} of {len(parts)}, " if len(parts) > 1 else ""
            found = Streaming(part, found, plan, grid, self.norms, progress, name).run()
        return parts[-1].nested(found)

    def parts(self, module: nn.Module) -> "list[_Segment]":
        """New segments, which share the modules of `module`."""
        wanted: list[nn.Module] = [Stage(recipe, module) for recipe in self.recipes]
        found: list[_Segment] = []
        for part in wanted or [module]:
            found.append(_Segment(part, found[-1] if found else None))
        return found

    def _parts_of(self, module: nn.Module) -> "list[_Segment]":
        """The segments, in the training or evaluation modes of `module`."""
        self._parts = self._parts or self.parts(module)
        for segment in self._parts:
            segment.training = module.training
            for name, inner in segment.part.named_modules():
                original = module.get_submodule(name)
                if inner is not original:
                    inner.training = original.training
        return self._parts

    def _plans(
        self, parts: Sequence[nn.Module], images: InputSpec, tiles: StreamTiles, grid: Grid, size: tuple[int, ...]
    ) -> tuple[StreamPlan, ...]:
        modes = tuple(inner.training for part in parts for inner in part.modules())
        key = (grid, images, tiles, size, modes, torch.is_grad_enabled())
        if key not in self._known_plans:
            if len(self._known_plans) >= KNOWN_PLANS:
                self._known_plans.clear()
            inputs: tuple[InputSpec, ...] = (images,)
            plans = []
            for part in parts:
                with nullcontext() if self.norms == "exact" else RunningNorms().for_tile(record=False):
                    plans.append(StreamPlan.of(part, tiles, inputs, size))
                inputs = tuple(map(InputSpec.like, plans[-1].profile.outputs))
            self._known_plans[key] = tuple(plans)
        return self._known_plans[key]


class _Segment(nn.Module):
    """A part of a model as a function from tensors to tensors; the part's own arguments may be nests of tensors.

    `before` is the segment whose outputs are the inputs; None for the first one.
    """

    def __init__(self, part: nn.Module, before: "_Segment | None") -> None:
        super().__init__()
        self.part = part
        self.outputs: _Nest = _Nest()
        self._inputs: _Nest = _Nest() if before is None else before.outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found, self.outputs.structure = pytree.tree_flatten(self.part(*self._inputs.of(tensors)))
        return tuple(found)

    def nested(self, tensors: Sequence[Tensor]) -> Any:
        """The part's output, built from the tensors in it."""
        return self.outputs.of(tensors)


class _Nest:
    """The pytree structure of some tensors; None for a plain sequence. Copies of a module share it."""

    def __init__(self) -> None:
        self.structure: Any = None

    def of(self, tensors: Sequence[Tensor]) -> Any:
        return tensors if self.structure is None else pytree.tree_unflatten(tensors, self.structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Nest":
        return self


def segment_spans(num_units: int, segments: int, statistics_of: Callable[[int], int | None]) -> list[tuple[int, int]]:
    """The units of each segment, as [start, stop).

    Segments get equal numbers of statistics, or equal numbers of units where there are no statistics.
    `statistics_of(n)` is the number of statistics in the first n units; None if it is unknown.
    """
    if segments == 1:
        return [(0, num_units)]
    statistics = [0]
    for stop in range(1, num_units + 1):
        found = statistics_of(stop)
        statistics.append(statistics[-1] if found is None else found)
    stops: list[int] = [0]
    segments = min(segments, num_units)
    for segment in range(1, segments):
        if statistics[-1]:
            stop = next(i for i, n in enumerate(statistics) if n * segments >= statistics[-1] * segment)
        else:
            stop = num_units * segment // segments
        if stops[-1] < stop < num_units:
            stops.append(stop)
    return list(pairwise([*stops, num_units]))


MOST_REPEATED = 2.0  # without `until`, a tile with its margin has at most so many times the pixels of the tile


@dataclass(frozen=True)
class StreamOptions:
    """How the first stage is streamed.

    Args:
        counts: the number of tiles along each axis of space of a rank's part of the images.
        until: the name of the last streamed module; None to stop before margins become large beside tiles.
        norms: the mode of batch norms, one of `norms.MODES`.
        segments: the number of segments, between which outputs are kept from forward to backward.
        remark: a text for the user about how the options were chosen.
    """

    counts: tuple[int, ...]
    until: str | None = None
    norms: str = "exact"
    segments: int = 1
    remark: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.norms not in MODES:
            raise ValueError(f"norms of streaming are {self.norms!r}, but must be one of {', '.join(MODES)}")
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"streaming needs at least one tile along each axis, but got {self.counts}")
        if self.segments < 1:
            raise ValueError(f"streaming takes at least one segment, but got {self.segments}")


@dataclass(frozen=True)
class StreamedImages:
    """A batch of images as the input of a streamed first stage.

    Args:
        source: this rank's part of the images as a tensor, or an `ImageSource` of the samples that it works on.
        grid: the ranks that share the images.
        samples: how these ranks split the batch.
        size: the size of the images, such as (H, W).
        progress: is called with a line of text before each tile.
    """

    source: Any
    grid: Grid
    samples: Split
    size: tuple[int, ...]
    progress: Progress = quietly


@dataclass
class LeadingPart:
    """Runs the first calls of a stage by streaming. Segment j has the units `bounds[j]` to `bounds[j + 1]` - 1."""

    segments: Segments
    options: StreamOptions
    bounds: tuple[int, ...]

    def __call__(self, stage: Stage, *values: Any) -> tuple[int, dict[str, Any]]:
        """The number of calls of the stage that ran here, and the values with which the stage continues, by name."""
        images = values[0]
        if not isinstance(images, StreamedImages):  # such as meta tensors: the stage makes all calls itself
            return 0, dict(zip(stage.recipe.inputs, values, strict=True))
        source, grid = _source(images), images.grid
        tiles = StreamTiles(grid.shape, grid.rank, self.options.counts, grid.tracks_batch)
        spec = tiles.image_spec(source.shape, source.dtype, images.samples)
        found = self.segments.run(stage, source, spec, tiles, grid, images.size, images.progress)
        done = sum(len(recipe.calls) for recipe in self.segments.recipes)
        return done, dict(zip(self.segments.recipes[-1].outputs, found, strict=True))

    def describe(self, names: Sequence[str]) -> str:
        """A line about the streamed part; `names` are those of the stage's units."""
        tiles, segments = "x".join(map(str, self.options.counts)), len(self.segments.recipes)
        many = f" in {segments} segments" if segments > 1 else ""
        return f"each rank streams {tiles} tiles one after the other, up to {names[self.bounds[-1] - 1]}{many}"


def _source(images: StreamedImages) -> Any:
    """The images as the input of the first segment: a tensor, a SpatialTensor or an ImageSource."""
    source, grid, samples = images.source, images.grid, images.samples
    if not isinstance(source, Tensor):
        whole = torch.Size((samples.size, *source.shape[1:2], *images.size))
        return OwnSamples(source, samples.owned(grid.coordinates[BATCH]).start, whole)
    if grid.size == 1 or isinstance(source, SpatialTensor):
        return source
    return from_tiling(source, grid, _tiling(images))


def _tiling(images: StreamedImages) -> Tiling:
    """How the ranks cut the images."""
    shape = images.grid.shape.space
    cuts = (Split.at(even_cuts(pixels, n)) for pixels, n in zip(images.size, shape, strict=True))
    return Tiling((images.samples, *cuts))


def in_memory(images: StreamedImages) -> StreamedImages:
    """The same images with this rank's part of their pixels in memory, as a tensor or SpatialTensor. Collective.

    Raises:
        Refusal: on all ranks, if an image cannot be read.
    """
    source, grid, problem = _source(images), images.grid, None
    if isinstance(source, Tensor):
        return replace(images, source=source)
    pixels = torch.empty(0, dtype=source.dtype)
    try:
        pixels = source.read(_tiling(images).owned(grid.rank))
    except DatasetError as error:
        problem = error
    for other in grid.comm.all_gather_object(problem):
        if other is not None:
            raise Refusal(str(other)) from other
    found = replace(images, source=pixels)
    return replace(found, source=_source(found))


def choose_leading_part(
    cuttable: Cuttable, num_units: int, options: StreamOptions, grid: GridShape, image: Sequence[int]
) -> LeadingPart:
    """The leading part of a first stage of `num_units` units, for images of this shape (N, C, H, W) on a grid of ranks.

    Raises:
        CannotStream: there is no module `until`, or the whole model would be streamed.
    """
    tiles, spec = tiles_of_images(cuttable.model, options, grid, image)
    size = tuple(image[2:])

    def profile(count: int, margin: int) -> PartProfile | None:
        try:
            return profile_with_margin(Stage(cuttable.part(0, count), cuttable.model), tiles, (spec,), size, margin)
        except NotImplementedError:  # an operator without a rule for tiles
            return None

    most = min(num_units, len(cuttable) - 1)  # the last unit returns the model's result, which is not streamed
    if options.until is not None:
        names = [f"{name}." for name in cuttable.names[:num_units]]
        stops = [i + 1 for i, name in enumerate(names) if name.startswith(f"{options.until}.")]
        if not stops:
            raise CannotStream(
                f"there is no {options.until!r} in the first stage, whose parts are "
                f"{', '.join(cuttable.names[:num_units])}"
            )
        count = stops[-1]
        if count > most:
            raise CannotStream(
                f"the whole model would be streamed, up to {cuttable.names[count - 1]}: end it before that"
            )
    else:
        tile = max(split.owned(0).length for split in spec.tiling.splits[1:]) if spec.tiling is not None else 0
        margin = int((MOST_REPEATED ** (1 / len(size)) - 1) / 2 * tile)
        count = max(1, bisect_left(range(1, most + 1), True, key=lambda stop: profile(stop, margin) is None))

    def statistics_of(stop: int) -> int | None:
        found = profile(stop, max(size))
        return None if found is None else found.num_statistics

    spans = segment_spans(count, options.segments, statistics_of)
    recipes = tuple(cuttable.part(*span) for span in spans)
    return LeadingPart(Segments(recipes, options.norms), options, (0, *(stop for _, stop in spans)))


def tiles_of_images(
    model: nn.Module, options: StreamOptions, grid: GridShape, image: Sequence[int]
) -> tuple[StreamTiles, InputSpec]:
    """The streamed tiles of the first rank of a grid, and the spec of images of this shape (N, C, H, W).

    Raises:
        CannotStream: the images are too small for these tiles.
    """
    samples, _, *size = image
    if len(options.counts) != len(size):
        raise CannotStream(f"streaming cuts {len(options.counts)} axes, but images have {len(size)}")
    tiles = StreamTiles(grid, 0, options.counts, grid.batch > 1)
    if any(parts > pixels for parts, pixels in zip(tiles.grid.space, size, strict=True)):
        cut, sides = ("x".join(map(str, each)) for each in (tiles.grid.space, size))
        raise CannotStream(f"images of {sides} pixels are too small for {cut} tiles")
    return tiles, tiles.image_spec(torch.Size(image), image_dtype(model), Split.at(even_cuts(samples, grid.batch)))
