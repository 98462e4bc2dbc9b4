"""Backward passes of convolutions and batch norms on CPUs, where PyTorch's kernels, as of 2.13, are wrong.

PyTorch calls these in place of its own as soon as this module is imported. So they hold for every layer: on tiles, on
what is not cut, in streaming.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Like

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
OF_CONVOLUTION = torch.library.get_kernel("aten::convolution_backward", "CPU")
OF_BATCH_NORM = torch.library.get_kernel("aten::native_batch_norm_backward", "CPU")
FEW_BITS = torch.bfloat16, torch.float16


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *numbers: Any
) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward` by none of those kernels of oneDNN that use memory beside an image.

    They do for the gradient of the weight where an image is narrower than a stride or a kernel, in volumes in float32
    and in all of 16 bits, there also by dilated kernels: numbers come from what that memory held, or the process dies.
    """
    stride, padding, dilation, transposed, _, groups, mask = numbers
    few = weight.dtype in FEW_BITS
    image, outputs = (gradient, x) if transposed else (x, gradient)
    sides = list(zip(image.shape[2:], weight.shape[2:], stride, strict=True))
    fits = all(n >= k + step - 1 for n, k, step in sides) and not (few and max(dilation) > 1)
    known = few or (weight.dtype == torch.float32 and image.dim() == 5)
    if fits or not known or not any(mask[1:]):
        return OF_CONVOLUTION.call_boxed(CPU, gradient, x, weight, bias_sizes, *numbers)
    found: list[Tensor | None] = [None] * 3
    if mask[0]:  # asked for a bias, oneDNN finds the weight's too
        only = [True, False, False]
        found[0] = OF_CONVOLUTION.call_boxed(CPU, gradient, x, weight, None, *numbers[:-1], only)[0]
    if mask[1]:
        amounts: list[int] = []  # of pixels around the image, so that kernels fit into it
        for (n, k, step), m, before, apart in zip(sides, outputs.shape[2:], padding, dilation, strict=True):
            read = max((m - 1) * step + (k - 1) * apart + 1, step)
            amounts = [before, read - n - before, *amounts]
        none, only = [0] * len(sides), [False, True, False]
        wide = outputs.float(), F.pad(image.float(), amounts), weight.float()
        plain = OF_CONVOLUTION.call_boxed(CPU, *wide, None, stride, none, dilation, False, none, groups, only)
        found[1] = plain[1].to(weight.dtype)
    if mask[2]:
        every = [dim for dim in range(gradient.dim()) if dim != 1]
        found[2] = gradient.sum(every, dtype=torch.float32).to(gradient.dtype)
    return tuple(found)


def batch_norm_backward(gradient: Tensor, x: Tensor, *more: Any) -> tuple[Any, ...]:
    """`aten::native_batch_norm_backward` of tensors whose dims of one entry have the strides of their memory format.

    The kernel finds the format of its arguments by those strides, too. Where it finds other ones for a gradient and an
    image than they have, its results are wrong: behind `flatten(2).transpose(1, 2)` and a linear layer, of one image.
    """
    if 1 in x.shape and gradient.stride() != x.stride():
        gradient, x = _settled(gradient), _settled(x)
    return OF_BATCH_NORM.call_boxed(CPU, gradient, x, *more)


@lru_cache(maxsize=4096)
def _usual_strides(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _settled(x: Tensor) -> Tensor:
    like = Like.of(x).memory_format
    if not x.is_contiguous(memory_format=like):
        return x
    strides = _usual_strides(x.shape, like)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def _in_place_of_pytorchs() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that kernels are replaced
        library.impl("convolution_backward", convolution_backward, "CPU")
        library.impl("native_batch_norm_backward", batch_norm_backward, "CPU")
    return library


OURS = _in_place_of_pytorchs()  # as long as it is kept
