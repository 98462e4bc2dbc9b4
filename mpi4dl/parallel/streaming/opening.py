"""The leading part of a model's first stage, streamed: which layers it is made of, and how the stage begins with it.

first stage    atom 0 .. atom k-1         |   atom k .. atom n-1
               streamed, by visits,       |   on the outputs of those, as ever
               in one segment or several  |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl.geometry import BATCH, GridShape, Split, Tiling, even_cuts
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype
from mpi4dl.parallel.pipeline.stage import Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import from_tiling
from mpi4dl.parallel.streaming.norms import MODES
from mpi4dl.parallel.streaming.rehearsal import CannotStream, Rehearsed, run
from mpi4dl.parallel.streaming.segments import Segments, spans_of
from mpi4dl.parallel.streaming.stream import Progress, quietly
from mpi4dl.parallel.streaming.visits import Given, OwnSamples, Visits

MOST_REPEATED = 2.0  # how many times the pixels of its tile a visit may read, where nobody says where to end


@dataclass(frozen=True)
class StreamOptions:
    """How the first stage is streamed.

    `counts`: in how many visits along each axis of space of a rank's part. `until`: up to and with which module (None:
    as far as margins are small beside tiles). `norms`: batch norms by which of `norms.MODES`. `segments`: in how many
    parts, whose outputs are kept whole from forward to backward. `remark`: what to say of how they were chosen.
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
            raise ValueError(f"streaming visits {self.counts} tiles along the axes: there must be at least one on each")
        if self.segments < 1:
            raise ValueError(f"streaming takes at least one segment, but got {self.segments}")


@dataclass(frozen=True)
class StreamedImages:
    """What the first stage of a plan is given: images of `size` to be read by visits, on the ranks of `grid`.

    `source` is this rank's tile of each image, a tensor, or an `ImageSource` of the samples that it works on. `samples`
    says how the ranks share the batch. `progress` is told of every visit.
    """

    source: Any
    grid: Grid
    samples: Split
    size: tuple[int, ...]
    progress: Progress = quietly


@dataclass
class Leading:
    """An opening that streams the first calls of a stage, in segments.

    Segment j is that of atoms `bounds[j]` to `bounds[j + 1]` - 1.
    """

    segments: Segments
    options: StreamOptions
    bounds: tuple[int, ...]

    def __call__(self, stage: Stage, *values: Any) -> tuple[int, dict[str, Any]]:
        images = values[0]
        if not isinstance(images, StreamedImages):  # such as shapes, on which nothing is computed
            return 0, dict(zip(stage.recipe.inputs, values, strict=True))
        source, grid = _as_given(images), images.grid
        visits = Visits(grid.shape, grid.rank, self.options.counts, grid.tracks_batch)
        given = visits.images(source.shape, source.dtype, images.samples)
        found = self.segments.run(stage, source, given, visits, grid, images.size, images.progress)
        done = sum(len(recipe.calls) for recipe in self.segments.recipes)
        return done, dict(zip(self.segments.recipes[-1].outputs, found, strict=True))

    def words(self, names: Sequence[str]) -> str:
        """What is streamed, of a stage whose atoms have these names."""
        tiles, segments = "x".join(map(str, self.options.counts)), len(self.segments.recipes)
        many = f" in {segments} segments" if segments > 1 else ""
        return f"each rank visits {tiles} tiles one after the other, up to {names[self.bounds[-1] - 1]}{many}"


def _as_given(images: StreamedImages) -> Any:
    """What the first segment takes."""
    source, grid, samples = images.source, images.grid, images.samples
    if not isinstance(source, Tensor):
        whole = torch.Size((samples.size, *source.shape[1:2], *images.size))
        return OwnSamples(source, samples.owned(grid.coordinates[BATCH]).start, whole)
    if grid.size == 1:
        return source
    cuts = (Split.at(even_cuts(pixels, n)) for pixels, n in zip(images.size, grid.shape.space, strict=True))
    return from_tiling(source, grid, Tiling((samples, *cuts)))


def choose(
    cuttable: Cuttable, num_atoms: int, options: StreamOptions, grid: GridShape, image: Sequence[int]
) -> Leading:
    """The opening of a first stage of so many atoms, for images of this shape (N, C, H, W) on a grid of ranks.

    Raises:
        CannotStream: there is no such module, or it would be the whole model.
    """
    visits, given = visits_to(cuttable.model, options, grid, image)
    size = tuple(image[2:])

    def rehearsed(count: int, margin: int) -> Rehearsed | None:
        try:
            return run(Stage(cuttable.part(0, count), cuttable.model), visits, (given,), size, margin)
        except NotImplementedError:  # an operator without a rule for tiles
            return None

    most = min(num_atoms, len(cuttable) - 1)  # the model's result must not be all that is streamed
    if options.until is not None:
        ends = [i + 1 for i, name in enumerate(cuttable.names[:num_atoms]) if _within(name, options.until)]
        if not ends:
            raise CannotStream(
                f"there is no {options.until!r} in the first stage, whose parts are "
                f"{', '.join(cuttable.names[:num_atoms])}"
            )
        count = ends[-1]
        if count > most:
            raise CannotStream(
                f"the whole model would be streamed, up to {cuttable.names[count - 1]}: end it before that"
            )
    else:
        tile = max(split.owned(0).length for split in given.tiling.splits[1:]) if given.tiling is not None else 0
        margin = int((MOST_REPEATED ** (1 / len(size)) - 1) / 2 * tile)
        count, beyond = 0, most + 1
        while beyond - count > 1:
            middle = (count + beyond) // 2
            count, beyond = (middle, beyond) if rehearsed(middle, margin) is not None else (count, middle)
        count = max(count, 1)

    def rounds_of(end: int) -> int | None:
        found = rehearsed(end, max(size))
        return None if found is None else found.num_rounds

    spans = spans_of(count, options.segments, rounds_of)
    recipes = tuple(cuttable.part(*span) for span in spans)
    return Leading(Segments(recipes, options.norms), options, (0, *(end for _, end in spans)))


def visits_to(model: nn.Module, options: StreamOptions, grid: GridShape, image: Sequence[int]) -> tuple[Visits, Given]:
    """The visits of the first rank of a grid to images of this shape (N, C, H, W), and what they are given.

    Raises:
        CannotStream: there are not so many tiles.
    """
    samples, _, *size = image
    if len(options.counts) != len(size):
        raise CannotStream(f"streaming visits {len(options.counts)} axes, but images have {len(size)}")
    visits = Visits(grid, 0, options.counts, grid.batch > 1)
    if any(parts > pixels for parts, pixels in zip(visits.grid.space, size, strict=True)):
        tiles, sides = ("x".join(map(str, each)) for each in (visits.grid.space, size))
        raise CannotStream(f"images of {sides} pixels have no {tiles} tiles to visit")
    return visits, visits.images(torch.Size(image), image_dtype(model), Split.at(even_cuts(samples, grid.batch)))


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
