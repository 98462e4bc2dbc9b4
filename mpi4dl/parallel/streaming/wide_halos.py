"""One exchange for a block of layers: at its entry every rank fetches as much of a halo as all its layers look at.

    layer by layer     | tile |<>| conv |<>| conv |<>| conv |            an exchange for each, each way
    block              |<  tile  >| conv | conv | conv |                 one; ranks compute what they hold beyond their
                                                                         tile as their neighbours do

How much that is nobody derives: the block is rehearsed on shapes with a wider and wider halo, until no layer asks for
more. Border padding acts at every layer, as in the plain model, for what lies beyond the image is no halo. It is what
Ohio State's MPI4DL does by `--halo-D2`, with models written for it.

That pays where a message takes long beside the rows that are computed twice: `explain` says how many these are.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree

from mpi4dl.geometry import BATCH, Tiling, widest
from mpi4dl.parallel.blocks import rows_of
from mpi4dl.parallel.costs.meter import dry_run
from mpi4dl.parallel.pipeline.split import shapes_of
from mpi4dl.parallel.spatial.dry_run_grid import DryRunGrid, HaloChoice, RankWork, dry_run_grid, rank_in_the_middle
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor, register
from mpi4dl.parallel.streaming.margins import CannotStream, least_margin, profile_with_margin
from mpi4dl.parallel.streaming.stream_tiles import InputSpec, StreamGrid, StreamTiles


def outline_of(x: SpatialTensor, grid: Grid) -> SpatialTensor:
    """A tensor like x on that grid, on shapes alone."""
    layout = grid.intern(Layout(grid, x.layout.tiling, x.layout.dims))
    return SpatialTensor(torch.empty(layout.local_shape(tuple(x.shape)), dtype=x.dtype, device="meta"), layout)


def tally(run: Callable[[DryRunGrid], Any], grid: Grid, norms_bring_halos: bool) -> RankWork:
    """The work of the rank in the middle of the grid in `run`; nothing is chosen there.

    Where norms bring halos, it is what `run` does in its second step, when they know of which.
    """
    middle = dry_run_grid(grid.shape, rank_in_the_middle(grid.shape), grid.tracks_batch)
    middle.arrangement = grid.arrangement
    middle.choices = None
    middle.halo_prefetch.everywhere, middle.halo_prefetch.steps = norms_bring_halos, True
    for _ in range(1 + norms_bring_halos):
        _, costs, sent = dry_run(middle, lambda: run(middle))
    return RankWork(sent["exchanges"], sent["halo_bytes"], costs.flops, costs.touched_bytes)


HALOS = ("layer", "block")
MOST = 4  # of so many halos as wide as it is, a tile's side is at least as long; otherwise layers fetch their own
UNFIT = (CannotStream, NotImplementedError, RuntimeError)  # the last where a layer looks at values


def fetch_halos(modules: Iterable[nn.Module], halo: str) -> None:
    """Let models or stages fetch halos for each "layer", or at the entry of each "block". Raises ValueError."""
    if halo not in HALOS:
        raise ValueError(f"halo is {halo!r}, but must be one of {', '.join(HALOS)}")
    for module in modules if halo == "block" else ():
        for row in rows_of(module):
            fetch_at_entries(row)


def fetch_at_entries(blocks: Iterable[nn.Module]) -> None:
    """Make modules fetch the halo of all their layers at once, where they can do with one.

    Elsewhere, and on plain tensors, they run as before.
    """
    for block in blocks:
        block.forward = partial(_forward, block, block.forward)


class _Bare(nn.Module):
    """A block that fetches nothing at its entry, of the leaves of its arguments."""

    def __init__(self, block: nn.Module, call: Callable[..., Any], structure: Any) -> None:
        super().__init__()
        self.block, self.call, self.structure = block, call, structure

    def forward(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Bare":
        return _Bare(copy.deepcopy(self.block, memo), copy.deepcopy(self.call, memo), self.structure)


class _Inputs(NamedTuple):
    """The inputs of a block: leaves, all of them spread, and how they are nested."""

    spread: Sequence[SpatialTensor]
    structure: Any

    @classmethod
    def of(cls, nested: Any) -> "_Inputs | None":
        leaves, structure = pytree.tree_flatten(nested)
        return cls(leaves, structure) if leaves and all(isinstance(x, SpatialTensor) for x in leaves) else None

    @property
    def alike(self) -> bool:
        """Whether all are cut along the same dims."""
        dims = self.spread[0].layout.dims[1:]
        return not any(x.layout.flat or x.layout.dims[1:] != dims for x in self.spread)

    @property
    def key(self) -> Any:
        return self.structure, tuple((x.layout.tiling, x.layout.dims, x.shape, x.dtype) for x in self.spread)

    @property
    def narrow_key(self) -> Any:
        """The same, whatever is held of halos."""
        return self.structure, tuple((x.layout.tiling.narrow, x.layout.dims, x.shape, x.dtype) for x in self.spread)

    @property
    def size(self) -> tuple[int, ...]:
        """The size in whose pixels a halo is counted: that of the largest input."""
        return max(tuple(split.size for split in x.layout.tiling.splits[1:]) for x in self.spread)

    def held(self, margin: int) -> list[Tiling]:
        """The boxes of ranks with such a margin."""
        size = self.size
        return [widest(x.layout.tiling, InputSpec.like(x).held(margin, size)) for x in self.spread]


def _forward(block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inputs = _Inputs.of((args, kwargs))
    if inputs is not None:
        grid = inputs.spread[0].layout.grid
        if grid.choices is not None and not isinstance(grid, StreamGrid):
            known = grid.choices.setdefault(block, {})
            key = inputs.key
            if key not in known:
                with saved_tensors_hooks(_itself, _itself):  # else a rehearsal counts in a block that is recomputed
                    known[key] = _choose(block, call, inputs)
            if margin := known[key].margin:
                held = [wide_halo(*pair) for pair in zip(inputs.spread, inputs.held(margin), strict=True)]
                args, kwargs = pytree.tree_unflatten(held, inputs.structure)
    return call(*args, **kwargs)


def _itself(x: Tensor) -> Tensor:
    return x


def wide_halo(x: SpatialTensor, tiling: Tiling) -> SpatialTensor:
    """x, held as `tiling` says; it can be overridden with `__torch_function__`, as PyTorch's own operators can."""
    found: SpatialTensor = handle_torch_function(wide_halo, (x,), x, tiling)
    return found


