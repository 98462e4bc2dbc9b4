"""Counts of values, such as the loads of experts: each rank counts its own pixels, and counts are added up."""

from typing import Any

import torch
from torch import Tensor

from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.rules.reductions import total
from mpi4dl.parallel.spatial.tensor import SpatialTensor, named, register


@register(*named("histc"), flat=True)
def histc(input: SpatialTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    if min == max and input.numel():  # between the extrema of all ranks
        min, max = (float(gather(end) if isinstance(end, SpatialTensor) else end) for end in torch.aminmax(input))

    def count(part: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.histc(part, bins, min, max)

    return total(input, range(input.dim()), False, add=count)


@register(*named("bincount"), flat=True)
def bincount(input: SpatialTensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if input.dim() != 1 or weights is not None or not input.numel():
        weights = gather(weights) if isinstance(weights, SpatialTensor) else weights
        return torch.bincount(gather(input), weights, minlength)
    largest = input.max()
    length = max(minlength, 1 + int(gather(largest) if isinstance(largest, SpatialTensor) else largest))

    def count(part: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.bincount(part, minlength=length)

    return total(input, (0,), False, add=count)
