"""What all sliding windows share: their arguments for each dim, and which axes of a tensor they slide along.

Windows slide along the last dims of a tensor: one of sequences, two of images, three of volumes.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm.exchange import Dims
from mpi4dl.geometry import BATCH, AxisMap, Interval
from mpi4dl.parallel.spatial.halo import Reach, reach
from mpi4dl.parallel.spatial.sums import shared
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal


def each(value: Any, count: int) -> tuple[Any, ...]:
    """An argument that PyTorch lets one give once, or for each of so many dims."""
    if not isinstance(value, Sequence):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value[:count])


def hashable(value: Any) -> Any:
    """The same argument, such as a list of numbers, as something that can be looked up by."""
    return tuple(value) if isinstance(value, list) else value


def check_image(x: Tensor, function: str, count: int = 2, each_channel: bool = False) -> SpatialTensor:
    """x, if windows along its last `count` dims are along axes of space, and no other dim is one; refuse it otherwise.

    A batch that is cut is the first dim. What treats `each_channel` alone takes those that ranks share too.
    """
    if not isinstance(x, SpatialTensor):
        raise refusal(function, "an argument other than the input is a SpatialTensor")
    layout, first = x.layout, x.dim() - count
    dims = layout.dims[:-1] if each_channel and shared(x, first - 1) else layout.dims
    if not layout.known((check_image, first, each_channel), lambda: _slides(dims, first)):
        raise refusal(
            function, f"it slides along the last {count} dims, but those of {layout.grid.names} are {layout.dims}"
        )
    return x


def _slides(dims: Dims, first: int) -> bool:
    return not any(
        dim is not None and (dim != 0 or first == 0 if axis == BATCH else dim < first) for axis, dim in enumerate(dims)
    )


def axes_of(x: SpatialTensor, count: int) -> tuple[int | None, ...]:
    """The axes that the last `count` dims of x are."""
    return _axes_of(x.layout.dims, x.local.dim(), count)


@lru_cache(maxsize=1024)
def _axes_of(dims: Dims, ndim: int, count: int) -> tuple[int | None, ...]:
    return tuple(dims.index(dim) if dim in dims else None for dim in range(ndim - count, ndim))


def slide(x: SpatialTensor, windows: Sequence[AxisMap], fill: float = 0.0) -> tuple[Reach, tuple[bool, ...]]:
    """What windows that slide along the last dims reach, and whether each is left to the operator itself.

    An axis that is not cut is: there the operator adds its own padding, and nothing is copied.
    """
    axes, parts = axes_of(x, len(windows)), x.layout.grid.shape
    own = tuple(axis is None or parts[axis] == 1 for axis in axes)
    maps = {axis: window for axis, window in zip(axes, windows, strict=True) if axis is not None}
    uncut = tuple(axis for axis, itself in zip(axes, own, strict=True) if itself and axis is not None)
    return reach(x, maps, fill, uncut), own


def output_spans(reached: Reach, x: SpatialTensor, windows: Sequence[AxisMap]) -> list[Interval]:
    """Which rows along each of its last dims this rank's part of the output of an operator with these windows holds."""
    held, axes = reached.output.held, axes_of(x, len(windows))
    return [
        Interval(0, window.output_size(x.local.shape[dim])) if axis is None else held[axis]
        for dim, (axis, window) in enumerate(zip(axes, windows, strict=True), -len(windows))
    ]


def output_shape(
    reached: Reach, x: SpatialTensor, local: Tensor, windows: Sequence[AxisMap], channels: int | None = None
) -> list[int]:
    """The shape of the local output of an operator with these windows over `local`, the part of x."""
    count = len(windows)
    before = list(local.shape[: local.dim() - count])
    if channels is not None:
        before[-1] = channels
    return [*before, *(span.length for span in output_spans(reached, x, windows))]


def places_of(indices: Tensor, size: Sequence[int]) -> list[Tensor]:
    """Where pixels of these numbers are in an image of such a size: their row, column and the like."""
    places = []
    for length in reversed(size[1:]):
        places.append(indices % length)
        indices = indices // length
    return [indices, *reversed(places)]


def flat_index(places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """The numbers of the pixels at these places, as they are counted in an image of such a size."""
    found = places[0]
    for at, length in zip(places[1:], size[1:], strict=True):
        found = found * length + at
    return found


def cast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype that autocast wants for convolutions and matrix products; as they are without autocast."""
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)  # float64 stays, as in PyTorch
    return [t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors]


def in_plain_dtype(x: SpatialTensor, probe: Callable[[Tensor], Tensor], count: int = 2) -> SpatialTensor:
    """x in the dtype in which autocast would let PyTorch's operator work; `probe` calls it with an image of 2x2 px.

    The image has `count` dims of space.
    """
    kind = x.local.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    dtype = probe(torch.ones(1, 1, *(2,) * count, dtype=x.dtype, device=x.device)).dtype
    return x if dtype == x.dtype else SpatialTensor(x.local.to(dtype), x.layout)
