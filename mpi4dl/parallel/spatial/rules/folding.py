"""Columns folded into an image, where each adds its window: the adjoint of unfolding.

    columns    rank 0: a b c     rank 1: d e f       each rank adds up its own windows, in a patch
    patches    [ a  b  c ]                           that reaches over the border of what it owns;
                    [ d  e  f ]                      what lies there is sent to its owner, who adds it:
    image      [ . . . . | . . . . ]                 the adjoint of a halo exchange

What is sent are pixels of the image, and not columns, which are a kernel's size as many.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import collectives
from mpi4dl.geometry import Split, TransposedWindow, Window, plan_axis
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import without_flat_dims
from mpi4dl.parallel.spatial.memory import same_memory
from mpi4dl.parallel.spatial.rules.windows import axes_of, check_image, each
from mpi4dl.parallel.spatial.tensor import SpatialTensor, owned, register, wrap

Size = int | tuple[int, ...]


@register(F.fold, flat=True)
def fold(
    input: SpatialTensor, output_size: Size, kernel_size: Size, dilation: Size = 1, padding: Size = 0, stride: Size = 1
) -> Tensor:
    """The sums of all windows, (N, C * kernel, L) -> (N, C, H, W), cut where the windows of each rank are."""
    arguments = output_size, kernel_size, dilation, padding, stride
    F.fold(torch.empty(input.shape, dtype=input.dtype, device="meta"), *arguments)  # raises what PyTorch does
    if input.dim() == 2:
        return F.fold(input.unsqueeze(0), *arguments).squeeze(0)
    size = each(output_size, 2)
    numbers = list(zip(*(each(n, 2) for n in (kernel_size, stride, padding, dilation)), strict=True))
    counts = [Window(k, s, p, p, d).output_size(n) for n, (k, s, p, d) in zip(size, numbers, strict=True)]
    columns = without_flat_dims(input.unflatten(2, counts))  # (N, C * kernel, H', W')
    if not isinstance(columns, SpatialTensor):
        return F.fold(columns.flatten(2), *arguments)
    x = check_image(columns, "torch.nn.functional.fold")
    grid, source = x.layout.grid, x.layout.tiling.narrow
    image = patches = source
    # Of this rank's patch. It holds what of its windows lies in the padding, too, where the exchange leaves it.
    lengths, around = list(size), list(each(padding, 2))
    for i, (axis, (k, s, p, d)) in enumerate(zip(axes_of(x, 2), numbers, strict=True)):
        if axis is None:
            continue
        spare = size[i] - TransposedWindow(k, s, p, 0, d).output_size(counts[i])
        window, split = TransposedWindow(k, s, p, spare, d), source.splits[axis]
        image = image.replace(axis, Split.at(plan_axis(window, split).output.cuts))
        if grid.shape[axis] == 1:
            patches = patches.replace(axis, image.splits[axis])
            continue
        reached = tuple(window.adds_to(split.owned(part)) for part in range(split.parts))
        patches = patches.replace(axis, Split(image.splits[axis].cuts, reached))
        lengths[i], around[i] = reached[grid.coordinates[axis]].length, 0
    y, layout = _summed(owned(x), lengths, numbers, around), Layout(grid, image, x.layout.dims)
    if patches == image:
        return wrap(y, layout)
    halo = layout.exchange_to(patches)

    def add_up(patch: Tensor) -> Tensor:
        total = halo.adjoint.bring(patch)
        return total.clone() if same_memory(total, patch) else total  # autograd would take it for a view

    return wrap(collectives.linear(y, add_up, halo.bring), layout)


def _summed(columns: Tensor, size: Sequence[int], numbers: Sequence[tuple[int, ...]], padding: Sequence[int]) -> Tensor:
    """This rank's patch, from its columns (N, C * kernel, H', W'); PyTorch's own fails where there are none."""
    kernel, stride, _, dilation = zip(*numbers, strict=True)
    if columns.numel() == 0:
        n, channels = columns.shape[:2]
        return columns.new_zeros(n, channels // prod(kernel), *size) * columns.sum()
    return F.fold(columns.flatten(2), tuple(size), kernel, dilation, tuple(padding), stride)
