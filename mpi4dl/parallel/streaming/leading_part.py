"""The leading part of a model's first stage, streamed: which layers it is made of, and how the stage begins with it.

first stage    atom 0 .. atom k-1         |   atom k .. atom n-1
               streamed, by visits,       |   on the outputs of those, as ever
               in one segment or several  |
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl._progress import quietly
from mpi4dl.geometry import BATCH, GridShape, Split, Tiling, even_cuts
from mpi4dl.parallel.pipeline.split import Cuttable, image_dtype
from mpi4dl.parallel.pipeline.stage import Recipe, Stage
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.spatial.sharding import from_tiling
from mpi4dl.parallel.streaming.margins import CannotStream, Rehearsed, Route, run
from mpi4dl.parallel.streaming.norms import MODES, KnownStatistics
from mpi4dl.parallel.streaming.stream import Progress, Streaming
from mpi4dl.parallel.streaming.visits import Given, ImageSource, OwnSamples, Visits

# A part of a model, or all of it, in segments that are streamed one after the other.
#
# Between segments the outputs are kept whole: visits of one segment begin there, so that they read less of a margin,
# and repeat less for the rounds of their norms.

KNOWN = 64  # routes that are remembered before all are forgotten: bags of patches may have any size


@dataclass
class Segments:
    """The program of each segment of a module, and the mode of batch norms, one of `norms.MODES`.

    Without recipes it is all of the module, which need not be traceable.
    """

    recipes: tuple[Recipe, ...]
    norms: str
    _parts: list["_Segment"] = field(default_factory=list)
    _routes: dict[Any, tuple[Route, ...]] = field(default_factory=dict)

    def run(
        self,
        module: nn.Module,
        source: Tensor | ImageSource,
        given: Given,
        visits: Visits,
        grid: Grid,
        size: tuple[int, ...],
        progress: Progress = quietly,
    ) -> Any:
        """The result of the last segment, for images of `size` as inputs of the first."""
        parts = self._parts_of(module)
        found: tuple[Any, ...] = (source,)
        for number, (part, route) in enumerate(zip(parts, self._route(parts, given, visits, grid, size), strict=True)):
            name = f"segment {number + 1} of {len(parts)}, " if len(parts) > 1 else ""
            found = Streaming(part, found, route, grid, self.norms, progress, name).run()
        return parts[-1].nested(found)

    def parts(self, module: nn.Module) -> "list[_Segment]":
        """The segments, which share the modules of a model, or of a stage."""
        wanted: list[nn.Module] = [Stage(recipe, module) for recipe in self.recipes]
        found: list[_Segment] = []
        for part in wanted or [module]:
            found.append(_Segment(part, found[-1] if found else None))
        return found

    def _parts_of(self, module: nn.Module) -> "list[_Segment]":
        """The segments, in the modes of the module."""
        self._parts = self._parts or self.parts(module)
        for segment in self._parts:
            segment.training = module.training
            for name, inner in segment.part.named_modules():
                original = module.get_submodule(name)
                if inner is not original:
                    inner.training = original.training
        return self._parts

    def _route(
        self, parts: Sequence[nn.Module], given: Given, visits: Visits, grid: Grid, size: tuple[int, ...]
    ) -> tuple[Route, ...]:
        modes = tuple(inner.training for part in parts for inner in part.modules())
        key = (grid, given, visits, size, modes, torch.is_grad_enabled())
        if key not in self._routes:
            if len(self._routes) >= KNOWN:
                self._routes.clear()
            givens: tuple[Given, ...] = (given,)
            routes = []
            for part in parts:
                with nullcontext() if self.norms == "exact" else KnownStatistics().one_visit(noted=False):
                    routes.append(Route.of(part, visits, givens, size))
                givens = tuple(map(Given.like, routes[-1].rehearsed.outputs))
            self._routes[key] = tuple(routes)
        return self._routes[key]


class _Segment(nn.Module):
    """A part of a model, of the tensors in its values, which may be nests of them; `before` made them."""

    def __init__(self, part: nn.Module, before: "_Segment | None") -> None:
        super().__init__()
        self.part = part
        self.made: _Nest = _Nest()
        self._nest: _Nest = _Nest() if before is None else before.made

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found, self.made.structure = pytree.tree_flatten(self.part(*self._nest.of(tensors)))
        return tuple(found)

    def nested(self, tensors: Sequence[Tensor]) -> Any:
        """The part's outputs, of the tensors in them."""
        return self.made.of(tensors)


class _Nest:
    """How tensors lie in values; None: each is one. Copies of a module have it in common."""

    def __init__(self) -> None:
        self.structure: Any = None

    def of(self, tensors: Sequence[Tensor]) -> Any:
        return tensors if self.structure is None else pytree.tree_unflatten(tensors, self.structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Nest":
        return self


def spans_of(count: int, segments: int, rounds_of: Callable[[int], int | None]) -> list[tuple[int, int]]:
    """Of so many atoms the first of each segment, and the first behind it.

    Rounds are shared out evenly, and so are atoms where there are none: `rounds_of(n)` are those of the first n atoms;
    None if that is not known.
    """
    if segments == 1:
        return [(0, count)]
    rounds = [0]
    for end in range(1, count + 1):
        found = rounds_of(end)
        rounds.append(rounds[-1] if found is None else found)
    return list(pairwise([0, *_ends(rounds, min(segments, count)), count]))


def _ends(rounds: Sequence[int], segments: int) -> list[int]:
    """Behind how many atoms each segment but the last ends, if `rounds[i]` are those of the first i atoms."""
    ends: list[int] = []
    total, last = rounds[-1], len(rounds) - 1
    for segment in range(1, segments):
        if total:
            end = next(i for i, found in enumerate(rounds) if found * segments >= total * segment)
        else:
            end = last * segment // segments
        if end > (ends[-1] if ends else 0) and end < last:
            ends.append(end)
    return ends


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
            raise ValueError(f"streaming needs at least one tile along each axis, but got {self.counts}")
        if self.segments < 1:
            raise ValueError(f"streaming takes at least one segment, but got {self.segments}")


@dataclass(frozen=True)
class StreamedImages:
    """The inputs of the first stage of a plan: images of `size` that visits read, on the ranks of `grid`.

    `source` is this rank's tile of each image, a tensor, or an `ImageSource` of the samples that it works on. `samples`
    says how the ranks share the batch. `progress` is called at every visit.
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
        """A description of the streamed part, of a stage whose units have these names."""
        tiles, segments = "x".join(map(str, self.options.counts)), len(self.segments.recipes)
        many = f" in {segments} segments" if segments > 1 else ""
        return f"each rank streams {tiles} tiles one after the other, up to {names[self.bounds[-1] - 1]}{many}"


def _as_given(images: StreamedImages) -> Any:
    """The inputs of the first segment."""
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
        count = max(1, bisect_left(range(1, most + 1), True, key=lambda end: rehearsed(end, margin) is None))

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
        raise CannotStream(f"streaming cuts {len(options.counts)} axes, but images have {len(size)}")
    visits = Visits(grid, 0, options.counts, grid.batch > 1)
    if any(parts > pixels for parts, pixels in zip(visits.grid.space, size, strict=True)):
        tiles, sides = ("x".join(map(str, each)) for each in (visits.grid.space, size))
        raise CannotStream(f"images of {sides} pixels are too small for {tiles} tiles")
    return visits, visits.images(torch.Size(image), image_dtype(model), Split.at(even_cuts(samples, grid.batch)))


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
