"""The leading part of a model's first stage, streamed: which layers it is made of, and how the stage begins with it.

first stage    atom 0 .. atom k-1   |   atom k .. atom n-1
               streamed, by visits  |   on the outputs of those, as ever
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import BATCH, GridShape, Split, Tiling, even_cuts
from mpi4dl.parallel.pipeline.split import Cuttable
from mpi4dl.parallel.pipeline.stage import Recipe, Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.sharding import from_tiling
from mpi4dl.parallel.streaming.norms import MODES
from mpi4dl.parallel.streaming.rehearsal import CannotStream, can_run
from mpi4dl.parallel.streaming.route import Route
from mpi4dl.parallel.streaming.stream import Streaming
from mpi4dl.parallel.streaming.visits import OwnSamples, Pixels, Source, Visits

MOST_REPEATED = 2.0  # how many times the pixels of its tile a visit may read, where nobody says where to end


@dataclass(frozen=True)
class StreamOptions:
    """How the first stage is streamed: in how many visits along each axis of space of a rank's part, up to and with
    which module (None: as far as margins are small beside tiles), and batch norms by which of `norms.MODES`.
    """

    counts: tuple[int, ...]
    until: str | None = None
    norms: str = "exact"

    def __post_init__(self) -> None:
        if self.norms not in MODES:
            raise ValueError(f"norms of streaming are {self.norms!r}, but must be one of {', '.join(MODES)}")
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"streaming visits {self.counts} tiles along the axes: there must be at least one on each")


@dataclass(frozen=True)
class StreamedImages:
    """What the first stage of a plan is given: images to be read by visits, on these ranks, who share the batch so."""

    source: Any  # a tensor, this rank's tile of each image, or a `Source` of its samples
    grid: Grid
    samples: Split
    size: tuple[int, ...]


@dataclass
class Leading:
    """An opening that streams: the first `num_calls` calls of a stage are those of `recipe`."""

    recipe: Recipe
    options: StreamOptions
    _lead: Stage | None = None
    _routes: dict[Any, Route] = field(default_factory=dict)

    def __call__(self, stage: Stage, *values: Any) -> tuple[int, dict[str, Any]]:
        (images,) = values
        lead = self._part_of(stage)
        source = self._source(lead, images)
        route = self._route(lead, images, source)
        outputs = Streaming(lead, lead, source, route, images.grid, self.options.norms).run()
        return len(self.recipe.calls), dict(zip(self.recipe.outputs, outputs, strict=True))

    def _part_of(self, stage: Stage) -> Stage:
        """The leading part, in the modes of the stage."""
        if self._lead is None:
            self._lead = Stage(self.recipe, stage)
        for name, module in self._lead.named_modules():
            original = stage.get_submodule(name)
            if module is not original:
                module.training = original.training
        return self._lead

    def _source(self, lead: Stage, images: StreamedImages) -> Source:
        """What visits read; of tiles in memory what their margins need comes from the other ranks first."""
        source, grid = images.source, images.grid
        whole = torch.Size((images.samples.size, *source.shape[1:2], *images.size))
        if not isinstance(source, Tensor):
            return OwnSamples(source, images.samples.owned(grid.coordinates[BATCH]).start, whole)
        if grid.size == 1:
            return Pixels.of(source)
        bare = Visits(
            grid.shape,
            grid.rank,
            (1,) * len(images.size),
            images.samples,
            images.size,
            (0,) * len(images.size),
            grid.tracks_batch,
        )
        x = from_tiling(source, grid, bare.tiling)
        margin = self._route(lead, images, Pixels(source, whole, bare.tiling.whole)).visits.margin
        batch, *space = x.layout.tiling.splits
        wide = Tiling((batch, *(split.widen(most) for split, most in zip(space, margin, strict=True))))
        return Pixels.of(retile(x, wide))

    def _route(self, lead: Stage, images: StreamedImages, source: Source) -> Route:
        modes = tuple(module.training for module in lead.modules())
        key = (images.grid, source.shape, source.dtype, images.samples, modes, torch.is_grad_enabled())
        if key not in self._routes:
            self._routes[key] = Route.of(
                lead, images.grid, self.options.counts, source.shape, source.dtype, images.samples
            )
        return self._routes[key]


def choose(
    cuttable: Cuttable, num_atoms: int, options: StreamOptions, grid: GridShape, image: Sequence[int]
) -> Leading:
    """The opening of a first stage of so many atoms, for images of this shape (N, C, H, W) on a grid of ranks.

    Raises:
        CannotStream: there is no such module, or it would be the whole model.
    """
    samples, channels, *size = image
    if len(options.counts) != len(size):
        raise CannotStream(f"streaming visits {len(options.counts)} axes, but images have {len(size)}")
    shared = Split.at(even_cuts(samples, grid.batch))
    visits = Visits(grid, 0, options.counts, shared, tuple(size), (0,) * len(size), grid.batch > 1)

    def runs(count: int) -> bool:
        tile = max(split.owned(0).length for split in visits.tiling.splits[1:])
        margin = int((MOST_REPEATED ** (1 / len(size)) - 1) / 2 * tile)
        return can_run(Stage(cuttable.lead(count), cuttable.model), visits, margin, channels)

    most = min(num_atoms, len(cuttable) - 1)  # the model's result must not be all that is streamed
    if options.until is not None:
        ends = [i + 1 for i, name in enumerate(cuttable.names[:num_atoms]) if _within(name, options.until)]
        if not ends:
            raise CannotStream(
                f"there is no {options.until!r} in the first stage, whose parts are "
                f"{', '.join(cuttable.names[:num_atoms])}"
            )
        count = ends[-1]
    else:
        count, beyond = 0, most + 1
        while beyond - count > 1:
            middle = (count + beyond) // 2
            count, beyond = (middle, beyond) if runs(middle) else (count, middle)
        count = max(count, 1)
    if count > most:
        raise CannotStream(f"the whole model would be streamed, up to {cuttable.names[count - 1]}: end it before that")
    return Leading(cuttable.lead(count), options)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
