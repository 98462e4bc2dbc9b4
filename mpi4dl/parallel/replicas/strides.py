"""Flat memory seen as a parameter, in the order in memory that the parameter itself has, such as channels last.

Fused optimizers walk through a parameter, its gradient and their state side by side, whatever the strides of each are.
"""

import torch
from torch import Tensor


def strides_of(value: Tensor) -> tuple[int, ...]:
    """Those of a tensor that fills its memory without gaps, in any order of its dims; for others, the plain ones."""
    length = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != length:
            return torch.empty(value.shape, device="meta").stride()
        length *= size
    return value.stride()


def seen_as(flat: Tensor, like: Tensor) -> Tensor:
    """As many elements of flat memory in the shape and the strides of a parameter; what is flat stays so."""
    return flat.as_strided(like.shape, strides_of(like))


def laid_out(value: Tensor, like: Tensor) -> Tensor:
    """These values in the shape and the strides of a parameter, in new memory."""
    found = torch.empty_strided(like.shape, strides_of(like), dtype=value.dtype, device=like.device)
    return found.copy_(value.view(like.shape))
