"""One exchange for a block of layers: at its entry every rank fetches as much of a halo as all its layers look at.

    layer by layer     | tile |<>| conv |<>| conv |<>| conv |            an exchange for each, each way
    block              |<  tile  >| conv | conv | conv |                 one; ranks compute what they hold beyond their
                                                                         tile as their neighbours do

How much that is nobody derives: the block is rehearsed on shapes with a wider and wider halo, until no layer asks for
more. Border padding acts at every layer, as in the plain model, for what lies beyond the image is no halo. It is what
Ohio State's MPI4DL does by `--halo-D2`, with models written for it.

Whether that pays, and for how many blocks in a row, the speeds of ranks and wire decide (`costs.widening`).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpi4dl._randomness import forked
from mpi4dl.comm import Communicator
from mpi4dl.geometry import Tiling, ceil_div, widest
from mpi4dl.parallel.blocks import rows_of
from mpi4dl.parallel.costs.cost_model import measured_speeds
from mpi4dl.parallel.pipeline.balance import FlopCounter
from mpi4dl.parallel.pipeline.split import image_dtype, shapes_of
from mpi4dl.parallel.spatial.dry_run_grid import DryRunGrid, dry_run_grid, rank_in_the_middle
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.halo_choice import HaloChoice, RankWork, Speeds, Step, Widened, choose, each_layer
from mpi4dl.parallel.spatial.tensor import SpatialTensor, register
from mpi4dl.parallel.streaming.margins import CannotStream, least_margin, run
from mpi4dl.parallel.streaming.visits import Given, VisitedGrid, Visits

# Counts what a part of a model does on the rank in the middle of a grid: exchanges, messages, what is computed.
#
# It runs on shapes alone, on a rank of which no other need exist; so every rank finds the same.


class ByteCounter(TorchDispatchMode):
    """`total` bytes are read and written by `num_operators`, but by views and those whose FLOPs count none."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operators += 1
        if not _is_view(func) and func._overloadpacket not in flop_registry:
            touched = pytree.tree_leaves((args, kwargs, result))
            self.total += sum({id(x): x.nbytes for x in touched if isinstance(x, Tensor)}.values())
        return result


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def outline_of(x: SpatialTensor, grid: Grid) -> SpatialTensor:
    """A tensor like x on that grid, on shapes alone."""
    layout = grid.the_one(Layout(grid, x.layout.tiling, x.layout.dims))
    return SpatialTensor(torch.empty(layout.local_shape(tuple(x.shape)), dtype=x.dtype, device="meta"), layout)


def tally(run: Callable[[DryRunGrid], Any], grid: Grid, norms_bring_halos: bool) -> tuple[RankWork, Any]:
    """What the rank in the middle of the grid does in `run`, and what that returns; nobody chooses anything there.

    Where norms bring halos, it is what `run` does in its second step, when they know of which.
    """
    middle = dry_run_grid(grid.shape, rank_in_the_middle(grid.shape), grid.tracks_batch)
    middle.arrangement = grid.arrangement
    middle.choices = None
    middle.foresight.everywhere, middle.foresight.steps = norms_bring_halos, True
    for _ in range(1 + norms_bring_halos):
        before = dict(middle.comm.counts)
        middle.foresight.begin()
        with torch.enable_grad(), forked(), FlopCounter() as flops, ByteCounter() as touched:
            found = run(middle)
            middle.foresight.pay()
        middle.foresight.settle()
    counts = {name: number - before[name] for name, number in middle.comm.counts.items()}
    work = RankWork(counts["exchanges"], counts["halo_bytes"], flops.total, touched.total, touched.num_operators)
    return work, found


HALOS = ("layer", "block", "auto")
MOST = 4  # of so many halos as wide as it is, a tile's side is at least as long; otherwise layers fetch their own
UNFIT = (CannotStream, NotImplementedError, RuntimeError)  # the last where a layer looks at values

Parts = tuple[tuple[nn.Module, Callable[..., Any]], ...]  # blocks in a row, and their forwards as they were


