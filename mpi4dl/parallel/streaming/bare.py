"""Tiles of bare background: of those that are alike one is computed for all, forward and backward.

A tile of one colour, whose margin has that colour too, and which no border of the image is near, has one output: the
same for each of its pixels, and for every other such tile. The gradients of all of them are those of one that is given
their sum. That a part of a model treats all places alike is not taken for granted: its output must be the same
everywhere in a tile, and in two tiles that were computed, before a third one is spared. Layers that draw random
numbers, and norms over the whole image, whose rounds count pixels, leave nothing to spare.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpi4dl.parallel.streaming.route import Route

EPS = 64  # so many roundings apart, values are the same


@dataclass
class _Kind:
    """Tiles of one colour and size: the first that was visited, what it made of a pixel, and how many agreed."""

    tile: int
    pixels: Sequence[Tensor]
    agreed: int = 1


@dataclass
class BareTiles:
    """Those that a rank visits along `route`, in one pass of images: known as soon as they are read.

    `instead` says of tiles that are not visited which other one is.
    """

    route: Route
    instead: dict[int, int] = field(default_factory=dict)
    _kinds: dict[Hashable, _Kind | None] = field(default_factory=dict)

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

    def made(self, kind: Hashable, tile: int, shapes: Sequence[torch.Size]) -> Sequence[Tensor] | None:
        """What a tile of this kind makes of each pixel, if that is known; its outputs have these shapes."""
        known = self._kinds.get((kind, *shapes))
        if known is None or known.agreed < 2:
            return None
        self.instead[tile] = known.tile
        return known.pixels

    def saw(self, kind: Hashable, tile: int, outputs: Sequence[Tensor] | None) -> None:
        """A tile of this kind was visited, and made these; None: what it would not make again."""
        if outputs is None:
            return
        key = kind, *(y.shape for y in outputs)
        known, pixels = self._kinds.get(key), [_first_pixel(y) for y in outputs]
        if key not in self._kinds and all(map(_same, outputs, pixels)):
            self._kinds[key] = _Kind(tile, pixels)
        elif known is not None and all(map(_same, outputs, known.pixels)):
            known.agreed += 1
        else:
            self._kinds[key] = None

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
