"""Which visits to make where memory is limited: as few as fit, in as many segments as make the least work of it.

Fewer visits read less of margins, and more segments repeat less for the rounds of their norms, but keep more.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4dl._wording import counted, mebibytes
from mpi4dl.geometry import BATCH, GridShape
from mpi4dl.parallel.costs.atoms import AtomCounts, StageBytes, stage_bytes
from mpi4dl.parallel.costs.cost_model import StageCosts
from mpi4dl.parallel.costs.meter import dry_run
from mpi4dl.parallel.costs.timing import AtomSeconds, Column
from mpi4dl.parallel.plan import grid_name
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned
from mpi4dl.parallel.streaming.leading_part import Leading, Segments, StreamOptions, visits_to
from mpi4dl.parallel.streaming.margins import CannotStream, Rehearsed, alone, rehearse, shape_of
from mpi4dl.parallel.streaming.norms import KnownStatistics
from mpi4dl.parallel.streaming.visits import Given, Visits

# Memory and time of streaming on a rank: one visit of each segment, run forward and backward on shapes.
#
# forward of segment 3      [given to 2][given to 3][made by 3 .......][visit]
# the rest of the stage     [given to 2][given to 3][made by 3, with its gradient][what the rest takes]
# backward of segment 2     [given to 2][given to 3][gradients of what 2 made and was given][visit]
#
# The visit is the one that holds most, which has a margin on all sides. Nothing is computed, nothing allocated.

READ_AHEAD = 2  # tiles: the one that is visited next, and what it is made of while it is read


class SegmentNeeds(NamedTuple):
    """The needs of one streamed segment.

    `margin` in pixels of the images. `visit_bytes` is the most that a visit has at a time, with what it was given, but
    for images, of which `read_bytes` are there, for it and the next one. All visits of a rank together are given
    `given_bytes` that lie in its memory (none of images), and make `made_bytes`. Rounds are those of norms; `flops` are
    those of the forward passes of all visits of all ranks, once.
    """

    margin: int
    read_bytes: int
    visit_bytes: int
    given_bytes: int
    made_bytes: int
    forward_rounds: int
    backward_rounds: int
    flops: float

    @property
    def forward_passes(self) -> float:
        """How often a rank's part is computed forward: of the visits that end at a norm, half on the average."""
        return 1 + self.forward_rounds / 2

    @property
    def backward_passes(self) -> tuple[float, float]:
        """How often in the backward pass forward, and backward: every visit runs forward to its end."""
        return 1 + self.backward_rounds, 1 + self.backward_rounds / 2

    def step_flops(self) -> float:
        """The FLOPs of a training step on all ranks, if backward is twice forward."""
        again, back = self.backward_passes
        return self.flops * (self.forward_passes + again + 2 * back)


@dataclass(frozen=True)
class StreamNeeds:
    """The needs of streaming the first units of a stage: `bounds[j]` to `bounds[j + 1]` are those of segment j.

    `spread`: several ranks have parts of the images, and what is handed on is copied with a margin.
    """

    segments: tuple[SegmentNeeds, ...]
    bounds: tuple[int, ...]
    options: StreamOptions
    spread: bool

    @property
    def margin(self) -> int:
        """How far visits read beyond their tiles of the images."""
        return self.segments[0].margin

    def stage(self, column: Sequence[AtomCounts], stop: int, rest: StageBytes | None = None) -> StageBytes:
        """What a rank of the first stage has, of the first `stop` atoms; `column` are all atoms' on its part.

        `rest` is what the atoms take that are not streamed, if they take something else than that column says.
        """
        done = self.bounds[-1]
        if rest is None:
            rest = StageBytes(0, 2 * self.segments[-1].made_bytes)
            if done < stop:
                rest = stage_bytes(column[done:stop], column[done - 1], stop == len(column))
                rest = rest._replace(working=rest.working - column[done - 1].handed)  # its gradient is not sent
        given = sum(segment.given_bytes for segment in self.segments)
        sofar, before, most = 0, 0, given + rest.kept + rest.working
        for segment in self.segments:
            sofar += segment.given_bytes
            visit = segment.read_bytes + segment.visit_bytes
            most = max(most, sofar + before + segment.made_bytes + visit)
            most = max(most, given + segment.made_bytes + segment.given_bytes + visit)
            before = segment.made_bytes if self.spread else 0
        return StageBytes(given + rest.kept, most - given - rest.kept)

    def column(self, column: Column, flops: Sequence[float]) -> Column:
        """Times of units on a rank, from those of units that are not streamed, and from FLOPs in all.

        Streamed atoms repeat themselves for margins, by their FLOPs, and for rounds; messages take no time. They do not
        include the time of Python for each visit.
        """
        found = list(column)
        for segment, (first, end) in zip(self.segments, pairwise(self.bounds), strict=True):
            wider = max(1.0, segment.flops / (sum(flops[first:end]) or segment.flops or 1.0))
            again, back = segment.backward_passes
            for i in range(first, end):
                forward, backward = column[i].forward * wider, column[i].backward * wider
                found[i] = AtomSeconds(
                    forward * segment.forward_passes,
                    forward * again + backward * back,
                    handed_bytes=column[i].handed_bytes,
                )
        return tuple(found)

    def times(self, images: int, visits: float = 1.0) -> "StreamNeeds":
        """Those of so many times as many images, and as many visits to each of them."""

        def larger(segment: SegmentNeeds) -> SegmentNeeds:
            whole = images * visits
            return segment._replace(
                read_bytes=segment.read_bytes * images,
                visit_bytes=segment.visit_bytes * images,
                given_bytes=round(segment.given_bytes * whole),
                made_bytes=round(segment.made_bytes * whole),
                flops=segment.flops * whole,
            )

        return replace(self, segments=tuple(map(larger, self.segments)))

    def prices(self, prices: StageCosts, flops: Sequence[float]) -> StageCosts:
        """Prices of a plan whose first stage is streamed; `flops` are those of all atoms, for all ranks."""
        return replace(prices, columns=(self.column(prices.columns[0], flops), *prices.columns[1:]))

    def work(self) -> float:
        """FLOPs of a training step's streamed part on all ranks, if backward is twice forward: to compare choices."""
        return sum(segment.step_flops() for segment in self.segments)


