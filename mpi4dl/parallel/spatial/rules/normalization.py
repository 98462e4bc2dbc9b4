"""Batch, group, instance, layer and root-mean-square norm with the statistics of the whole image."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from mpi4dl.geometry import BATCH, Tiling, widest
from mpi4dl.parallel.spatial.foresight import Source
from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import gather
from mpi4dl.parallel.spatial.rules.channels import as_own, of_channels, own_channels
from mpi4dl.parallel.spatial.rules.moments import Norm, WaitingNorm, may_wait, normalize, sharers
from mpi4dl.parallel.spatial.rules.windows import in_plain_dtype
from mpi4dl.parallel.spatial.sums import shared, with_all_features
from mpi4dl.parallel.spatial.tensor import SpatialTensor, refusal, register, wrap


@register(F.batch_norm)
def batch_norm(
    input: SpatialTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if shared(input, 1):
        return _batch_norm_of_own(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.batch_norm", "dim 1 is not the channels here")
    layout, x = input.layout, input.local
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return wrap(F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), layout)
    foresight = layout.grid.foresight
    owned = layout.narrow.tiling
    held = foresight.held(weight, owned)
    norm = layout.known((batch_norm, x.shape, eps, held), lambda: _norm(layout, x.shape, eps, held))
    if norm.count < 2 and not x.is_meta:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    result = SpatialTensor.promise(x, norm.output, needs_gradient)

    def done(y: Tensor, moments: Tensor) -> None:
        result.fulfil(y)
        for running, known in ((running_mean, moments[0]), (running_var, moments[2])):
            if running is not None:
                running.detach().lerp_(known.to(running.dtype), momentum)

    patient = foresight.reached(weight)
    if (patient or foresight.waiting) and may_wait(foresight, x, weight, bias):
        foresight.wait(WaitingNorm(norm, x, weight, bias, done, x._version))
        result.before_first_look(foresight.pay)
        if not patient:
            foresight.pay()
    else:
        done(*normalize(norm, x, weight, bias))
    if weight is None:
        return result
    if not patient:
        result.before_first_look(partial(foresight.seen, weight))
    result.providers = (Source(foresight, weight, owned),)
    return result


def _batch_norm_of_own(
    input: SpatialTensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any
) -> Tensor:
    """Of channels that ranks share: every rank has the running statistics of all of them."""
    grid, split = input.layout.grid, input.layout.tiling.splits[-1]
    mine = input.layout.owned[-1]
    weight, bias, training, *rest = args
    running = [known for known in (running_mean, running_var) if known is not None]
    own = [of_channels(x, mine) for x in (running_mean, running_var, weight, bias)]
    normalized: Tensor = F.batch_norm(own_channels(input), *own, training, *rest)  # type: ignore[call-arg, arg-type]
    y = as_own(normalized, grid, split, 1)
    if training and running:
        told = torch.stack([known[mine.start : mine.stop] for known in running])
        every = gather(as_own(told, grid, split, 1))
        for known, found in zip(running, every, strict=True):
            known.detach().copy_(found)
    return y


def _norm(layout: Layout, shape: Sequence[int], eps: float, held: Tiling) -> Norm:
    """A batch norm of tensors of this layout and local shape, of which at least that is to be held."""
    others = math.prod(n for d, n in enumerate(shape) if d != 1 and d not in layout.dims)
    output = replace(layout, tiling=widest(layout.tiling, held))
    return Norm(layout, layout.grid.the_one(output), sharers(layout, layout.grid.axes, others), eps)


@register(torch.batch_norm)
def torch_batch_norm(
    input: SpatialTensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any
) -> Tensor:
    """The same with its arguments in another order."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, *rest)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...] | None) -> Tensor:
    """y * weight + bias, which may be seen in another shape, in the dtype of y, which may have fewer bits than they."""
    dtype = y.dtype
    if weight is not None:
        y = y * (weight if shape is None else weight.view(shape))
    if bias is not None:
        y = y + (bias if shape is None else bias.view(shape))
    return y.to(dtype)


