"""Equal tiles of background, of which a rank computes one for all, and the check that a part of a model allows it.

The part must treat all positions in space equally:

    does           pointwise operators without an operand that extends in space, convolutions, pools, norms by channel,
                   operators along channels, sums and means over the whole image
    does not       everything else: operands that extend in space, such as position embeddings, masks or coordinates;
                   indices and prefixes along space; random numbers; operators that this file does not list

Equal values are no proof. Position embeddings that start as zeros give equal outputs, but a different gradient in each
tile.
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
from mpi4dl.parallel.streaming.margins import StreamPlan
from mpi4dl.parallel.streaming.norms import TileMoments

Check = Callable[["_Call"], bool]
PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, np.generic)


class PositionCheck(TorchFunctionMode):
    """While it is active, `holds` tells whether all called operators treat positions along `axes` equally."""

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes, self.holds = tuple(axes), True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        leaves = pytree.tree_leaves((tuple(args), options)) if self.holds else []
        spread = [x for x in leaves if isinstance(x, SpatialTensor)]
        if not spread:
            return function(*args, **options)
        call = _Call(self.axes, function, args, options, spread, leaves)
        self.holds = call.is_uniform()  # checked first, because the call may stop the tile
        result = function(*args, **options)
        self.holds = self.holds and call.has_uniform(result)
        return result


@dataclass(frozen=True)
class _Call:
    """A call of an operator. `leaves` are all values in its arguments, `spread` those that are spread over tiles."""

    axes: tuple[int, ...]
    function: Any
    args: Sequence[Any]
    options: dict[str, Any]
    spread: Sequence[SpatialTensor]
    leaves: Sequence[Any]

    @property
    def first(self) -> SpatialTensor:
        return self.spread[0]

    def is_uniform(self) -> bool:
        """Whether the operator treats all positions equally."""
        check = _CHECKS.get(self.function)
        if check is None and is_pointwise(self.function) and not is_registered(self.function):
            check = _of_pixels
        return check is not None and all(map(self._has_all_axes, self.spread)) and check(self)

    def has_uniform(self, result: Any) -> bool:
        """Whether all tensors in the result still have all axes, or are values of the whole image."""
        made = [y for y in pytree.tree_leaves(result) if isinstance(y, Tensor)]
        if self.function in _METADATA:
            return True
        if self.function in _SUMS and not any(isinstance(y, SpatialTensor) for y in made):
            return True
        if not all(isinstance(y, SpatialTensor) and self._has_all_axes(y) for y in made):
            return False
        return self.function not in _RESHAPES or all(self._sizes(y) == self._sizes(self.first) for y in made)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.options.get(name, default)

    def dims(self, x: SpatialTensor) -> set[int]:
        """The dims of x that tiles cut."""
        return {dim for axis in self.axes if (dim := x.layout.dims[axis]) is not None}

    def only_first_spread(self) -> bool:
        """Whether the first argument is spread over tiles, and no other."""
        return len(self.spread) == 1 and (self.args[0] if self.args else self.options.get("input")) is self.first

    def not_cut(self, dims: Any) -> bool:
        """Whether tiles do not cut these dims, an int or a sequence, of the first operand."""
        if isinstance(dims, int):
            dims = (dims,)
        if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
            return False
        return not {dim % max(self.first.dim(), 1) for dim in dims} & self.dims(self.first)

    def _sizes(self, x: Any) -> list[int]:
        return [x.shape[x.layout.dims[axis]] for axis in self.axes]

    def _has_all_axes(self, x: SpatialTensor) -> bool:
        return not x.layout.flat and all(x.layout.dims[axis] is not None for axis in self.axes)


def _of_pixels(call: _Call) -> bool:
    """Pointwise operators: spread operands have the axes at the same dims; plain ones have size 1 along them."""
    places = {tuple(x.layout.dims[axis] - x.dim() for axis in call.axes) for x in call.spread}  # type: ignore[operator]
    if len(places) != 1:
        return False
    (places_from_behind,) = places
    return all(
        isinstance(x, SpatialTensor)
        or (isinstance(x, Tensor) and all(x.dim() < -at or x.shape[at] == 1 for at in places_from_behind))
        or isinstance(x, PLAIN)
        for x in call.leaves
    )


def _by_channel(call: _Call) -> bool:
    """Operators with a kernel, or with one parameter for each channel, which is dim 1."""
    return call.only_first_spread() and call.not_cut(1)


def _windows(num_axes: int) -> Check:
    return lambda call: _by_channel(call) and call.first.dim() == num_axes + 2


def _whole_pool(call: _Call) -> bool:
    size = call.argument(1, "output_size")
    return _by_channel(call) and all(n == 1 for n in (size if isinstance(size, list | tuple) else (size,)))


def _of_last_dims(call: _Call) -> bool:
    """Layer norms, which normalize the last dims, those of `normalized_shape`."""
    shape = call.argument(1, "normalized_shape", ())
    return call.only_first_spread() and isinstance(shape, list | tuple) and call.not_cut([*range(-len(shape), 0)])


def _along(position: int, default: Any = None) -> Check:
    """A check for operators along `dim`, one or several, which is the argument at this position."""
    return lambda call: call.only_first_spread() and call.not_cut(call.argument(position, "dim", default))


def _joined(call: _Call) -> bool:
    dims = {(x.layout.dims, x.dim()) for x in call.spread}
    tensors = call.argument(0, "tensors")
    return (
        len(dims) == 1
        and isinstance(tensors, list | tuple)
        and len(call.spread) == len(tensors)
        and call.not_cut(call.argument(1, "dim", 0))
    )


def _indexed(call: _Call) -> bool:
    """Indexing that takes everything along dims that tiles cut."""
    wanted = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not call.only_first_spread() or not all(each is Ellipsis or type(each) in (int, slice) for each in wanted):
        return False
    places: list[int] = []
    dim = 0
    for each in wanted:
        if each is Ellipsis:
            dim = call.first.dim() - (len(wanted) - 1 - len(places))
            places.append(-1)
        else:
            places.append(dim)
            dim += 1
    shared = call.dims(call.first)
    return wanted.count(Ellipsis) < 2 and all(
        at not in shared or each == slice(None) for at, each in zip(places, wanted, strict=True)
    )


def _padded(call: _Call) -> bool:
    """Padding, which changes only pixels near the border of the image."""
    return call.only_first_spread() and call.argument(2, "mode", "constant") in ("constant", "reflect", "replicate")


def _undropped(call: _Call) -> bool:
    return call.only_first_spread() and (not call.argument(2, "training", True) or call.argument(1, "p", 0.5) == 0)


def _each(names: str, check: Check) -> Iterator[tuple[Any, Check]]:
    for function in named(*names.split()):
        yield function, check


RESHAPES = "view reshape flatten unflatten squeeze unsqueeze expand broadcast_to"
_RESHAPES = frozenset(named(*RESHAPES.split()))
_METADATA = {*OF_THE_WHOLE, *OF_THE_PART, Tensor.__format__}
_SUMS = {
    *named("sum", "mean", "var", "std", "var_mean", "std_mean"),
    *named(*(f"adaptive_avg_pool{n}d" for n in (1, 2, 3))),
}
_CHECKS: dict[Any, Check] = dict.fromkeys(_METADATA, _Call.only_first_spread)
for found in (
    _each(" ".join(UNTAGGED), _of_pixels),
    _each("where floor_divide __floordiv__ __rfloordiv__", _of_pixels),
    _each("prelu batch_norm group_norm instance_norm channel_shuffle", _by_channel),
    *(_each(f"{kind}{n}d", _windows(n)) for n in (1, 2, 3) for kind in ("conv", "max_pool", "avg_pool", "lp_pool")),
    *(_each(f"adaptive_avg_pool{n}d", _whole_pool) for n in (1, 2, 3)),
    _each("layer_norm rms_norm", _of_last_dims),
    _each("linear", lambda call: call.only_first_spread() and call.not_cut(-1)),
    _each("softmax log_softmax", _along(1)),
    _each("sum mean var std var_mean std_mean", _Call.only_first_spread),  # `has_uniform` refuses some axes
    _each("cat concat concatenate", _joined),
    _each("select narrow unbind", _along(1, 0)),
    _each("chunk split tensor_split", _along(2, 0)),
    # `has_uniform` checks the layout of their results.
    _each(f"permute transpose swapaxes swapdims movedim moveaxis {RESHAPES}", _Call.only_first_spread),
    _each("pad constant_pad_nd", _padded),
    _each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", _undropped),
    _each("requires_grad_", _Call.only_first_spread),
):
    _CHECKS.update(found)
_CHECKS[F.normalize] = _along(2, 1)
_CHECKS[Tensor.__getitem__] = _indexed

# Equal tiles: one is computed for all, forward and backward.
#
# Take a tile of one colour whose margin has that colour too, away from the border of the image. All pixels of its
# output are equal. They equal those of every other such tile that layers cut into the same shapes. The contributions
# of these tiles to statistics are equal, too.
#
# The backward pass of a tile is linear in the gradient of its output, apart from the statistics of other tiles:
#
#     gradients of n equal tiles = those of one tile for the sum of the n output gradients
#                                  + (n - 1) x those of one tile for an output gradient of 0
#
# Before a rank skips tiles, the called operators must treat all positions equally (`PositionCheck`). Two tiles must
# also agree in every pass, and their outputs must be constant. Otherwise the rank computes all tiles again, and skips
# none with this plan any more. It skips none in parts that draw random numbers.

EPS = 64  # values that differ by at most this many roundings are equal


class TilesDiffer(Exception):
    """Tiles that look equal have different results, so that none may be skipped."""


@dataclass
class _EqualTiles:
    """Equal tiles. A rank computes the `first` and the `second`, and skips the others while these two `agree`.

    `pixels` are the first tile's contribution to the next statistic or, in the last pass, one pixel of each output.
    `moments` are its moments of the inputs of batch norms.
    """

    first: int
    pixels: Sequence[Tensor]
    moments: TileMoments
    second: int | None = None
    agree: bool = True


@dataclass
class BackgroundTiles:
    """The equal tiles of one batch that a rank streams by `plan`, found as their pixels are read.

    `first_of` maps each skipped tile to the computed tile that it equals.
    """

    plan: StreamPlan
    first_of: dict[int, int] = field(default_factory=dict)
    _groups: dict[Hashable, _EqualTiles] = field(default_factory=dict)

    @staticmethod
    def applies_to(plan: StreamPlan) -> bool:
        """Whether all outputs of the part have all axes that are cut, so that gradients of equal tiles can be added."""
        return plan.skips_equal and all(
            isinstance(y, SpatialTensor) and all(y.layout.dims[axis] is not None for axis in plan.cut_axes)
            for y in plan.profile.outputs
        )

    def key(self, tile: int, read: Tensor) -> Hashable:
        """A key that equal tiles share; None if the tile is not of one colour, or lies at a border of the image.

        `read` are the pixels of the tile and its margin, (N, C, *space).
        """
        plan = self.plan
        spec, margin = plan.inputs[0], plan.profile.margin
        assert spec.tiling is not None
        held, own = spec.held(margin, plan.size).held(tile), spec.tiling.owned(tile)
        inside = (a.length == b.length + 2 * margin for a, b in zip(held.space, own.space, strict=True))
        space = [axis - 1 for axis in plan.cut_axes if axis != BATCH]
        borders = (own.space[i].start == 0 or own.space[i].stop == plan.size[i] for i in space)
        if not read.numel() or not all(inside) or any(borders):  # with a margin of 0, layers may still pad
            return None
        if read[0, 0].numel() == 1:  # it is of one colour always, as are the features of patches
            return None
        least, most = torch.aminmax(read.flatten(2), dim=2)
        if not torch.equal(least, most):
            return None
        return tuple(least.flatten().tolist()), *(each.owned(tile).shape for each in plan.profile.tilings)

    def skip(self, key: Hashable, tile: int) -> bool:
        """Whether a tile with this key need not be computed."""
        group = self._groups.get(key)
        if group is None or group.second is None or not group.agree or tile in (group.first, group.second):
            return False
        self.first_of[tile] = group.first
        return True

    def compare(self, key: Hashable, tile: int, result: Sequence[Tensor] | None, moments: TileMoments) -> None:
        """Compare the result of a tile, its flat contribution or its outputs, with that of the first one.

        `result` is None if the part does not treat all positions equally.

        Raises:
            TilesDiffer: the results differ, and other tiles were skipped.
        """
        pixels = list(map(_first_pixel, result or ()))
        group = self._groups.setdefault(key, _EqualTiles(tile, pixels, moments))
        if tile == group.first:
            group.pixels, group.moments = pixels, moments
        elif group.second is None:
            group.second = tile
        group.agree = group.agree and result is not None and all(map(_is_constant, result, group.pixels))
        if not group.agree and group.first in self.first_of.values():
            raise TilesDiffer

    def skipped(self) -> list[tuple[int, int, _EqualTiles]]:
        """Each skipped tile, the computed tile that it equals, and the result of that one."""
        groups = {group.first: group for group in self._groups.values()}
        return [(tile, first, groups[first]) for tile, first in self.first_of.items()]

    def equal_to(self, tile: int) -> list[int]:
        """The tiles that were skipped because they equal this one."""
        return [other for other, first in self.first_of.items() if first == tile]


def _first_pixel(y: Tensor) -> Tensor:
    for dim in range(2, y.dim()):
        y = y.narrow(dim, 0, min(1, y.shape[dim]))
    return y.clone()


def _is_constant(y: Tensor, pixel: Tensor) -> bool:
    """Whether all pixels of y equal this one."""
    if not y.is_floating_point() or not y.numel():
        return y.numel() > 0 and torch.equal(y, pixel.expand_as(y))
    return float((y - pixel).abs().max()) <= EPS * torch.finfo(y.dtype).eps * float(y.abs().max())
