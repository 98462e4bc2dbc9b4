"""Tiles and segments for a limit of memory: the fewest tiles that fit, and the segments that take the least time.

Fewer tiles read fewer pixels of margins. More segments repeat less in their statistics passes, but keep more outputs,
in memory or on a disk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from mpi4dl._wording import counted, mebibytes
from mpi4dl.geometry import BATCH, GridShape, ceil_div
from mpi4dl.parallel.costs import GFLOPS
from mpi4dl.parallel.costs.cost_model import StageCosts
from mpi4dl.parallel.costs.meter import Column, UnitCosts, dry_run
from mpi4dl.parallel.costs.units import StageBytes, stage_bytes
from mpi4dl.parallel.disk import ON_DEVICE, Keep
from mpi4dl.parallel.plan import grid_name
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned
from mpi4dl.parallel.streaming.leading_part import (
    EACH_NORM,
    LeadingPart,
    Segments,
    StreamOptions,
    ValuesBetween,
    tiles_of_images,
)
from mpi4dl.parallel.streaming.margins import CannotStream, PartProfile, dry_run_of_tile, meta_input, profile_part
from mpi4dl.parallel.streaming.norms import RunningNorms
from mpi4dl.parallel.streaming.stream import TOUCHED_BYTES, gradients_of
from mpi4dl.parallel.streaming.stream_tiles import InputSpec, StreamTiles

# Memory and time of streaming on a rank: a dry run of one tile of each segment, forward and backward, on meta tensors.
#
# forward of segment 3      [input of 2][input of 3][output of 3 ........][tile]
# the rest of the stage     [input of 2][input of 3][output of 3 and its gradient][memory of the rest]
# backward of segment 2     [input of 2][input of 3][gradients of output and input of 2][tile]
#
# The tile is the one that needs most memory: it has a margin on all sides.

READ_AHEAD = 2  # tiles in memory besides the one that runs: the next one, and a copy of it while it is read


class SegmentNeeds(NamedTuple):
    """Memory and time of one streamed segment.

    Args:
        margin: the pixels of the images that a tile reads on each side.
        read_bytes: the pixels of the images, for the tile that runs and the next one; 0 behind the first segment.
        tile_bytes: the most memory of a tile at a time; with its input, unless that is pixels of the images.
        input_bytes: the input of all tiles of a rank in its memory that no segment before has; 0 if that is the images.
        output_bytes: the output of all tiles of a rank.
        forward_statistics: the number of statistics in the forward pass; each needs one more pass over the tiles.
        backward_statistics: the same of the backward pass.
        flops: the FLOPs of one forward pass over all tiles of all ranks.
    """

    margin: int
    read_bytes: int
    tile_bytes: int
    input_bytes: int
    output_bytes: int
    forward_statistics: int
    backward_statistics: int
    flops: float

    @property
    def forward_passes(self) -> float:
        """How often the forward computes each layer on average: a statistics pass stops halfway on average."""
        return 1 + self.forward_statistics / 2

    @property
    def backward_passes(self) -> tuple[float, float]:
        """How often the backward pass computes layers forward and backward. Each of its passes runs all of forward."""
        return 1 + self.backward_statistics, 1 + self.backward_statistics / 2

    @property
    def copied_bytes(self) -> tuple[float, float]:
        """What a rank reads and writes, forward and backward, to cut out tiles, and to add to outputs and gradients."""
        again, _ = self.backward_passes
        forward = 2 * self.input_bytes * self.forward_passes + 2 * self.output_bytes
        return forward, (2 * again + 4) * self.input_bytes

    def step_flops(self) -> float:
        """The FLOPs of a training step on all ranks, with a backward of twice the FLOPs of the forward."""
        again, back = self.backward_passes
        return self.flops * (self.forward_passes + again + 2 * back)


@dataclass(frozen=True)
class StreamNeeds:
    """Memory and time of a streamed leading part. Segment j is in the units `units[j]`, as [start, stop).

    `spread`: several ranks share the images, so the output of a segment is copied with a margin.
    """

    segments: tuple[SegmentNeeds, ...]
    units: tuple[tuple[int, int], ...]
    options: StreamOptions
    spread: bool

    @property
    def num_units(self) -> int:
        """How many units are streamed."""
        return self.units[-1][1]

    @property
    def kept_bytes(self) -> int:
        """The bytes of outputs between segments that a rank keeps until the backward pass."""
        return sum(segment.input_bytes for segment in self.segments)

    @property
    def margin(self) -> int:
        """The pixels of the images that a tile reads on each side."""
        return self.segments[0].margin

    def stage(self, column: Sequence[UnitCosts], stop: int) -> StageBytes:
        """The memory of a rank of the first stage, of `stop` units; `column` are all units on its part of images."""
        done = self.num_units
        rest = StageBytes(0, 2 * self.segments[-1].output_bytes)
        if done < stop:
            rest = stage_bytes(column[done:stop], column[done - 1], stop == len(column))
            rest = rest._replace(working=rest.working - column[done - 1].output_bytes)  # its gradient is not sent
        in_files = self.options.uses_files
        inputs = 0 if in_files else sum(segment.input_bytes for segment in self.segments)
        inputs_so_far, previous, most = 0, 0, inputs + rest.kept + rest.working
        for segment in self.segments:
            own = 0 if in_files else segment.input_bytes
            made = 0 if in_files and segment is not self.segments[-1] else segment.output_bytes
            inputs_so_far += own
            tile = segment.read_bytes + segment.tile_bytes + in_files * TOUCHED_BYTES
            most = max(most, inputs_so_far + previous + made + tile)
            most = max(most, inputs + made + own + tile)
            previous = (
                segment.output_bytes if self.spread else 0
            )  # where it is copied with its margin, before it is kept
        return StageBytes(inputs + rest.kept, most - inputs - rest.kept)

    def column(
        self, column: Column, num_ranks: int, byte_seconds: float = 0.0, operator_seconds: float = 0.0
    ) -> Column:
        """The costs of units on one of so many ranks, from those without streaming, with other seconds.

        Streamed units take longer by the FLOPs of margins, and by their passes. What tiles copy takes `byte_seconds`
        for each byte that is read or written, and Python takes `operator_seconds` for each operator whenever a tile
        runs. Communication of statistics is not included.
        """
        found, tiles = list(column), prod(self.options.counts)
        for (first, end), members in groupby(zip(self.units, self.segments, strict=True), key=lambda each: each[0]):
            inside = [segment for _, segment in members]
            whole = sum(segment.flops for segment in inside)
            without = num_ranks * sum(unit.flops for unit in column[first:end]) or whole or 1.0
            passes, beside = [0.0, 0.0, 0.0], [0.0, 0.0]
            operators = sum(unit.operators for unit in column[first:end])
            of_python = tiles * operators * operator_seconds / len(inside)
            for segment in inside:
                ways = zip(segment.copied_bytes, (segment.forward_passes, segment.backward_passes[0]), strict=True)
                for way, (num_bytes, times) in enumerate(ways):
                    beside[way] += (num_bytes * byte_seconds + times * of_python) / (end - first)
                wider = max(segment.flops / whole if whole else 1 / len(inside), segment.flops / without)
                again, back = segment.backward_passes
                for i, n in enumerate((segment.forward_passes, again, back)):
                    passes[i] += wider * n
            for i in range(first, end):
                forward, backward = column[i].forward_seconds, column[i].backward_seconds
                found[i] = column[i]._replace(
                    forward_seconds=forward * passes[0] + beside[0],
                    backward_seconds=forward * passes[1] + backward * passes[2] + beside[1],
                    weight_seconds=0.0,
                    there=(),
                    back=(),
                )
        return tuple(found)

    def costs(self, costs: StageCosts, num_ranks: int) -> StageCosts:
        """The costs of a plan whose first stage, of so many ranks, is streamed."""
        byte_seconds = 1 / costs.stages[0].machine.bytes_per_second if costs.timed else 0.0
        first = self.column(costs.columns[0], num_ranks, byte_seconds, costs.timed * costs.overhead.rule_seconds)
        return replace(costs, columns=(first, *costs.columns[1:]))

    def work(self) -> float:
        """The FLOPs of the streamed part in a training step on all ranks, to compare choices."""
        return sum(segment.step_flops() for segment in self.segments)


def needs_of(leading: LeadingPart, model: nn.Module, grid: GridShape, image: Sequence[int]) -> StreamNeeds:
    """Memory and time of a rank that streams images of this shape (N, C, H, W), on a grid of ranks.

    Raises:
        CannotStream: a segment needs the whole image at once.
    """
    tiles, images = tiles_of_images(model, leading.options, grid, image)
    segments = needs_of_segments(leading.segments, model, tiles, images, tuple(image[2:]))
    return StreamNeeds(segments, leading.units, leading.options, grid.size > 1)


def needs_of_segments(
    segments: Segments, model: nn.Module, tiles: StreamTiles, images: InputSpec, size: tuple[int, ...]
) -> tuple[SegmentNeeds, ...]:
    """Memory and time of each segment of a model, for images of this size, such as (H, W). Raises CannotStream."""
    specs, found = ValuesBetween(images), list[SegmentNeeds]()
    for part in segments.parts(model):
        fresh = specs.fresh(part)
        inputs = specs.before(part)
        profile = profile_part(part, tiles, inputs, size)
        kept = sum(_rank_bytes(spec, tiles, profile.margin, size) for spec in fresh) if found else None
        found.append(_segment(part, tiles, inputs, size, profile, segments.norms, kept))
        specs.behind(part, [InputSpec.like(y) for y in profile.outputs])
    return tuple(found)


def _segment(
    part: nn.Module,
    tiles: StreamTiles,
    inputs: Sequence[InputSpec],
    size: tuple[int, ...],
    profile: PartProfile,
    norms: str,
    kept: int | None,
) -> SegmentNeeds:
    """The needs of a segment, which has `kept` bytes of input that no segment before it has; None: its input are the
    images, which are read tile by tile.
    """
    reads = kept is None
    margin = profile.margin
    grid = dry_run_of_tile(tiles, _largest_tile(tiles.grid, inputs, margin, size), profile.hints)
    values = [meta_input(spec, grid, margin, size) for spec in inputs]
    if not reads:
        values = [value.requires_grad_(value.is_floating_point()) for value in values]
    local = [value.local if isinstance(value, SpatialTensor) else value for value in values]
    input_bytes = sum(each.nbytes for each in local)
    statistics: AbstractContextManager[Any] = nullcontext()
    if norms != "exact":
        statistics = RunningNorms().for_tile(record=norms == "running")
    leaves, parameters = ([each for each in some if each.requires_grad] for some in (local, [*part.parameters()]))

    def backward(outputs: Any) -> None:
        roots = [owned(y) if isinstance(y, SpatialTensor) else y for y in outputs if y.requires_grad]
        if roots and (leaves or parameters):
            of_roots = [torch.empty_like(root) for root in roots]
            gradients_of(roots, of_roots, leaves, parameters, lambda number, gradient: None)

    with statistics:
        found = dry_run(grid, lambda: part(*values), backward)
    forward_statistics = found.sent["rounds"]
    return SegmentNeeds(
        margin,
        read_bytes=input_bytes * (1 + READ_AHEAD) if reads else 0,
        tile_bytes=max(found.costs.forward_bytes, found.costs.backward_bytes) + (0 if reads else input_bytes),
        input_bytes=kept or 0,
        output_bytes=sum(_rank_bytes(InputSpec.like(y), tiles, 0, size) for y in profile.outputs),
        forward_statistics=forward_statistics,
        backward_statistics=grid.comm.counts["rounds"] - forward_statistics,
        flops=found.costs.flops * tiles.grid.size,
    )


def _largest_tile(grid: GridShape, inputs: Sequence[InputSpec], margin: int, size: Sequence[int]) -> int:
    """The tile with the largest input: it has a margin on both sides of each axis, if there is such a tile."""
    tiling = next((spec.held(margin, size) for spec in inputs if spec.tiling is not None), None)
    if tiling is None:
        return 0
    _, *space = tiling.splits
    return grid.number((0, *(max(range(split.parts), key=lambda i: split.held[i].length) for split in space)))


def _rank_bytes(spec: InputSpec, tiles: StreamTiles, margin: int, size: Sequence[int]) -> int:
    """The most bytes that a rank has of an input or output of its tiles."""
    if spec.tiling is None:
        return prod(spec.shape) * spec.dtype.itemsize
    _, *space = spec.held(margin, size).splits
    shape = list(spec.shape)
    batch = spec.dims[BATCH]
    if batch is not None:
        shape[batch] = ceil_div(shape[batch], tiles.ranks.batch)
    for dim, split, count in zip(spec.dims[1:], space, tiles.counts, strict=True):
        if dim is not None:
            shape[dim] = max(
                split.held[first + count - 1].stop - split.held[first].start for first in range(0, split.parts, count)
            )
    return prod(shape) * spec.dtype.itemsize


SEGMENTS = (1, 3, 6, EACH_NORM)
DISK = (6, EACH_NORM)  # the numbers of segments whose outputs may go to a disk
SMALLEST_TILE = 64  # px; margins of smaller tiles would be larger than the tiles
A_FEW = 8  # up to so many tiles along an axis all numbers are tried, then four in each octave


@dataclass(frozen=True)
class StreamConstraints:
    """The options of streaming that the user fixed, as in `StreamOptions`. `segments`: None for any number.

    `disk`: outputs of segments may be kept there instead, None if the user has chosen where.
    """

    until: str | None = None
    norms: str = "exact"
    segments: int | None = None
    keep: Keep = ON_DEVICE
    disk: Keep | None = None

    def ways(self) -> Iterator[tuple[int, Keep]]:
        """Numbers of segments, and where their outputs are kept."""
        numbers = (self.segments,) if self.segments else SEGMENTS if self.norms == "exact" else SEGMENTS[:1]
        yield from ((segments, self.keep) for segments in numbers)
        if self.disk is not None:
            yield from ((segments, self.disk) for segments in numbers if segments in DISK)


class Speeds(NamedTuple):
    """The seconds of a FLOP, and of a byte that is written to a file and read again.

    The system keeps files of `cached_bytes` for each rank in memory that nobody else needs. Others a disk has to write.
    """

    flop_seconds: float
    cached_byte_seconds: float
    disk_byte_seconds: float
    cached_bytes: float

    def of_step(self, needs: StreamNeeds, num_ranks: int) -> float:
        """About how long the streamed part takes, on so many ranks that share images: what is kept on a disk is written
        and read, and its gradient as well.
        """
        num_bytes = 2 * needs.kept_bytes if needs.options.uses_files else 0
        cached = min(num_bytes, self.cached_bytes)
        of_files = (cached, self.cached_byte_seconds), (num_bytes - cached, self.disk_byte_seconds)
        files = sum(number * seconds for number, seconds in of_files if number)  # without room they are infinite
        return needs.work() / num_ranks * self.flop_seconds + files


ASSUMED_SPEEDS = Speeds(1e-9 / GFLOPS, 2 / 1e9, 2 / 1e9, 0)  # a disk with 1 GB/s each way


class StreamChoice(NamedTuple):
    """A way to stream the first stage, its needs, and the memory of the rank that needs most, in bytes."""

    options: StreamOptions
    needs: StreamNeeds
    num_bytes: int


def tile_counts(sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of tiles along each axis, in increasing order, for a part of `sides` px; tiles are nearly square."""
    longest, number = max(sides), 1
    while number == 1 or longest >= number * SMALLEST_TILE:
        yield tuple(max(1, round(number * side / longest)) for side in sides)
        number += max(1, 1 << (number.bit_length() - 3)) if number >= A_FEW else 1


