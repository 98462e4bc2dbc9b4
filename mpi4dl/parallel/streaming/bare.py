"""Tiles of bare background: of those that are alike one is computed for all, forward and backward.

A tile of one colour, whose margin has that colour too, and which no border of the image is near, has one output: the
same for each of its pixels, and for every other such tile. The gradients of all of them are those of one that is given
their sum. That a part of a model treats all places alike is not taken for granted: its output must be the same
everywhere in a tile, and in two tiles that were computed, before a third one is spared; and that every layer's output
is cut into as many pixels there as here is seen in its layouts, so that running statistics count what they should.
Layers that draw random numbers, and norms over the whole image, whose rounds each visit comes to, leave nothing to
spare.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpi4dl.geometry import Tiling
from mpi4dl.parallel.spatial.grid import Grid
from mpi4dl.parallel.streaming.norms import Seen
from mpi4dl.parallel.streaming.route import Route

EPS = 64  # so many roundings apart, values are the same


@dataclass
class _Kind:
    """Tiles of one colour, cut alike in each of `tilings`.

    Of the first that was visited: what it made of a pixel, and what its norms saw; how many agreed with it.
    """

    tile: int
    tilings: Sequence[Tiling]
    pixels: Sequence[Tensor]
    seen: Seen
    agreed: int = 1
    alike: bool = True

    def like(self, tile: int) -> bool:
        """Whether a tile has as many pixels as these in what every layer makes."""
        return all(one.owned(tile).shape == one.owned(self.tile).shape for one in self.tilings)


@dataclass
class BareTiles:
    """Those that a rank visits along `route`, in one pass of images: known as soon as they are read.

    `instead` says of tiles that are not visited which other one is.
    """

    route: Route
    instead: dict[int, int] = field(default_factory=dict)
    _kinds: dict[Hashable, list[_Kind]] = field(default_factory=dict)

    def kind(self, tile: int, read: Tensor) -> Hashable:
        """What tiles like this one have in common; None if it shows something, or lies at a border."""
        given, margin, size = self.route.givens[0], self.route.rehearsed.margin, self.route.size
        assert given.tiling is not None
        held, own = given.held(margin, size).held(tile), given.tiling.owned(tile)
        inside = (a.length == b.length + 2 * margin for a, b in zip(held.space, own.space, strict=True))
        if not read.numel() or not all(inside):
            return None
        pixels = read.flatten(2)
        least, most = torch.aminmax(pixels, dim=2)
        return (own.shape, tuple(least.flatten().tolist())) if torch.equal(least, most) else None

    def made(self, kind: Hashable, tile: int) -> tuple[Sequence[Tensor], Seen] | None:
        """What a tile of this kind makes of each pixel, and what norms see of it, if that is known."""
        known = self._known(kind, tile)
        if known is None or not known.alike or known.agreed < 2:
            return None
        self.instead[tile] = known.tile
        return known.pixels, known.seen

    def saw(self, kind: Hashable, grid: Grid, outputs: Sequence[Tensor] | None, seen: Seen) -> None:
        """The tile of this grid was visited, and made these; None: what it would not make again."""
        if outputs is None:
            return
        known = self._known(kind, grid.rank)
        if known is None:
            known = _Kind(grid.rank, [layout.tiling for layout in grid.layouts], list(map(_first_pixel, outputs)), seen)
            self._kinds.setdefault(kind, []).append(known)
        else:
            known.agreed += 1
        known.alike = known.alike and all(map(_same, outputs, known.pixels))

    def _known(self, kind: Hashable, tile: int) -> _Kind | None:
        return next((each for each in self._kinds.get(kind, ()) if each.like(tile)), None)

    def alike(self, tile: int) -> list[int]:
        """This tile, and those that it stands for."""
        return [tile, *(other for other, its in self.instead.items() if its == tile)]


def _first_pixel(y: Tensor) -> Tensor:
    for dim in range(2, y.dim()):
        y = y.narrow(dim, 0, min(1, y.shape[dim]))
    return y.clone()


def _same(y: Tensor, pixel: Tensor) -> bool:
    """Whether y has the values of a pixel everywhere."""
    if not y.is_floating_point() or not y.numel():
        return y.numel() > 0 and torch.equal(y, pixel.expand_as(y))
    return float((y - pixel).abs().max()) <= EPS * torch.finfo(y.dtype).eps * float(y.abs().max())
