"""Counts what a part of a model does on the rank in the middle of a grid: exchanges, messages, what is computed.

It runs on shapes alone, on a rank of which no other need exist; so every rank finds the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpi4dl._randomness import forked
from mpi4dl.parallel.costs.widening import RankWork
from mpi4dl.parallel.pipeline.flops import FlopCounter
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.imaginary import ImaginaryGrid, imaginary_grid, rank_in_the_middle
from mpi4dl.parallel.spatial.tensor import SpatialTensor


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


def tally(run: Callable[[ImaginaryGrid], Any], grid: Grid, norms_bring_halos: bool) -> tuple[RankWork, Any]:
    """What the rank in the middle of the grid does in `run`, and what that returns; nobody chooses anything there.

    Where norms bring halos, it is what `run` does in its second step, when they know of which.
    """
    middle = imaginary_grid(grid.shape, rank_in_the_middle(grid.shape), grid.tracks_batch)
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
