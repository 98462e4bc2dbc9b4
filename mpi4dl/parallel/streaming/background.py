"""Equal tiles of bare background, of which one is computed for all; whether a part of a model allows that.

    alike        pointwise operators with operands that have no extent in space, convolutions, pools, norms by channel,
                 what works along channels, sums and means over the whole image
    not alike    anything else: an operand with an extent in space, such as a table of positions, a mask or coordinates;
                 indices and prefixes along space; random numbers; what this file does not know

Values prove nothing: a table of positions that begins as zeros makes all tiles alike, and has another gradient in each.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mpi4dl.geometry import BATCH
from mpi4dl.parallel.spatial.rules.hooks import OF_THE_PART, OF_THE_WHOLE
from mpi4dl.parallel.spatial.rules.pointwise import UNTAGGED, is_pointwise
from mpi4dl.parallel.spatial.tensor import SpatialTensor, is_registered, named
from mpi4dl.parallel.streaming.margins import Route
from mpi4dl.parallel.streaming.norms import Seen

Call = tuple[Sequence[Any], dict[str, Any]]
Check = Callable[["_Called"], bool]
VALUES = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    np.generic,
)


class AlikeEverywhere(TorchFunctionMode):
    """Watches a part of a model run: `alike` is whether all that it called treats places along these axes alike."""

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes, self.alike = tuple(axes), True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        leaves = pytree.tree_leaves((tuple(args), options)) if self.alike else []
        spread = [x for x in leaves if isinstance(x, SpatialTensor)]
        if not spread:
            return function(*args, **options)
        called = _Called(self.axes, function, args, options, spread, leaves)
        self.alike = called.is_alike()  # before it is called, which may end the visit
        result = function(*args, **options)
        self.alike = self.alike and called.makes_alike(result)
        return result


@dataclass(frozen=True)
class _Called:
    """A call with `leaves` among its arguments, of which some are `spread` over tiles."""

    axes: tuple[int, ...]
    function: Any
    args: Sequence[Any]
    options: dict[str, Any]
    spread: Sequence[SpatialTensor]
    leaves: Sequence[Any]

    @property
    def first(self) -> SpatialTensor:
        return self.spread[0]

    def is_alike(self) -> bool:
        check = _CHECKS.get(self.function)
        if check is None and is_pointwise(self.function) and not is_registered(self.function):
            check = _of_pixels
        return check is not None and all(map(self._has_all_axes, self.spread)) and check(self)

    def makes_alike(self, result: Any) -> bool:
        """Whether all results have all axes, or are of the whole image."""
        made = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]
        if self.function in _SAYING:
            return True
        if self.function in _SUMS and not any(isinstance(y, SpatialTensor) for y in made):
            return True
        if not all(isinstance(y, SpatialTensor) and self._has_all_axes(y) for y in made):
            return False
        return self.function not in _RESHAPES or all(self._sizes(y) == self._sizes(self.first) for y in made)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.options.get(name, default)

    def dims(self, x: SpatialTensor) -> set[int]:
        """The dims of x that tiles share."""
        return {dim for axis in self.axes if (dim := x.layout.dims[axis]) is not None}

    def leads(self) -> bool:
        """Whether the first argument is spread, and nothing else."""
        return len(self.spread) == 1 and (self.args[0] if self.args else self.options.get("input")) is self.first

    def apart(self, dims: Any) -> bool:
        """Whether these dims of the first operand, a number or several, are none that tiles share."""
        if isinstance(dims, int):
            dims = (dims,)
        if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
            return False
        return not {dim % max(self.first.dim(), 1) for dim in dims} & self.dims(self.first)

    def _sizes(self, x: Any) -> list[int]:
        return [x.shape[x.layout.dims[axis]] for axis in self.axes]

    def _has_all_axes(self, x: SpatialTensor) -> bool:
        return not x.layout.flat and all(x.layout.dims[axis] is not None for axis in self.axes)


def _of_pixels(called: _Called) -> bool:
    """Operands that broadcast: all axes at the same dims, and plain ones of one size along them."""
    places = {tuple(x.layout.dims[axis] - x.dim() for axis in called.axes) for x in called.spread}  # type: ignore[operator]
    if len(places) != 1:
        return False
    (places_from_behind,) = places
    return all(
        isinstance(x, SpatialTensor)
        or (isinstance(x, Tensor) and all(x.dim() < -at or x.shape[at] == 1 for at in places_from_behind))
        or isinstance(x, VALUES)
        for x in called.leaves
    )


def _by_channel(called: _Called) -> bool:
    """Kernels and what there is one of for each channel: dim 1."""
    return called.leads() and called.apart(1)


def _windows(num_axes: int) -> Check:
    return lambda called: _by_channel(called) and called.first.dim() == num_axes + 2


def _whole_pool(called: _Called) -> bool:
    size = called.argument(1, "output_size")
    return _by_channel(called) and all(n == 1 for n in (size if isinstance(size, list | tuple) else (size,)))


def _of_last_dims(called: _Called) -> bool:
    """Layer norms, whose `normalized_shape` are the last dims."""
    shape = called.argument(1, "normalized_shape", ())
    return called.leads() and isinstance(shape, list | tuple) and called.apart([*range(-len(shape), 0)])


def _along(position: int, default: Any = None) -> Check:
    """A check for operators along one dim, or several."""
    return lambda called: called.leads() and called.apart(called.argument(position, "dim", default))


def _joined(called: _Called) -> bool:
    dims = {(x.layout.dims, x.dim()) for x in called.spread}
    tensors = called.argument(0, "tensors")
    return (
        len(dims) == 1
        and isinstance(tensors, list | tuple)
        and len(called.spread) == len(tensors)
        and called.apart(called.argument(1, "dim", 0))
    )


def _indexed(called: _Called) -> bool:
    """Along dims that tiles share everything is taken."""
    wanted = called.args[1] if isinstance(called.args[1], tuple) else (called.args[1],)
    if not called.leads() or not all(each is Ellipsis or type(each) in (int, slice) for each in wanted):
        return False
    places: list[int] = []
    dim = 0
    for each in wanted:
        if each is Ellipsis:
            dim = called.first.dim() - (len(wanted) - 1 - len(places))
            places.append(-1)
        else:
            places.append(dim)
            dim += 1
    shared = called.dims(called.first)
    return wanted.count(Ellipsis) < 2 and all(
        at not in shared or each == slice(None) for at, each in zip(places, wanted, strict=True)
    )


def _padded(called: _Called) -> bool:
    """Only what lies at the border of the image sees it."""
    return called.leads() and called.argument(2, "mode", "constant") in ("constant", "reflect", "replicate")


def _undropped(called: _Called) -> bool:
    return called.leads() and (not called.argument(2, "training", True) or called.argument(1, "p", 0.5) == 0)


def _each(names: str, check: Check) -> Iterator[tuple[Any, Check]]:
    for function in named(*names.split()):
        yield function, check


RESHAPES = "view reshape flatten unflatten squeeze unsqueeze expand broadcast_to"
_RESHAPES = frozenset(named(*RESHAPES.split()))
_SAYING = {*OF_THE_WHOLE, *OF_THE_PART, Tensor.__format__}
_SUMS = {
    *named("sum", "mean", "var", "std", "var_mean", "std_mean"),
    *named(*(f"adaptive_avg_pool{n}d" for n in (1, 2, 3))),
}
_CHECKS: dict[Any, Check] = dict.fromkeys(_SAYING, _Called.leads)
for found in (
    _each(" ".join(UNTAGGED), _of_pixels),
    _each("where floor_divide __floordiv__ __rfloordiv__", _of_pixels),
    _each("prelu batch_norm group_norm instance_norm channel_shuffle", _by_channel),
    *(_each(f"{kind}{n}d", _windows(n)) for n in (1, 2, 3) for kind in ("conv", "max_pool", "avg_pool", "lp_pool")),
    *(_each(f"adaptive_avg_pool{n}d", _whole_pool) for n in (1, 2, 3)),
    _each("layer_norm rms_norm", _of_last_dims),
    _each("linear", lambda called: called.leads() and called.apart(-1)),
    _each("softmax log_softmax", _along(1)),
    _each("sum mean var std var_mean std_mean", _Called.leads),  # over all axes, or along none
    _each("cat concat concatenate", _joined),
    _each("select narrow unbind", _along(1, 0)),
    _each("chunk split tensor_split", _along(2, 0)),
    # What they make says whether it has the axes still.
    _each(f"permute transpose swapaxes swapdims movedim moveaxis {RESHAPES}", _Called.leads),
    _each("pad constant_pad_nd", _padded),
    _each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", _undropped),
    _each("requires_grad_", _Called.leads),
):
    _CHECKS.update(found)
_CHECKS[F.normalize] = _along(2, 1)
_CHECKS[Tensor.__getitem__] = _indexed

# Tiles of bare background: of those that are alike one is computed for all, forward and backward.
#
# A tile of one colour, whose margin has that colour too, and which no border of the image is near, has one output: the
# same for each of its pixels, and for every other such tile that layers cut into as many pixels. So whatever it tells
# the other tiles on its way is the same too, such as the moments that a norm over the whole image asks for.
#
# The backward pass of a visit is linear in the gradient of what the tile owns, except for the contributions of other
# tiles:
#
#     gradients of n tiles alike = those of one that is given the sum of theirs + (n - 1) x those of one that is given 0
#
# That a part of a model treats all places alike must follow from what it calls (`alike`), whatever its parameters are
# now. Two tiles must agree too before a third one is spared, in every round, and their outputs must be the same
# everywhere in them; else all tiles are visited again, and never spared on this route. Parts that draw random numbers
# leave nothing to spare.

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
        """A key that equal tiles share; None if the tile shows something, or lies at a border."""
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
