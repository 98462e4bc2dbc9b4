"""The leading part of a model's first stage, which is streamed: which units it has, and how the stage runs it.

first stage    unit 0 .. unit k-1               |   unit k .. unit n-1
               streamed tile by tile,           |   on the whole outputs of those, as without streaming
               in one segment or several        |
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._wording import quietly
from mpi4dl.comm import Refusal
from mpi4dl.datasets import DatasetError
from mpi4dl.geometry import BATCH, GridShape, Split, Tiling, even_cuts
from mpi4dl.parallel.disk import ON_DEVICE, Keep
from mpi4dl.parallel.pipeline.program import CONSTANTS, Slot, map_leaves
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype
from mpi4dl.parallel.pipeline.stage import Stage, StageProgram
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import from_tiling
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.margins import (
    CannotStream,
    PartProfile,
    StreamPlan,
    changed_in_place,
    profile_with_margin,
)
from mpi4dl.parallel.streaming.norms import MODES, RunningNorms
from mpi4dl.parallel.streaming.stream import Progress, Streaming
from mpi4dl.parallel.streaming.stream_tiles import ImageSource, InputSpec, OwnSamples, StreamTiles

EACH_NORM = 1 << 20  # segments, of which each norm is one: more than a model has norms
KNOWN_PLANS = 64  # shapes of batches whose plans are kept before all are dropped: slides have any number of patches


@dataclass
class Segments:
    """A part of a model, or all of it, in segments that are streamed one after the other.

    Outputs are kept whole between segments. The tiles of a segment start from them, so they read a smaller margin, and
    their statistics passes repeat less.

    Args:
        programs: the program of each segment; none for a single segment that is all of the module. It need not be
            traceable then.
        norms: the mode of batch norms, one of `norms.MODES`.
        keep: where outputs between segments are kept.
    """

    programs: "tuple[SegmentProgram, ...]"
    norms: str
    keep: Keep = ON_DEVICE
    _parts: list["StreamSegment"] = field(default_factory=list)
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
        plans = self._plans(parts, images, tiles, grid, size)
        values = ValuesBetween(source)
        device = next((p.device for p in module.parameters()), None)
        for number, (part, plan) in enumerate(zip(parts, plans, strict=True)):
            name = f"segment {number + 1} of {len(parts)}, " if len(parts) > 1 else ""
            keep = self.keep, ON_DEVICE if number == len(parts) - 1 else self.keep
            streaming = Streaming(part, values.before(part), plan, grid, self.norms, progress, name, keep, device)
            values.behind(part, streaming.run())
        return values.result

    def parts(self, module: nn.Module) -> "list[StreamSegment]":
        """New segments, which share the modules of `module`."""
        found, paths = list[StreamSegment](), {path for path, _ in module.named_modules()}
        for number, each in enumerate(self.programs):
            # The first one watches what all depend on; what belongs to other stages is theirs to watch.
            watched = tuple(watch for watch in each.stage_program.watched if watch.path in paths) if number == 0 else ()
            found.append(StreamSegment(Stage(replace(each.stage_program, watched=watched), module), each))
        return found or [StreamSegment(module, None)]

    def watch(self, module: nn.Module) -> None:
        """Notice from now on what changes of that on which the programs depend."""
        self._parts = self._parts or self.parts(module)

    def changes(self) -> Iterator[str]:
        """Messages about values of Python that changed since."""
        for segment in self._parts[:1]:
            if segment.program is not None and isinstance(segment.part, Stage):
                yield from segment.part.changes()

    def _parts_of(self, module: nn.Module) -> "list[StreamSegment]":
        """The segments, in the training or evaluation modes of `module`."""
        self.watch(module)
        for segment in self._parts:
            segment.training = module.training
            for name, inner in segment.part.named_modules():
                original = module.get_submodule(name)
                if inner is not original:
                    inner.training = original.training
        return self._parts

    def _plans(
        self, parts: "Sequence[StreamSegment]", images: InputSpec, tiles: StreamTiles, grid: Grid, size: tuple[int, ...]
    ) -> tuple[StreamPlan, ...]:
        modes = tuple(inner.training for part in parts for inner in part.modules())
        key = (grid, images, tiles, size, modes, torch.is_grad_enabled())
        if key not in self._known_plans:
            if len(self._known_plans) >= KNOWN_PLANS:
                self._known_plans.clear()
            specs, plans = ValuesBetween(images), []
            for part in parts:
                with nullcontext() if self.norms == "exact" else RunningNorms().for_tile(record=False):
                    plans.append(StreamPlan.of(part, tiles, specs.before(part), size))
                specs.behind(part, [InputSpec.like(y) for y in plans[-1].profile.outputs])
            self._known_plans[key] = tuple(plans)
        return self._known_plans[key]


class SegmentProgram(NamedTuple):
    """The calls of a segment, and the names of the values that are `alive` behind it."""

    stage_program: StageProgram
    alive: tuple[str, ...]

    @classmethod
    def all_of(
        cls, cuttable: Cuttable, spans: Sequence[tuple[int, int]], image: Sequence[int]
    ) -> "tuple[SegmentProgram, ...]":
        """Of each span the units `first` to `end` - 1, for images of this shape (N, C, H, W)."""
        changes = changed_in_place(cuttable, spans[-1][1], image)
        return tuple(cls(cuttable.segment(*span, changes), cuttable.live(span[1])) for span in spans)


class StreamSegment(nn.Module):
    """A part of a model as a function from tensors to tensors; the part's own arguments may be nests of tensors.

    `program` is the part's; None for a model that is one segment. `inputs` and `outputs` are the structures of the
    part's arguments and results, as they were in the last call.
    """

    def __init__(self, part: nn.Module, program: SegmentProgram | None) -> None:
        super().__init__()
        self.part, self.program = part, program
        self.inputs, self.outputs = _Nest(), _Nest()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.outputs.take(self.part(*self.inputs.of(tensors))))


class ValuesBetween:
    """The values that are alive between two segments, by name: nests of tensors, or of what describes tensors.

    first:  what the first segment is called with
    """

    def __init__(self, first: Any) -> None:
        self.result = self._images = first
        self._known: dict[str, Any] = {}
        self._used: set[str] = set()

    def fresh(self, segment: StreamSegment) -> list[Any]:
        """The leaves of those arguments of a segment that no segment before it has."""
        names = [name for name in self._inputs(segment) if name not in self._used]
        self._used |= set(names)
        return _Nest().take([self._known[name] for name in names])

    def _inputs(self, segment: StreamSegment) -> tuple[str, ...]:
        if segment.program is None or segment.program.stage_program.is_first:
            return ()
        return segment.program.stage_program.inputs

    def before(self, segment: StreamSegment) -> list[Any]:
        """The leaves of the arguments of a segment."""
        names = self._inputs(segment)
        if not names:
            return [self.result]
        return segment.inputs.take(tuple(self._known[name] for name in names))

    def behind(self, segment: StreamSegment, leaves: Sequence[Any]) -> None:
        """Take the leaves of the results of a segment. `result` is what the segment returned, or all that is alive."""
        self.result = segment.outputs.of(leaves)
        program = segment.program
        if program is not None and not program.stage_program.is_last:
            known = self._known | dict(zip(program.stage_program.outputs, self.result, strict=True))
            if program.stage_program.is_first:  # those behind it may read the images again
                known |= dict.fromkeys(program.stage_program.inputs, self._images)
            self._known = {name: known[name] for name in program.alive}
            self.result = tuple(self._known.values())


class _Nest:
    """How some tensors nest, with a `Slot` for each; None for a plain sequence. Copies of a module share it.

    Numbers among them, such as the size of the image, are those of the whole image, and so the same in all tiles.
    """

    def __init__(self) -> None:
        self._template: Any = None

    def take(self, nested: Any) -> list[Any]:
        """The tensors in `nested`, or what describes tensors."""
        found: list[Any] = []

        def part(leaf: Any) -> Any:
            if isinstance(leaf, CONSTANTS):
                return leaf
            found.append(leaf)
            return Slot(len(found) - 1)

        self._template = map_leaves(part, nested)
        return found

    def of(self, tensors: Sequence[Any]) -> Any:
        """The nest with these tensors in it."""
        if self._template is None:
            return tensors
        return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, self._template)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Nest":
        return self


def segment_spans(num_units: int, segments: int, statistics_of: Callable[[int], int | None]) -> list[tuple[int, int]]:
    """The units of each segment, as [start, stop).

    Segments get equal numbers of statistics, or equal numbers of units where there are no statistics. Of `EACH_NORM`
    each unit that has statistics is one of its own: its statistics passes repeat nothing else. `statistics_of(n)` is
    the number of statistics in the first n units; None if it is unknown.
    """
    if segments == 1:
        return [(0, num_units)]
    statistics = [0]
    for stop in range(1, num_units + 1):
        found = statistics_of(stop)
        statistics.append(statistics[-1] if found is None else found)
    if segments == EACH_NORM and statistics[-1]:
        alone = [i for i, (before, behind) in enumerate(pairwise(statistics)) if before != behind]
        return list(pairwise(sorted({0, num_units, *alone, *(i + 1 for i in alone)})))
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


def segments_in(
    cuttable: Cuttable, num_units: int, options: Any, tiles: StreamTiles, spec: InputSpec, image: Sequence[int]
) -> tuple[list[tuple[int, int]], Segments]:
    """The first units of a model in segments as `options` say, for images of this shape and spec; and their spans."""

    def statistics_of(stop: int) -> int | None:
        part = Stage(cuttable.part(0, stop), cuttable.model)
        try:
            found = profile_with_margin(part, tiles, (spec,), image[2:], max(image[2:]))
        except NotImplementedError:  # an operator without a rule for tiles
            return None
        return None if found is None else found.num_statistics

    spans = segment_spans(num_units, options.segments, statistics_of)
    return spans, Segments(SegmentProgram.all_of(cuttable, spans, image), options.norms, options.keep)


def segments_of(asked: int | str | None) -> int:
    """The number of segments that `stream_segments` asks for."""
    return EACH_NORM if asked == "norms" else int(asked or 1)


MOST_REPEATED = 2.0  # without `until`, a tile with its margin has at most so many times the pixels of the tile


@dataclass(frozen=True)
class StreamOptions:
    """How the first stage is streamed.

    Args:
        counts: the number of tiles along each axis of space of a rank's part of the images.
        until: the name of the last streamed module; None to stop before margins become large beside tiles.
        norms: the mode of batch norms, one of `norms.MODES`.
        segments: the number of segments, between which outputs are kept from forward to backward.
        keep: where these outputs are kept.
        remark: a text for the user about how the options were chosen.
    """

    counts: tuple[int, ...]
    until: str | None = None
    norms: str = "exact"
    segments: int = 1
    keep: Keep = ON_DEVICE
    remark: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.norms not in MODES:
            raise ValueError(f"norms of streaming are {self.norms!r}, but must be one of {', '.join(MODES)}")
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"streaming needs at least one tile along each axis, but got {self.counts}")
        if self.segments < 1:
            raise ValueError(f"streaming takes at least one segment, but got {self.segments}")

    @property
    def uses_files(self) -> bool:
        return self.keep.where == "disk"


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
    """Runs the first calls of a stage by streaming: the first `num_calls`, behind which the values `alive` are alive.

    `units` are the units of the model that each segment is in, as [start, stop): of several segments within one unit
    each has that unit.
    """

    segments: Segments
    options: StreamOptions
    units: tuple[tuple[int, int], ...]
    num_calls: int
    alive: tuple[str, ...]
    source: Cuttable  # the model in the units that the segments are made of
    rest: StageProgram  # what follows them

    @property
    def num_units(self) -> int:
        """How many units of the model are streamed."""
        return self.units[-1][1]

    def programs(self) -> list[StageProgram]:
        """The programs of the segments, and of what follows them."""
        return [*(each.stage_program for each in self.segments.programs), self.rest]

    def __call__(self, stage: Stage, *values: Any) -> tuple[int, dict[str, Any]]:
        """The number of calls of the stage that ran here, and the values with which the stage continues, by name."""
        images = values[0]
        if not isinstance(images, StreamedImages):  # such as meta tensors: the stage makes all calls itself
            return 0, dict(zip(stage.stage_program.inputs, values, strict=True))
        if set(self.alive) & set(stage.stage_program.inputs):  # what is not streamed takes them too
            images = in_memory(images)
        source, grid = _source(images), images.grid
        tiles = StreamTiles(grid.shape, grid.rank, self.options.counts, grid.tracks_batch)
        spec = tiles.image_spec(source.shape, source.dtype, images.samples)
        found = self.segments.run(stage, source, spec, tiles, grid, images.size, images.progress)
        return self.num_calls, dict(zip(self.alive, found, strict=True))

    def changes(self) -> Iterator[str]:
        """Messages about values of Python that changed since the model was cut."""
        return self.segments.changes()

    def describe(self, names: Sequence[str]) -> str:
        """A line about the streamed part; `names` are those of the stage's units."""
        tiles, segments = "x".join(map(str, self.options.counts)), len(self.segments.programs)
        many = f" in {segments} segments" if segments > 1 else ""
        return f"each rank streams {tiles} tiles one after the other, up to {names[self.num_units - 1]}{many}"


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


