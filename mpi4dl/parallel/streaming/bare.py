"""Tiles of bare background: of those that are alike one is computed for all, forward and backward.

A tile of one colour, whose margin has that colour too, and which no border of the image is near, has one output: the
same for each of its pixels, and for every other such tile that layers cut into as many pixels. So whatever it tells the
other tiles on its way is the same too, such as the moments that a norm over the whole image asks for.

The backward pass of a visit is linear in the gradient of what the tile owns, but for what comes of the other tiles:

    gradients of n tiles alike = those of one that is given the sum of theirs + (n - 1) x those of one that is given 0

That a part of a model treats all places alike must follow from what it calls (`alike`), whatever its parameters are
now. Two tiles must agree too before a third one is spared, in every round, and their outputs must be the same
everywhere in them; else all tiles are visited again, and never spared on this route. Parts that draw random numbers
leave nothing to spare.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpi4dl.geometry import BATCH
from mpi4dl.parallel.spatial.tensor import SpatialTensor
from mpi4dl.parallel.streaming.norms import Seen
from mpi4dl.parallel.streaming.route import Route

EPS = 64  # so many roundings apart, values are the same


class NotAlike(Exception):
    """Tiles that look the same are not: none must be spared."""


@dataclass
class _Kind:
    """Tiles of one colour, cut alike by every layer: the first, the second, and what the first made this time.

    That is what it told, or of each output a pixel; and what its norms saw.
    """

    first: int
    made: Sequence[Tensor]
    seen: Seen
    second: int | None = None
    alike: bool = True


@dataclass
class BareTiles:
    """Those that a rank visits along `route`, in one pass of images: known as soon as they are read.

    `instead` says of tiles that are not visited which other one is.
    """

    route: Route
    instead: dict[int, int] = field(default_factory=dict)
    _kinds: dict[Hashable, _Kind] = field(default_factory=dict)

    @staticmethod
    def may_be(route: Route) -> bool:
        """Whether what visits make of their own pixels are pixels, which is what gradients can be added up for."""
        made = [y for y in route.rehearsed.outputs if isinstance(y, SpatialTensor)]
        every = len(made) == len(route.rehearsed.outputs)
        return route.spares and every and all(y.layout.dims[axis] is not None for y in made for axis in route.cut)

    def kind(self, tile: int, read: Tensor) -> Hashable:
        """What tiles like this one have in common; None if it shows something, or lies at a border."""
        route = self.route
        given, margin, size = route.givens[0], route.rehearsed.margin, route.size
        assert given.tiling is not None
        held, own = given.held(margin, size).held(tile), given.tiling.owned(tile)
        inside = (a.length == b.length + 2 * margin for a, b in zip(held.space, own.space, strict=True))
        space = [axis - 1 for axis in route.cut if axis != BATCH]
        borders = (own.space[i].start == 0 or own.space[i].stop == route.size[i] for i in space)
        if not read.numel() or not all(inside) or any(borders):  # without a margin layers may still pad
            return None
        pixels = read.flatten(2)
        least, most = torch.aminmax(pixels, dim=2)
        if not torch.equal(least, most):
            return None
        return tuple(least.flatten().tolist()), *(each.owned(tile).shape for each in self.route.rehearsed.tilings)

    def spare(self, kind: Hashable, tile: int) -> bool:
        """Whether a tile of this kind need not be visited."""
        known = self._kinds.get(kind)
        if known is None or known.second is None or not known.alike or tile in (known.first, known.second):
            return False
        self.instead[tile] = known.first
        return True

    def saw(self, kind: Hashable, tile: int, made: Sequence[Tensor] | None, seen: Seen) -> None:
        """A tile of this kind was visited, and made these: what it told, flat, or outputs; None: not so once more.

        Raises:
            NotAlike: others were spared for it, which would have made something else.
        """
        known, alike = self._kinds.get(kind), made is not None
        pixels = list(map(_first_pixel, made or ()))
        if known is None:
            known = self._kinds[kind] = _Kind(tile, pixels, seen)
        elif tile == known.first:
            known.made, known.seen = pixels, seen
        elif known.second is None:
            known.second = tile
        known.alike = known.alike and alike and all(map(_same, made or (), known.made))
        if not known.alike and known.first in self.instead.values():
            raise NotAlike

    def spared(self) -> list[tuple[int, int, _Kind]]:
        """The tiles that were not visited, the tile that was instead, and what that one made."""
        kinds = {known.first: known for known in self._kinds.values()}
        return [(tile, first, kinds[first]) for tile, first in self.instead.items()]

    def others(self, tile: int) -> list[int]:
        """The tiles that a tile stands for, beside itself."""
        return [other for other, its in self.instead.items() if its == tile]


def _first_pixel(y: Tensor) -> Tensor:
    for dim in range(2, y.dim()):
        y = y.narrow(dim, 0, min(1, y.shape[dim]))
    return y.clone()


def _same(y: Tensor, pixel: Tensor) -> bool:
    """Whether y has the values of a pixel everywhere."""
    if not y.is_floating_point() or not y.numel():
        return y.numel() > 0 and torch.equal(y, pixel.expand_as(y))
    return float((y - pixel).abs().max()) <= EPS * torch.finfo(y.dtype).eps * float(y.abs().max())
