"""Kernels on CPUs in place of PyTorch's, as of 2.13: of convolutions and batch norms, backward, and of volumes in 16
bits, forward, which are wrong there; and of max pooling and of convolutions by one pixel, which are slow.

PyTorch calls these in place of its own as soon as this module is imported. So they hold for every layer: on tiles, on
what is not cut, in streaming.
"""

import warnings
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm.exchange import Like

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
OF_CONVOLUTION = torch.library.get_kernel("aten::convolution_backward", "CPU")
OF_VOLUMES = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("conv3d", "conv3d.padding")}
OF_BATCH_NORM = torch.library.get_kernel("aten::native_batch_norm_backward", "CPU")
OF_MAX_POOLS = {n: torch.library.get_kernel(f"aten::max_pool{n}d_with_indices", "CPU") for n in (2, 3)}
OF_ONE_THREAD = torch.library.get_kernel("aten::_slow_conv2d_forward", "CPU")
WORTH_ONEDNN = 1 << 22  # multiplications
FEW_BITS = torch.bfloat16, torch.float16


def _better_dilated(x: Tensor, weight: Tensor) -> bool:
    """Whether a kernel of one pixel, to which dilation means nothing, is to say that it is dilated.

    PyTorch then takes it to oneDNN in a process of one thread too, and not to an older kernel, which takes twice the
    time, or, of little work, half of it.
    """
    single = weight.dtype == torch.float32 and weight.shape[2:] in ((1,), (1, 1))
    return single and x.numel() * weight.shape[0] >= WORTH_ONEDNN


def convolution_of_one_thread(
    x: Tensor, weight: Tensor, kernel: list[int], bias: Tensor | None, *numbers: list[int]
) -> Tensor:
    """`aten::_slow_conv2d_forward`, by oneDNN where that is faster."""
    if not _better_dilated(x, weight):
        return OF_ONE_THREAD.call_boxed(CPU, x, weight, kernel, bias, *numbers)
    return torch.ops.aten.convolution(x, weight, bias, *numbers, [2, 2], False, [0, 0], 1)


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, *numbers: Any
) -> tuple[Tensor | None, ...]:
    """`aten::convolution_backward` by none of those kernels of oneDNN that use memory beside an image.

    They do for the gradient of the weight where an image is narrower than a stride or a kernel, in volumes in float32
    and in all of 16 bits, there also by dilated kernels: numbers come from what that memory held, or the process dies.
    """
    stride, padding, dilation, transposed, _, groups, mask = numbers
    if weight.shape[2:].numel() == 1 and not transposed and _better_dilated(x, weight):
        numbers = (*numbers[:2], [2] * len(dilation), *numbers[3:])
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


def convolution_of_volumes(name: str, *tensors: Any) -> Tensor:
    """`aten::conv3d` by none of those kernels of 16 bits that use memory beside an image, as of one slice."""
    x = tensors[0]
    if x.device.type != "cpu" or x.dtype not in FEW_BITS or 1 not in x.shape[2:]:
        return OF_VOLUMES[name].call_boxed(CPU, *tensors)
    wide = [y.to(torch.float32, memory_format=torch.contiguous_format) if isinstance(y, Tensor) else y for y in tensors]
    return OF_VOLUMES[name].call_boxed(CPU, *wide).to(x.dtype)


def batch_norm_backward(gradient: Tensor, x: Tensor, *more: Any) -> tuple[Any, ...]:
    """`aten::native_batch_norm_backward` of tensors whose dims of one entry have the strides of their memory format.

    The kernel finds the format of its arguments by those strides, too. Where it finds other ones for a gradient and an
    image than they have, its results are wrong: behind `flatten(2).transpose(1, 2)` and a linear layer, of one image.
    """
    if 1 in x.shape and gradient.stride() != x.stride():
        gradient, x = _settled(gradient), _settled(x)
    return OF_BATCH_NORM.call_boxed(CPU, gradient, x, *more)


CHANNELS = 16  # that are pooled at once
WORTH, AT_ONCE = 1 << 13, 1 << 20  # pixels


def max_pool(dims: int, x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """`aten::max_pool2d_with_indices`, or that of 3 dims, of few channels at a time as channels last.

    The results are PyTorch's, to the bit. Its kernel looks at contiguous images pixel by pixel, and at many channels
    together where they are last: with both copies that takes a third of the time.
    """
    kernel, (samples, channels) = OF_MAX_POOLS[dims].call_boxed, x.shape[:2]
    large = x.dim() == dims + 2 and channels >= CHANNELS and x.numel() >= WORTH
    if not (large and x.is_floating_point() and x.is_contiguous()):
        return kernel(CPU, x, *options)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    of_none = kernel(CPU, x[:0], *options)  # which raises what PyTorch raises
    results = [each.new_empty((samples, *each.shape[1:])) for each in of_none]
    many = max(1, AT_ONCE // x[0, :CHANNELS].numel())
    for first in range(0, samples, many):
        for channel in range(0, channels, CHANNELS):
            part = np.s_[first : first + many, channel : channel + CHANNELS]
            pooled = kernel(CPU, x[part].contiguous(memory_format=last), *options)
            for result, of_part in zip(results, pooled, strict=True):
                result[part] = of_part
    return results[0], results[1]


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
        for name in OF_VOLUMES:
            library.impl(name, partial(convolution_of_volumes, name), "CompositeImplicitAutograd")
        library.impl("native_batch_norm_backward", batch_norm_backward, "CPU")
        library.impl("_slow_conv2d_forward", convolution_of_one_thread, "CPU")
        for dims in OF_MAX_POOLS:
            library.impl(f"max_pool{dims}d_with_indices", partial(max_pool, dims), "CPU")
    return library


OURS = _in_place_of_pytorchs()  # as long as it is kept