register(wide_halo)(retile)


def _choose(block: nn.Module, call: Callable[..., Any], inputs: _Inputs) -> HaloChoice:
    """Where a block, given such inputs, fetches what it needs: the same on all ranks."""
    if not inputs.alike:
        return _each_layer("what it is given is cut in several ways")
    grid = inputs.spread[0].layout.grid
    if grid.shape.space != grid.shape[BATCH + 1 :]:
        return _each_layer("ranks share features")
    rehearsal = _Rehearsal.of(block, call, inputs)
    try:
        margin = _margin(block, rehearsal, inputs, grid)
        held_already = any(x.layout.wide for x in inputs.spread)
        if held_already and margin is not None and inputs.held(margin) == inputs.held(0):
            return _each_layer("it is given all that it needs")
        layers = rehearsal.work(inputs, 0, grid)
        if margin:
            return HaloChoice(margin, layers, rehearsal.work(inputs, margin, grid), "as was asked for")
    except UNFIT as problem:
        return _each_layer(str(problem).partition("\n")[0])
    why = "it needs no halo" if margin == 0 else f"it needs more of a halo than a tile's side / {MOST}"
    return _each_layer(why, layers)


def _each_layer(reason: str, work: RankWork | None = None) -> HaloChoice:
    """The choice to let each layer fetch its own."""
    work = work or RankWork()
    return HaloChoice(0, work, work, reason)


def _margin(block: nn.Module, rehearsal: "_Rehearsal", inputs: _Inputs, grid: Grid) -> int | None:
    """How wide a halo all layers of a block need, whatever it is given of one; None if that is too wide."""
    known = grid.rehearsals.setdefault(block, {})
    key = inputs.narrow_key
    if key not in known:
        most = _widest(inputs, grid)
        try:
            enough = rehearsal.runs(inputs, most, grid)
            known[key] = least_margin(lambda n: rehearsal.runs(inputs, n, grid), most, 2) if enough else None
        except UNFIT:
            known[key] = None
    found: int | None = known[key]
    return found


def _widest(inputs: _Inputs, grid: Grid) -> int:
    """The widest halo that is thought of."""
    sides = zip(inputs.size, grid.shape.space, strict=True)
    return min((pixels // parts // MOST for pixels, parts in sides if parts > 1), default=0)


class _Rehearsal(NamedTuple):
    """A block on shapes."""

    outline: nn.Module

    @classmethod
    def of(cls, block: nn.Module, call: Callable[..., Any], inputs: _Inputs) -> "_Rehearsal":
        bare = _Bare(block, call, inputs.structure)
        return cls(copy.deepcopy(bare, memo=dict(shapes_of(bare))))

    def runs(self, inputs: _Inputs, margin: int, grid: Grid) -> bool:
        """Whether no layer asks for more, on any rank, than such a margin."""
        tiles = StreamTiles(grid.shape, grid.rank, (1,) * len(grid.space), grid.tracks_batch)
        specs = list(map(InputSpec.like, inputs.spread))
        return profile_with_margin(self.outline, tiles, specs, inputs.size, margin) is not None

    def work(self, inputs: _Inputs, margin: int, grid: Grid) -> RankWork:
        """The work of the rank in the middle with such a margin (0: by layer)."""

        def run_on(middle: Grid) -> Any:
            given = (outline_of(x, middle) for x in inputs.spread)
            held = (wide_halo(*pair) for pair in zip(given, inputs.held(margin), strict=True))
            return self.outline(*(held if margin else given))

        return tally(run_on, grid, inputs.spread[0].local.is_cuda)