def choose_tiles(
    sides: Sequence[int],
    constraints: StreamConstraints,
    needs_for: Callable[[StreamOptions], StreamNeeds],
    bytes_of: Callable[[StreamNeeds], int],
    most_bytes: float,
    seconds_of: Callable[[StreamNeeds], float] = StreamNeeds.work,
) -> StreamChoice:
    """The fewest tiles of a rank's part of the images that fit, and the segments that take the least time.

    Smaller tiles need less memory each, but fewer layers can be streamed with margins that are small beside them. So
    the search begins with few tiles, and takes as many more as memory is too large; then it halves the last step.

    Args:
        sides: the size of a rank's part of the images, in pixels.
        constraints: the options that the user fixed.
        needs_for: returns the needs for some options; may raise CannotStream.
        bytes_of: returns the memory of the rank that needs most.
        most_bytes: the limit of that memory.
        seconds_of: returns about how long a step of that takes, in any unit.

    Raises:
        CannotStream: nothing fits; the message has the least memory that does.
    """
    counts, tried, fitting = list(tile_counts(sides)), list[StreamChoice](), list[StreamChoice]()
    problem: CannotStream | None = None
    for segments, keep in constraints.ways():

        def choice_of(tiles: tuple[int, ...], segments: int = segments, keep: Keep = keep) -> StreamChoice | None:
            nonlocal problem
            options = StreamOptions(tiles, constraints.until, constraints.norms, segments, keep)
            try:
                needs = needs_for(options)
            except CannotStream as error:
                problem = error
                return None
            tried.append(StreamChoice(options, needs, bytes_of(needs)))
            return tried[-1]

        def is_hopeless(choice: StreamChoice) -> bool:
            rest = tuple(each._replace(read_bytes=0, tile_bytes=0) for each in choice.needs.segments)
            return bytes_of(replace(choice.needs, segments=rest)) > most_bytes  # without the tile that is run

        found = _first_that_fits(choice_of, counts, most_bytes, is_hopeless)
        if found is not None:
            fitting.append(found)
    if fitting:
        return min(fitting, key=lambda each: seconds_of(each.needs))
    if problem is not None and not tried:
        raise problem
    for number in counts[1::2]:  # the search gave up where more tiles would not have helped enough
        before = min(each.num_bytes for each in tried)
        smaller = choice_of(number, *next(constraints.ways()))
        if smaller is not None and smaller.num_bytes >= before:
            break
    least = min(tried, key=lambda each: each.num_bytes)
    raise CannotStream(
        f"no tiles keep a rank within {mebibytes(int(most_bytes))}: the least would be {mebibytes(least.num_bytes)}, "
        f"with {describe(least)}; allow for that, or use more `tiles`, `zero` or a smaller `batch_size`"
    )


