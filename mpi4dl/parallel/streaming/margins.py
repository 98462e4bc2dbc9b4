"""The margin that a streamed part of a model needs, found by dry runs on meta tensors.

The margin is the smallest one with which no layer asks for pixels that a tile does not hold. The search runs the part
itself, so it covers residuals, branches and upsampling without arithmetic on receptive fields. The dry run also counts
the statistics over the whole image, and finds out which norms can share a statistics pass.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpi4dl.comm import Pending
from mpi4dl.comm.packing import Piece
from mpi4dl.geometry import BATCH, Box, Interval, Tiling
from mpi4dl.parallel.inputs import shape_only
from mpi4dl.parallel.pipeline.decisions import trial
from mpi4dl.parallel.pipeline.program import leaves
from mpi4dl.parallel.pipeline.split import Cuttable, shapes_of
from mpi4dl.parallel.spatial.dry_run_grid import DryRunCommunicator, DryRunGrid, dry_run_grid
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo_prefetch import HaloPrefetch, Holding
from mpi4dl.parallel.spatial.tensor import SpatialTensor, local_part
from mpi4dl.parallel.streaming.stream_tiles import (
    Contribution,
    InputSpec,
    NeedsNeighbours,
    StatisticsRecord,
    StreamCommunicator,
    StreamGrid,
    StreamTiles,
    holds_pixels,
)

# For each norm, by its weight: whether it waits for the next norm to share its statistics pass, and its halos.
PrefetchHints = Sequence[tuple[Tensor, bool, Holding]]


class CannotStream(ValueError):
    """A part of a model needs the whole image at once, so it cannot run tile by tile."""


@dataclass(frozen=True)
class PartProfile:
    """The result of a dry run of a streamed part.

    Args:
        margin: the pixels of the images that a tile reads on each side.
        num_statistics: the number of statistics in the forward pass; each one needs one more pass over the tiles.
        hints: the hints for halo prefetch at the norms.
        outputs: the outputs of the part, on the meta device.
        tilings: the tilings of all intermediate tensors.
    """

    margin: int
    num_statistics: int
    hints: PrefetchHints
    outputs: Any
    tilings: Sequence[Tiling]


class _StreamedDryRun(DryRunCommunicator):
    """The communicator of a dry run, which refuses to send or receive pixels.

    A margin that is too small for another tile is too small for this one too. So all tiles find the same margin.
    """

    @property
    def blocks(self) -> None:
        """As of the tiles that it stands for."""
        return None

    def iexchange(
        self, sends: Sequence[Piece], receives: Sequence[Piece], *args: Any, collective: bool = False, **kwargs: Any
    ) -> Pending:
        others_exchange = collective and not sends and not receives
        if others_exchange or holds_pixels(sends) or holds_pixels(receives):
            raise NeedsNeighbours
        return super().iexchange(sends, receives)


def profile_part(
    module: nn.Module, tiles: StreamTiles, inputs: Sequence[InputSpec], size: Sequence[int]
) -> PartProfile:
    """The profile of `module` with the smallest margin, for images of this size, such as (H, W).

    Raises:
        CannotStream: no margin is enough.
    """
    outline = copy.deepcopy(module, memo=shapes_of(module))
    for parameter in outline.parameters():  # autocast, by which others meet inputs in float32, knows no meta device
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    margin = least_margin(lambda n: profile_with_margin(outline, tiles, inputs, size, n) is not None, max(size))
    first = profile_with_margin(outline, tiles, inputs, size, margin)
    assert first is not None
    again = profile_with_margin(outline, tiles, inputs, size, margin, first.hints)
    assert again is not None
    real = {id(shape): parameter for shape, parameter in zip(outline.parameters(), module.parameters(), strict=True)}
    hints = [(real[id(norm)], waits, held) for norm, waits, held in again.hints if id(norm) in real]
    return replace(again, hints=hints)


def least_margin(runs: Callable[[int], bool], largest: int) -> int:
    """The smallest margin, in pixels, for which `runs(margin)` is true; at most about `largest`.

    The search tries 0, 16, twice that and so on, and then bisects.

    Raises:
        CannotStream: no margin is enough.
    """
    low, high = -1, 0
    while not runs(high):
        if high >= largest:
            raise CannotStream("a layer of this part needs pixels of the whole image, so that no margin is enough")
        low, high = high, min(max(16, 2 * high), largest)
    return low + 1 + bisect_left(range(low + 1, high), True, key=runs)


def profile_with_margin(
    outline: nn.Module,
    tiles: StreamTiles,
    inputs: Sequence[InputSpec],
    size: Sequence[int],
    margin: int,
    hints: PrefetchHints = (),
) -> PartProfile | None:
    """The profile of a module on the meta device with this margin; None if the margin is too small."""
    grid = dry_run_of_tile(tiles, tiles.own[len(tiles.own) // 2], hints)
    # On the meta device are also tensors that the module makes as it runs.
    with torch.enable_grad(), trial(outline), torch.device("meta"):
        _set_momentum(outline)
        try:
            outputs = outline(*(meta_input(spec, grid, margin, size) for spec in inputs))
            grid.halo_prefetch.flush()
            for y in pytree.tree_leaves(outputs):  # what refuses to be looked at is refused now
                local_part(y)
        except NeedsNeighbours:
            return None
    found = [(norm, waits, held) for norm, waits, held in grid.halo_prefetch.learned() if isinstance(norm, Tensor)]
    tilings = list({layout.tiling.narrow for layout in grid.layouts})
    return PartProfile(margin, grid.comm.counts["rounds"], found, outputs, tilings)


def changed_in_place(cuttable: Cuttable, end: int, image: Sequence[int]) -> list[set[str]]:
    """The values that each of the first `end` units changes in place, in either mode, of those alive before it.

    A run on the meta device shows it for images of this shape (N, C, H, W): PyTorch counts the writes to a tensor, and
    its views have the same count. A model that cannot run there may change all.
    """
    found: list[set[str]] = [set() for _ in range(end)]
    model = cuttable.model
    try:
        with torch.no_grad(), trial(model), torch.device("meta"):
            _set_momentum(model)
            for mode in (True, False):
                values: Any = [shape_only(model, image)]
                for i, changed in enumerate(found):
                    before = [_writes(value) for value in values]
                    behind = cuttable.unit(i).train(mode)(*values)
                    named = zip(cuttable.live(i), before, values, strict=True)
                    changed |= {name for name, writes, value in named if _writes(value) != writes}
                    values = behind
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return [set(cuttable.live(i)) for i in range(end)]
    return found


def _writes(value: Any) -> list[int]:
    """How often each tensor in a value was written to."""
    return [leaf._version for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _set_momentum(outline: nn.Module) -> None:
    """No batch norm shall ask how many batches it has seen, as those without a momentum do."""
    for module in outline.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
            module.momentum = 0.1


def dry_run_of_tile(tiles: StreamTiles, tile: int, hints: PrefetchHints = ()) -> DryRunGrid:
    """The grid for a dry run of one tile. Statistics of the other tiles have made-up values."""
    grid = dry_run_grid(tiles.grid, tile, tiles.tracks_batch, _StreamedDryRun)
    _set_hints(grid, hints)
    return grid


def _set_hints(grid: Grid, hints: PrefetchHints) -> None:
    """Give all tiles the same hints for halo prefetch, so that they come to the same statistics."""
    grid.halo_prefetch = HaloPrefetch(repeats=True)
    for norm, waits, held in hints:
        grid.halo_prefetch.learn(norm, waits, held)


def meta_input(spec: InputSpec, grid: Grid, margin: int, size: Sequence[int]) -> Tensor:
    """The input of the tile of this grid, with its margin, on the meta device."""
    if spec.tiling is None:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    layout = spec.layout(grid, margin, size)
    local = layout.local_shape(tuple(spec.shape))
    return SpatialTensor(torch.empty(local, dtype=spec.dtype, device="meta"), layout)


KNOWN_GRIDS = 256  # tiles whose grids, with the plans of layers, are kept: about 100 kB for each in small_resnet


@dataclass(eq=False)
class StreamPlan:
    """How this rank streams images of one size through one part of a model. It is reused for each batch.

    Args:
        tiles: the tiles of all ranks.
        inputs: the inputs of the part.
        size: the size of the images, such as (H, W).
        profile: the result of the dry run of the part.
        skips_equal: whether equal tiles of background may be computed once; False after a comparison failed.
    """

    tiles: StreamTiles
    inputs: tuple[InputSpec, ...]
    size: tuple[int, ...]
    profile: PartProfile
    skips_equal: bool = True
    _record: StatisticsRecord = field(default_factory=StatisticsRecord)
    _grids: dict[int, StreamGrid] = field(default_factory=dict)

    @classmethod
    def of(
        cls, module: nn.Module, tiles: StreamTiles, inputs: Sequence[InputSpec], size: Sequence[int]
    ) -> "StreamPlan":
        """The plan for `module`, with the smallest margin.

        Raises:
            CannotStream: the module needs the whole image at once.
        """
        return cls(tiles, tuple(inputs), tuple(size), profile_part(module, tiles, inputs, size))

    @property
    def cut_axes(self) -> list[int]:
        """The axes along which there are several tiles."""
        return [axis for axis, parts in enumerate(self.tiles.grid) if parts > 1]

    def grid(self, tile: int, recorded: Sequence[Sequence[Contribution]]) -> StreamGrid:
        """The grid with which a tile runs next. The tile reads the recorded statistics from the first on."""
        grid = self._grids.get(tile)
        if grid is None:
            shape = self.tiles.grid
            comm = StreamCommunicator(self._record, range(shape.size), tile)
            new = StreamGrid.of(comm, shape, self.tiles.tracks_batch)
            assert isinstance(new, StreamGrid)
            grid = new
            if len(self._grids) < KNOWN_GRIDS:  # evicting a grid would not help: it would be the next one needed
                self._grids[tile] = grid
        self._record.restart(recorded)
        _set_hints(grid, self.profile.hints)
        return grid

    def layout(self, spec: InputSpec, grid: StreamGrid) -> Layout:
        """The layout of an input over tiles, with the margin."""
        return spec.layout(grid, self.profile.margin, self.size)

    def box(self, spec: InputSpec, tile: int) -> Box:
        """The box of an input that a tile reads, with the margin; of all samples if layouts do not track the batch."""
        box = spec.held(self.profile.margin, self.size).held(tile)
        return box if spec.dims[BATCH] is not None else Box(Interval(0, spec.shape[0]), *box.space)

    def rank_layout(self, spec: InputSpec, grid: Grid) -> Layout:
        """The layout of an input over ranks: each holds the boxes of all its tiles, with their margins."""
        return self.tiles.rank_layout(spec.held(self.profile.margin, self.size), spec.dims, grid)
