"""What a streamed part takes, and the gradient of it, of which every visit is given, and adds, what it holds."""

import torch
from torch import Tensor

from mpi4dl.comm.exchange import narrow
from mpi4dl.parallel.spatial.grid import Grid, Layout
from mpi4dl.parallel.spatial.halo import retile
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.route import Route
from mpi4dl.parallel.streaming.script import VisitedGrid
from mpi4dl.parallel.streaming.visits import Given, ImageSource


class Input:
    """What a part takes: `values`, of which this rank holds what all its visits need, and the gradient of that."""

    def __init__(self, values: Tensor | ImageSource, given: Given, layout: Layout | None) -> None:
        self.values, self.given, self.layout = values, given, layout
        self._gradient: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor | ImageSource, given: Given, route: Route, grid: Grid) -> "Input":
        """What visits need beside what this rank owns comes from the other ranks."""
        if given.tiling is None or not isinstance(x, Tensor):
            return cls(x, given, None)
        layout = route.of_rank(given, grid)
        if isinstance(x, SpatialTensor):
            return cls(retile(x, layout.tiling).local, given, layout)
        return cls(x, given, layout)

    def read(self, route: Route, tile: int) -> Tensor | None:
        """What is read for the visit of a tile, if this is a source."""
        return None if isinstance(self.values, Tensor) else self.values.read(route.box(self.given, tile))

    def of_visit(self, grid: VisitedGrid, route: Route, device: torch.device, read: Tensor | None) -> Tensor:
        """What the visit of this grid is given, apart from any graph: a copy, which layers may overwrite.

        `read` is what was read for it.
        """
        if self.given.tiling is None:
            assert isinstance(self.values, Tensor)
            return self.values.detach().clone().requires_grad_(self.values.requires_grad)
        layout = route.layout(self.given, grid)
        if not isinstance(self.values, Tensor):
            assert read is not None
            return SpatialTensor(read.to(device), layout)
        assert self.layout is not None
        local = narrow(self.values.detach(), layout.dims, self.layout.held, layout.held).to(device, copy=True)
        return SpatialTensor(local.requires_grad_(self.values.requires_grad), layout)

    def add(self, value: Tensor, gradient: Tensor) -> None:
        """Add the gradient of what a visit was given."""
        assert isinstance(self.values, Tensor)
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.values)
        total = self._gradient
        if isinstance(value, SpatialTensor):
            assert self.layout is not None
            total = narrow(total, value.layout.dims, self.layout.held, value.layout.held)
        total.add_(gradient)

    def total(self) -> Tensor | None:
        found, self._gradient = self._gradient, None
        return found