def _first_that_fits(
    choice_of: Callable[[tuple[int, ...]], StreamChoice | None],
    counts: Sequence[tuple[int, ...]],
    most_bytes: float,
    is_hopeless: Callable[[StreamChoice], bool],
) -> StreamChoice | None:
    """The first of these numbers of tiles that fits; None if none does.

    `is_hopeless` says that the memory besides tiles is too much already, so that more tiles do not help.
    """
    low, high, found = -1, 0, None
    while found is None:
        last = choice_of(counts[high])
        if last is not None and last.num_bytes <= most_bytes:
            found = last
        elif high == len(counts) - 1 or (last is not None and is_hopeless(last)):
            return None
        else:
            more = prod(counts[high]) * (1.0 if last is None else last.num_bytes / most_bytes)
            farther = (i for i in range(high + 1, len(counts)) if prod(counts[i]) >= more)
            low, high = high, next(farther, len(counts) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        nearer = choice_of(counts[middle])
        if nearer is None or nearer.num_bytes > most_bytes:
            low = middle
        else:
            high, found = middle, nearer
    return found


def describe(choice: StreamChoice) -> str:
    """The numbers of tiles and segments, and the margin."""
    tiles, segments = grid_name(choice.options.counts), counted(len(choice.needs.segments), "segment")
    files = f", with {mebibytes(choice.needs.kept_bytes)} in files" if choice.options.uses_files else ""
    return f"{tiles} tiles of each rank in {segments}, a margin of {choice.needs.margin} px{files}"