def needs_of(leading: Leading, model: nn.Module, grid: GridShape, image: Sequence[int]) -> StreamNeeds:
    """The needs of a rank that visits images of this shape (N, C, H, W), on a grid of ranks.

    Raises:
        CannotStream: a segment needs the whole image at once.
    """
    visits, given = visits_to(model, leading.options, grid, image)
    size = tuple(image[2:])
    segments = needs_of_segments(leading.segments, model, visits, given, size)
    return StreamNeeds(segments, leading.bounds, leading.options, grid.size > 1)


def needs_of_segments(
    segments: Segments, model: nn.Module, visits: Visits, given: Given, size: tuple[int, ...]
) -> tuple[SegmentNeeds, ...]:
    """Memory and time of the visits through each segment of a model, for images of this size. Raises CannotStream."""
    givens: tuple[Given, ...] = (given,)
    found: list[SegmentNeeds] = []
    for part in segments.parts(model):
        rehearsed = rehearse(part, visits, givens, size)
        found.append(_segment(part, visits, givens, size, rehearsed, segments.norms, not found))
        givens = tuple(map(Given.like, rehearsed.outputs))
    return tuple(found)


def _segment(
    part: nn.Module,
    visits: Visits,
    givens: Sequence[Given],
    size: tuple[int, ...],
    rehearsed: Rehearsed,
    norms: str,
    reads: bool,
) -> SegmentNeeds:
    tile = _largest(visits.grid, givens, rehearsed.margin, size)
    grid = alone(visits, tile, rehearsed.learned)
    values = [shape_of(given, grid, rehearsed.margin, size) for given in givens]
    if not reads:
        values = [value.requires_grad_(value.is_floating_point()) for value in values]
    given_bytes = sum(local_part_held(value).nbytes for value in values)
    statistics: AbstractContextManager[Any] = nullcontext()
    if norms != "exact":
        statistics = KnownStatistics().one_visit(noted=norms == "running")
    leaves = [local_part_held(value) for value in values if value.requires_grad]
    leaves += [p for p in part.parameters() if p.requires_grad]

    def backward(outputs: Any) -> None:
        roots = [owned(y) if isinstance(y, SpatialTensor) else y for y in outputs if y.requires_grad]
        if roots and leaves:
            torch.autograd.grad(roots, leaves, [torch.empty_like(root) for root in roots], allow_unused=True)

    with statistics:
        found = dry_run(grid, lambda: part(*values), backward)
    read, most = (given_bytes * (1 + READ_AHEAD), 0) if reads else (0, given_bytes)
    held = 0 if reads else sum(_of_rank(given, visits, rehearsed.margin, size) for given in givens)
    made = sum(_of_rank(Given.like(y), visits, 0, size) for y in rehearsed.outputs)
    visit = most + max(found.forward_bytes, found.backward_bytes)
    rounds, flops = found.sent["rounds"], found.flops * visits.grid.size
    return SegmentNeeds(rehearsed.margin, read, visit, held, made, rounds, grid.comm.counts["rounds"] - rounds, flops)


