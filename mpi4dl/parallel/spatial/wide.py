"""One exchange for a block of layers: at its entry every rank fetches as much of a halo as all its layers look at.

    layer by layer     | tile |<>| conv |<>| conv |<>| conv |            an exchange for each, each way
    block              |<  tile  >| conv | conv | conv |                 one; ranks compute what they hold beyond their
                                                                         tile as their neighbours do

How much that is nobody derives: the block is rehearsed on shapes with a wider and wider halo, until no layer asks for
more. Border padding acts at every layer, as in the plain model, for what lies beyond the image is no halo. It is what
Ohio State's MPI4DL does by `--halo-D2`, with models written for it.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils import _pytree as pytree

from mpi4dl.geometry import widest
from mpi4dl.parallel.blocks import blocks_of
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.rehearsal import CannotStream, rehearse
from mpi4dl.parallel.streaming.script import VisitedGrid
from mpi4dl.parallel.streaming.visits import Given, Visits

HALOS = ("layer", "block")
MOST = 4  # of so many halos as wide as it is, a tile's side is at least as long; otherwise layers fetch their own

_known: "WeakKeyDictionary[nn.Module, dict[Any, int | None]]" = WeakKeyDictionary()


def fetch_halos(modules: Iterable[nn.Module], halo: str) -> None:
    """Let models or stages fetch halos for each "layer", or at the entry of each "block". Raises ValueError."""
    if halo not in HALOS:
        raise ValueError(f"halo is {halo!r}, but must be one of {', '.join(HALOS)}")
    for module in modules if halo == "block" else ():
        for block in blocks_of(module):
            fetch_at_entry(block)


def fetch_at_entry(block: nn.Module) -> None:
    """Make a module fetch the halo of all its layers at once, where they can do with one, and it pays.

    Elsewhere, and on plain tensors, it runs as before.
    """
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


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    spread = [x for x in leaves if isinstance(x, SpatialTensor)]
    if len(spread) == len(leaves) > 0 and not isinstance(spread[0].layout.grid, VisitedGrid):
        key = (structure, tuple((x.layout, x.shape, x.dtype) for x in spread))
        margins = _known.setdefault(block, {})
        if key not in margins:
            margins[key] = _margin(_Bare(block, forward, structure), spread)
        if margin := margins[key]:
            args, kwargs = pytree.tree_unflatten([_widened(x, margin, _size(spread)) for x in spread], structure)
    return forward(*args, **kwargs)


def _size(spread: Sequence[SpatialTensor]) -> tuple[int, ...]:
    """The size in whose pixels a halo is counted: that of the largest input."""
    return max(tuple(split.size for split in x.layout.tiling.splits[1:]) for x in spread)


def _widened(x: SpatialTensor, margin: int, size: Sequence[int]) -> SpatialTensor:
    wide = Given.like(x).layout(x.layout.grid, margin, size)
    return retile(x, widest(x.layout.tiling, wide.tiling))


def _margin(block: nn.Module, spread: Sequence[SpatialTensor]) -> int | None:
    """How wide a halo all layers of the block need; None if there is no end to it, or it does not pay."""
    grid = spread[0].layout.grid
    if any(x.layout.flat or x.layout.dims[1:] != spread[0].layout.dims[1:] for x in spread):
        return None
    visits, size = Visits(grid.shape, grid.rank, (1,) * len(grid.space), grid.tracks_batch), _size(spread)
    try:
        margin = rehearse(block, visits, [Given.like(x) for x in spread], size).margin
    except (CannotStream, NotImplementedError):
        return None
    sides = [pixels // parts for pixels, parts in zip(size, grid.shape.space, strict=True) if parts > 1]
    return margin if all(margin * MOST <= side for side in sides) else None
