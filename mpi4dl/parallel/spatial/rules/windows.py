"""What all sliding windows share: their arguments as pairs, and which axes of a tensor they slide along."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl.geometry import BATCH, COLS, ROWS, AxisMap
from mpi4dl.parallel.spatial.halo import Reach, reach
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal

IMAGE_AXES = (ROWS, COLS)


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """An argument that PyTorch lets one give once, or for height and width."""
    if isinstance(value, int):
        return value, value
    if len(value) == 1:
        return value[0], value[0]
    return value[0], value[1]


def check_image(x: Tensor, function: str) -> SpatialTensor:
    """x, if its last two dims are height and width and a batch that is cut is its first; refuse it otherwise."""
    if not isinstance(x, SpatialTensor):
        raise refusal(function, "an argument other than the input is a SpatialTensor")
    expected = {BATCH: 0, ROWS: x.dim() - 2, COLS: x.dim() - 1}
    if any(dim not in (None, expected[axis]) for axis, dim in enumerate(x.layout.dims)):
        raise refusal(function, f"it slides along the last two dims, but batch, height, width are {x.layout.dims}")
    return x


def slide(x: SpatialTensor, windows: tuple[AxisMap, AxisMap], fill: float = 0.0) -> tuple[Reach, tuple[bool, bool]]:
    """What a window that slides along height and width reaches, and whether each is left to the operator itself.

    An axis that is not cut is: there the operator adds its own padding, and nothing is copied.
    """
    own = (not x.layout.cut(x.dim() - 2), not x.layout.cut(x.dim() - 1))
    maps = {axis: window for axis, window in zip(IMAGE_AXES, windows, strict=True) if x.layout.dims[axis] is not None}
    uncut = tuple(axis for axis, itself in zip(IMAGE_AXES, own, strict=True) if itself and axis in maps)
    return reach(x, maps, fill, uncut), own


def output_shape(reached: Reach, x: Tensor, windows: tuple[AxisMap, AxisMap], channels: int | None = None) -> list[int]:
    """The shape of the local output of an operator with these windows."""
    shape = list(x.shape)
    if channels is not None:
        shape[-3] = channels
    for dim, axis, window in zip((-2, -1), IMAGE_AXES, windows, strict=True):
        split = reached.output.held[axis]
        present = reached.output.dims[axis] is not None
        shape[dim] = split.length if present else window.output_size(x.shape[dim])
    return shape


def cast(*tensors: Tensor | None) -> list[Any]:
    """Tensors in the dtype that autocast wants for convolutions and matrix products; as they are without autocast."""
    kind = next(t for t in tensors if t is not None).device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    eligible = (torch.float32, torch.float16, torch.bfloat16)  # float64 stays, as in PyTorch
    return [t.to(dtype) if t is not None and t.dtype in eligible else t for t in tensors]


def in_plain_dtype(x: SpatialTensor, probe: Callable[[Tensor], Tensor]) -> SpatialTensor:
    """x in the dtype in which autocast would let PyTorch's operator work; `probe` calls it with an image of 2x2 px."""
    kind = x.local.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    dtype = probe(torch.ones(1, 1, 2, 2, dtype=x.dtype, device=x.device)).dtype
    return x if dtype == x.dtype else SpatialTensor(x.local.to(dtype), x.layout)