def fetch_halos(modules: Iterable[nn.Module], halo: str, comm: Communicator, device: torch.device) -> None:
    """Let models or stages fetch halos for each "layer", at the entry of each "block", or as is faster: "auto".

    Collective. Raises ValueError.
    """
    if halo not in HALOS:
        raise ValueError(f"halo is {halo!r}, but must be one of {', '.join(HALOS)}")
    modules = list(modules)
    speeds = measured_speeds(comm, device, image_dtype(modules[0])) if halo == "auto" else None
    for module in modules if halo != "layer" else ():
        for row in rows_of(module):
            fetch_at_entries(row, speeds)


def fetch_at_entries(row: Iterable[nn.Module], speeds: Speeds | None = None) -> None:
    """Make modules in a row fetch the halo of all their layers at once, where they can do with one.

    With `speeds`, only where it pays, and one of them for as many of those behind it as pays. Elsewhere, and on plain
    tensors, they run as before.
    """
    known = _Row(tuple((block, block.forward) for block in row), speeds)
    for number, (block, _) in enumerate(known.parts):
        block.forward = partial(_forward, known, number)


class _Row:
    """Blocks in a row, which know it so that one fetches for those behind it. It is copied once, with all of them."""

    def __init__(self, parts: Parts, speeds: Speeds | None) -> None:
        self.parts, self.speeds = parts, speeds

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Row":
        found = memo[id(self)] = _Row((), self.speeds)
        found.parts = copy.deepcopy(self.parts, memo)
        return found