@register(F.group_norm, torch.group_norm)
def group_norm(
    input: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Statistics over the channels of a group and the whole image, for each sample."""
    if shared(input, 1):
        return _group_norm_of_own(input, num_groups, weight, bias, eps)
    input = in_plain_dtype(input, lambda image: F.group_norm(image, 1))
    return _by_sample(input, num_groups, weight, bias, eps, "torch.nn.functional.group_norm")[0]


def _group_norm_of_own(
    input: SpatialTensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Of channels that ranks share: each rank's own groups, unless the channels are cut within one."""
    split, mine = input.layout.tiling.splits[-1], input.layout.owned[-1]
    size = max(1, input.shape[1] // num_groups)
    if any(cut % size for cut in split.cuts):
        return F.group_norm(with_all_features(input), num_groups, weight, bias, eps)
    own = F.group_norm(
        own_channels(input), mine.length // size, of_channels(weight, mine), of_channels(bias, mine), eps
    )
    return as_own(own, input.layout.grid, split, 1)


@register(F.instance_norm)
def instance_norm(
    input: SpatialTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if shared(input, 1):
        whole = with_all_features(input)
        return F.instance_norm(whole, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    y, moments = _by_sample(input, input.shape[1], weight, bias, eps, "torch.nn.functional.instance_norm")
    if running_mean is not None:
        _track(input.layout, (running_mean, running_var), moments, momentum)
    return y


def _track(layout: Layout, running: tuple[Tensor, Tensor | None], moments: Tensor, momentum: float) -> None:
    """Running statistics of instance norm: the means, over the batch, of each sample's mean and unbiased variance."""
    channels = running[0].shape[0]
    values = moments[:3:2].view(2, -1, channels)
    samples = torch.full((2, 1, channels), float(values.shape[1]), dtype=values.dtype, device=values.device)
    sums = torch.cat([values.sum(1, keepdim=True), samples], 1)
    if layout.cut(0):
        sums = layout.grid.along((BATCH,)).all_reduce(sums)
    with torch.no_grad():
        for buffer, (total, number) in zip(running, sums, strict=True):
            if buffer is not None:
                buffer.mul_(1 - momentum).add_((total / number).to(buffer.dtype), alpha=momentum)


def _by_sample(
    x: SpatialTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
) -> tuple[Tensor, Tensor]:
    """The normalized image; mean, biased and unbiased variance of each sample's groups, in this order, as rows."""
    if x.layout.axis(1) is not None or x.layout.dims[BATCH] not in (None, 0):
        raise refusal(name, "dims 0 and 1 are not batch and channels here")
    if x.shape[1] % groups:
        raise ValueError(f"`num_channels` (={x.shape[1]}) must be divisible by `num_groups` (={groups})")
    layout, local = x.layout, x.local
    n, c, *space = local.shape
    rows = local.reshape(1, n * groups, c // groups, *space)
    others = [n for d, n in enumerate(local.shape) if d > 1 and d not in layout.dims]
    # Of rows, samples and groups are the channels, and what is behind them has moved by one.
    inner = layout.grid.the_one(layout.with_dims(None if not dim else dim + 1 for dim in layout.dims))
    norm = Norm(inner, inner, sharers(layout, layout.grid.space, c // groups * math.prod(others)), eps)
    y, moments = normalize(norm, rows, None, None)
    y = _affine(wrap(y.view(local.shape), x.layout), weight, bias, (1, -1, *[1] * (x.dim() - 2)))
    return y, moments


@register(F.local_response_norm)
def local_response_norm(input: SpatialTensor, size: int, *args: Any, **kwargs: Any) -> Tensor:
    """Over neighbouring channels, the same for every pixel."""
    if input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.local_response_norm", "dim 1 is not the channels here")
    return wrap(F.local_response_norm(input.local, size, *args, **kwargs), input.layout)


@register(F.layer_norm, torch.layer_norm, flat=True)
def layer_norm(
    input: SpatialTensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    """Local where the normalized dims are not cut, as in ConvNeXt; where they are, a root mean square of deviations."""
    last = _last_dims(input, normalized_shape)
    if not any(input.layout.cut(dim) for dim in last):
        return wrap(F.layer_norm(input.local, normalized_shape, weight, bias, eps), input.layout)
    input = in_plain_dtype(input, lambda image: F.layer_norm(image, image.shape[-1:]))
    x = input.float() if input.itemsize < 4 else input
    return _affine(_by_root_mean_square(x - x.mean(tuple(last), True), last, eps), weight, bias, None).to(input.dtype)


@register(F.rms_norm, torch.rms_norm, flat=True)
def rms_norm(
    input: SpatialTensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    last = _last_dims(input, normalized_shape)
    if not any(input.layout.cut(dim) for dim in last):
        return wrap(F.rms_norm(input.local, normalized_shape, weight, eps), input.layout)
    input = in_plain_dtype(input, lambda image: F.rms_norm(image, image.shape[-1:]))
    x = input.float() if input.itemsize < 4 else input
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_by_root_mean_square(x, last, eps), weight, None, None).to(input.dtype)


def _last_dims(x: Tensor, normalized_shape: Sequence[int]) -> range:
    last = range(x.dim() - len(normalized_shape), x.dim())
    if tuple(normalized_shape) != tuple(x.shape[last.start :]):
        raise RuntimeError(f"normalized_shape={list(normalized_shape)} does not fit a tensor of {tuple(x.shape)}")
    return last


def _by_root_mean_square(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    return x * ((x * x).mean(tuple(dims), True) + eps).rsqrt()


def right_gradients(model: nn.Module) -> None:
    """Let batch norms on plain tensors hand their kernel gradients that it reads right.

    On CPUs PyTorch's kernel misreads the gradient of one image whose strides say that its channels come last, as behind
    `flatten(2).transpose(1, 2)` and a linear layer. A copy in the usual order is read right.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _of_one_image not in module._forward_hooks.values():
            module.register_forward_hook(_of_one_image)


def _of_one_image(module: nn.Module, inputs: Any, output: Any) -> None:
    plain = isinstance(output, Tensor) and not isinstance(output, SpatialTensor)
    if plain and output.dim() > 2 and output.shape[0] == 1 and output.requires_grad and output.device.type == "cpu":
        output.register_hook(Tensor.contiguous)