def _num_units_until(until: str, names: Sequence[str], most: int) -> int:
    """How many units of a first stage, of these names, end with the module `until`. Raises CannotStream."""
    ends = [i + 1 for i, name in enumerate(names) if f"{name}.".startswith(f"{until}.")]
    if not ends:
        raise CannotStream(f"there is no {until!r} in the first stage, whose parts are {', '.join(names)}")
    if ends[-1] > most:
        last = names[ends[-1] - 1]
        raise CannotStream(
            f"the whole model would be streamed, up to {last}: end it before that, or append an nn.Identity"
        )
    return ends[-1]


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

    def ends_flat(count: int) -> bool:
        """Whether several axes of the image are one dim behind so many units, as in tokens of an image."""
        found = profile(count, max(size))
        leaves = [] if found is None else pytree.tree_leaves(found.outputs)
        return any(isinstance(y, SpatialTensor) and y.layout.flat for y in leaves)

    most = min(num_units, len(cuttable) - 1)  # the last unit returns the model's result, which is not streamed
    if options.until is not None:
        count = _num_units_until(options.until, cuttable.names[:num_units], most)
    else:
        tile = max(split.owned(0).length for split in spec.tiling.splits[1:]) if spec.tiling is not None else 0
        margin = int((MOST_REPEATED ** (1 / len(size)) - 1) / 2 * tile)
        count = max(1, bisect_left(range(1, most + 1), True, key=lambda stop: profile(stop, margin) is None))
        while count > 1 and ends_flat(count):
            count -= 1
    if ends_flat(count):
        raise CannotStream(
            f"the streamed part would end with {cuttable.names[count - 1]}, where several axes of the image are one "
            "dim: end it before that, or share images by `tiles`"
        )

    fine = within_blocks(cuttable, count, image) if options.segments == EACH_NORM else None
    source, stops = fine or (cuttable, tuple(range(1, count + 1)))

    spans, segments = segments_in(source, stops[-1], options, tiles, spec, image)
    units = tuple((bisect_right(stops, first), bisect_left(stops, end) + 1) for first, end in spans)
    num_calls = sum(len(unit.calls) for unit in cuttable.program.units[:count])
    rest = source.part(stops[-1], len(source))
    return LeadingPart(segments, options, units, num_calls, cuttable.live(count), source, rest)


def within_blocks(cuttable: Cuttable, count: int, image: Sequence[int]) -> tuple[Cuttable, tuple[int, ...]] | None:
    """The same model in smaller units, and where among these each of the first `count` units ends; None if a block of
    them cannot be opened.
    """
    try:
        fine = Cuttable(cuttable.model, cuttable.whole, tuple(image), within_blocks=True)
    except ValueError:
        return None
    stops, at = list[int](), 0
    for name in cuttable.names[:count]:
        path = name.partition(":")[0]
        begin = at
        while at < len(fine) and _is_within(fine.names[at], path) and (at == begin or fine.names[at] != name):
            at += 1
        if at == begin:
            return None
        stops.append(at)
    follows = at == len(fine) or not _is_within(fine.names[at], cuttable.names[count - 1].partition(":")[0])
    return (fine, tuple(stops)) if follows and len(fine.live(at)) == len(cuttable.live(count)) else None


def _is_within(name: str, path: str) -> bool:
    return name.partition(":")[0] == path or name.startswith(f"{path}.")


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