class _Bare(nn.Module):
    """Blocks in a row that fetch nothing at their entry, of the leaves of the arguments of the first one."""

    def __init__(self, parts: Parts, structure: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block for block, _ in parts])
        self.parts, self.structure = parts, structure

    def forward(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        (_, call), *behind = self.parts
        found = call(*args, **kwargs)
        for _, call in behind:
            found = call(found)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Bare":
        return _Bare(copy.deepcopy(self.parts, memo), self.structure)


class _Inputs(NamedTuple):
    """What a block is called with: leaves, all of them spread, and how they are nested."""

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
        """What ranks hold with such a margin."""
        size = self.size
        return [widest(x.layout.tiling, Given.like(x).held(margin, size)) for x in self.spread]


def _forward(row: _Row, number: int, *args: Any, **kwargs: Any) -> Any:
    block, forward = row.parts[number]
    inputs = _Inputs.of((args, kwargs))
    if inputs is not None:
        grid = inputs.spread[0].layout.grid
        if grid.choices is not None and not isinstance(grid, VisitedGrid):
            known = grid.choices.setdefault(block, {})
            key = inputs.key
            if key not in known:
                known[key] = _choose(row, number, inputs)
            if margin := known[key].margin:
                held = [wide_halo(*pair) for pair in zip(inputs.spread, inputs.held(margin), strict=True)]
                args, kwargs = pytree.tree_unflatten(held, inputs.structure)
    return forward(*args, **kwargs)


def wide_halo(x: SpatialTensor, tiling: Tiling) -> SpatialTensor:
    """x, held as `tiling` says; it can be overridden with `__torch_function__`, as PyTorch's own operators can."""
    found: SpatialTensor = handle_torch_function(wide_halo, (x,), x, tiling)
    return found


register(wide_halo)(retile)


def _choose(row: _Row, number: int, inputs: _Inputs) -> HaloChoice:
    """Where a block, given such inputs, fetches what it needs: the same on all ranks."""
    if not inputs.alike:
        return each_layer("what it is given is cut in several ways")
    grid = inputs.spread[0].layout.grid
    try:
        if any(x.layout.wide for x in inputs.spread):
            margin = _margin(row, number, inputs, grid)
            if margin is not None and inputs.held(margin) == inputs.held(0):
                return each_layer("it is given all that it needs")
        return choose(_steps(row, number, inputs, grid), row.speeds)
    except UNFIT as problem:
        return each_layer(str(problem).partition("\n")[0])


class _Alone(NamedTuple):
    """A block by itself: its work by layer, what comes out, and how wide a halo it needs if that is not too wide."""

    layers: RankWork
    outputs: _Inputs | None
    margin: int | None
    wide: Widened | None


def _steps(row: _Row, start: int, first: _Inputs, grid: Grid) -> Iterator[Step]:
    """What blocks cost from one on, as far as anybody asks."""
    inputs: _Inputs | None = first
    reach = 0  # of all blocks so far, in pixels of the first
    for number in range(start, len(row.parts)):
        if inputs is None or not inputs.alike:
            return
        try:
            alone = _alone(row, number, inputs, grid)
        except UNFIT:
            if number == start:
                raise
            return
        together = None
        if alone.margin is not None:
            reach += max(ceil_div(alone.margin * n, m) for n, m in zip(first.size, inputs.size, strict=True))
            if 0 < reach <= _widest(first, grid) and number > start:
                run_of = _Rehearsal.of(row, slice(start, number + 1), first)
                if run_of.runs(first, reach, grid):
                    together = Widened(reach, run_of.work(first, reach, grid)[0])
        refusal = "it needs no halo" if alone.margin == 0 else f"it needs more of a halo than a tile's side / {MOST}"
        yield Step(alone.layers, alone.wide, together, refusal)
        if alone.margin is None:
            return
        inputs = alone.outputs


def _alone(row: _Row, number: int, inputs: _Inputs, grid: Grid) -> _Alone:
    known = grid.rehearsals.setdefault(row.parts[number][0], {})
    key = inputs.key
    if key not in known:
        block = _Rehearsal.of(row, slice(number, number + 1), inputs)
        layers, found = block.work(inputs, 0, grid)
        margin = _margin(row, number, inputs, grid)
        wide = Widened(margin, block.work(inputs, margin, grid)[0]) if margin else None
        known[key] = _Alone(layers, _Inputs.of(((found,), {})), margin, wide)
    found_before: _Alone = known[key]
    return found_before


def _margin(row: _Row, number: int, inputs: _Inputs, grid: Grid) -> int | None:
    """How wide a halo all layers of a block need, whatever it is given of one; None if that is too wide."""
    known = grid.rehearsals.setdefault(row.parts[number][0], {})
    key = "margin", inputs.narrow_key
    if key not in known:
        block, most = _Rehearsal.of(row, slice(number, number + 1), inputs), _widest(inputs, grid)
        try:
            enough = block.runs(inputs, most, grid)
            known[key] = least_margin(lambda n: block.runs(inputs, n, grid), most, 2) if enough else None
        except UNFIT:
            known[key] = None
    found: int | None = known[key]
    return found


def _widest(inputs: _Inputs, grid: Grid) -> int:
    """The widest halo that is thought of."""
    sides = zip(inputs.size, grid.shape.space, strict=True)
    return min((pixels // parts // MOST for pixels, parts in sides if parts > 1), default=0)


class _Rehearsal(NamedTuple):
    """Blocks in a row on shapes."""

    outline: nn.Module

    @classmethod
    def of(cls, row: _Row, which: slice, inputs: _Inputs) -> "_Rehearsal":
        bare = _Bare(row.parts[which], inputs.structure)
        memo: dict[int, Any] = {**shapes_of(bare), id(row): row}  # of others nothing is copied
        return cls(copy.deepcopy(bare, memo=memo))

    def runs(self, inputs: _Inputs, margin: int, grid: Grid) -> bool:
        """Whether no layer asks for more, on any rank, than such a margin."""
        visits = Visits(grid.shape, grid.rank, (1,) * len(grid.space), grid.tracks_batch)
        return run(self.outline, visits, list(map(Given.like, inputs.spread)), inputs.size, margin) is not None

    def work(self, inputs: _Inputs, margin: int, grid: Grid) -> tuple[RankWork, Any]:
        """What the rank in the middle does with such a margin (0: by layer), and what comes out of it."""

        def run_on(middle: Grid) -> Any:
            given = (outline_of(x, middle) for x in inputs.spread)
            held = (wide_halo(*pair) for pair in zip(given, inputs.held(margin), strict=True))
            return self.outline(*(held if margin else given))

        return tally(run_on, grid, inputs.spread[0].local.is_cuda)
