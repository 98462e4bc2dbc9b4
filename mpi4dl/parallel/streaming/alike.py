"""Whether a part of a model treats all places of an image alike, by what it calls.

    alike        pointwise operators with operands that have no extent in space, convolutions, pools, norms by channel,
                 what works along channels, sums and means over the whole image
    not alike    anything else: an operand with an extent in space, such as a table of positions, a mask or coordinates;
                 indices and prefixes along space; random numbers; what this file does not know

Values prove nothing: a table of positions that begins as zeros makes all tiles alike, and has another gradient in each.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mpi4dl.parallel.spatial.rules.attributes import OF_THE_PART, OF_THE_WHOLE
from mpi4dl.parallel.spatial.rules.pointwise import UNTAGGED, is_pointwise
from mpi4dl.parallel.spatial.tensor import SpatialTensor, is_registered, named

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
        if self.alike:  # before it is called, which may end the visit
            leaves = pytree.tree_leaves((tuple(args), options))
            spread = [x for x in leaves if isinstance(x, SpatialTensor)]
            if spread:
                called = _Called(self.axes, function, args, options, spread, leaves)
                self.alike = called.known and called.is_alike()
                result = function(*args, **options)
                self.alike = self.alike and called.makes_alike(result)
                return result
        return function(*args, **options)


class _Called:
    """A call with operands that are spread over tiles."""

    def __init__(
        self,
        axes: tuple[int, ...],
        function: Any,
        args: Sequence[Any],
        options: dict[str, Any],
        spread: Sequence[SpatialTensor],
        leaves: Sequence[Any],
    ) -> None:
        self.axes, self.function, self.args, self.options = axes, function, args, options
        self.spread, self.leaves = spread, leaves
        self.first = spread[0]
        self._check = _CHECKS.get(function)
        if self._check is None and is_pointwise(function) and not is_registered(function):
            self._check = _of_pixels

    @property
    def known(self) -> bool:
        return self._check is not None

    def is_alike(self) -> bool:
        assert self._check is not None
        return all(map(self._has_all_axes, self.spread)) and self._check(self)

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


def _linear(called: _Called) -> bool:
    return called.leads() and called.apart(-1)


def _along(position: int, default: Any = None) -> Check:
    """What works along one dim, or several."""
    return lambda called: called.leads() and called.apart(called.argument(position, "dim", default))


def _reduced(called: _Called) -> bool:
    """Over all axes, or along none."""
    return called.leads()


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


def _anyhow(called: _Called) -> bool:
    """What it makes says whether it has the axes still."""
    return called.leads()


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
_CHECKS: dict[Any, Check] = dict.fromkeys(_SAYING, _anyhow)
for found in (
    _each(" ".join(UNTAGGED), _of_pixels),
    _each("where floor_divide __floordiv__ __rfloordiv__", _of_pixels),
    _each("prelu batch_norm group_norm instance_norm channel_shuffle", _by_channel),
    *(_each(f"{kind}{n}d", _windows(n)) for n in (1, 2, 3) for kind in ("conv", "max_pool", "avg_pool", "lp_pool")),
    *(_each(f"adaptive_avg_pool{n}d", _whole_pool) for n in (1, 2, 3)),
    _each("layer_norm rms_norm", _of_last_dims),
    _each("linear", _linear),
    _each("softmax log_softmax", _along(1)),
    _each("sum mean var std var_mean std_mean", _reduced),
    _each("cat concat concatenate", _joined),
    _each("select narrow unbind", _along(1, 0)),
    _each("chunk split tensor_split", _along(2, 0)),
    _each("permute transpose swapaxes swapdims movedim moveaxis", _anyhow),
    _each(RESHAPES, _anyhow),
    _each("pad constant_pad_nd", _padded),
    _each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", _undropped),
    _each("requires_grad_", _anyhow),
):
    _CHECKS.update(found)
_CHECKS[F.normalize] = _along(2, 1)
_CHECKS[Tensor.__getitem__] = _indexed