def local_part_held(value: Tensor) -> Tensor:
    """The part of a tensor on a rank, or in a visit, with its margin."""
    found = getattr(value, "local", value)
    assert isinstance(found, Tensor)
    return found


def _largest(shape: GridShape, givens: Sequence[Given], margin: int, size: Sequence[int]) -> int:
    """The tile whose visit is given most: along each axis one that has a margin on both sides, if there is one."""
    tiling = next((given.held(margin, size) for given in givens if given.tiling is not None), None)
    if tiling is None:
        return 0
    _, *space = tiling.splits
    places = [max(range(split.parts), key=lambda i: split.held[i].length) for split in space]
    wanted = (0, *places)
    return next(tile for tile in range(shape.size) if shape.coordinates(tile) == wanted)


def _of_rank(given: Given, visits: Visits, margin: int, size: Sequence[int]) -> int:
    """The most bytes that a rank has of what its visits are given, or make."""
    if given.tiling is None:
        return prod(given.shape) * given.dtype.itemsize
    _, *space = given.held(margin, size).splits
    shape = list(given.shape)
    batch = given.dims[BATCH]
    if batch is not None:
        shape[batch] = -(-shape[batch] // visits.shape.batch)
    for dim, split, count in zip(given.dims[1:], space, visits.counts, strict=True):
        if dim is not None:
            shape[dim] = max(
                split.held[first + count - 1].stop - split.held[first].start for first in range(0, split.parts, count)
            )
    return prod(shape) * given.dtype.itemsize


SEGMENTS = (1, 3, 6)
SMALLEST_TILE = 64  # px; of smaller ones visits would read nothing but margins
A_FEW = 8  # up to so many tiles along an axis all numbers are tried, and four of each octave beyond


@dataclass(frozen=True)
class Wanted:
    """The given options of streaming: see `StreamOptions`. `segments`: None for any number."""

    until: str | None = None
    norms: str = "exact"
    segments: int | None = None


class Visiting(NamedTuple):
    """How a first stage is streamed, what that takes, and the bytes of the rank that needs most."""

    options: StreamOptions
    needs: StreamNeeds
    num_bytes: int


def finer(sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Into how many tiles a part with these sides is cut: more and more, as square as can be."""
    longest, number = max(sides), 1
    while number == 1 or longest >= number * SMALLEST_TILE:
        yield tuple(max(1, round(number * side / longest)) for side in sides)
        number += max(1, 1 << (number.bit_length() - 3)) if number >= A_FEW else 1


def choose_visits(
    sides: Sequence[int],
    wanted: Wanted,
    needs_for: Callable[[StreamOptions], StreamNeeds],
    bytes_of: Callable[[StreamNeeds], int],
    most_bytes: float,
) -> Visiting:
    """The visits of a rank's part of the images, which has these sides: the first that fit, if all behind those do.

    `needs_for(options)` is what streaming takes, which may raise CannotStream, and `bytes_of` that what the rank has
    which needs most.

    Raises:
        CannotStream: nothing fits; it says what the least is that would.
    """
    counts = list(finer(sides))
    tried: list[Visiting] = []
    fitting: list[Visiting] = []
    problem: CannotStream | None = None
    numbers = (wanted.segments,) if wanted.segments else SEGMENTS if wanted.norms == "exact" else SEGMENTS[:1]
    for segments in numbers:

        def fits(tiles: tuple[int, ...], segments: int = segments) -> bool:
            nonlocal problem
            options = StreamOptions(tiles, wanted.until, wanted.norms, segments)
            try:
                needs = needs_for(options)
            except CannotStream as error:
                problem = error
                return False
            tried.append(Visiting(options, needs, bytes_of(needs)))
            return tried[-1].num_bytes <= most_bytes

        first = bisect_left(counts, True, key=fits)
        if first < len(counts) and fits(counts[first]):
            fitting.append(tried[-1])
    if fitting:
        return min(fitting, key=lambda each: each.needs.work())
    if problem is not None and not tried:
        raise problem
    least = min(tried, key=lambda each: each.num_bytes)
    raise CannotStream(
        f"no tiles keep a rank within {mebibytes(int(most_bytes))}: the least would be {mebibytes(least.num_bytes)}, "
        f"with {words(least)}; allow for that, or use more `tiles`, `zero` or a smaller `batch_size`"
    )


def words(found: Visiting) -> str:
    """How many visits, in how many segments, and how far they read beyond their tiles."""
    tiles, segments = grid_name(found.options.counts), counted(len(found.needs.segments), "segment")
    return f"{tiles} tiles of each rank in {segments}, a margin of {found.needs.margin} px"
