"""Losses of dense predictions: each rank's own pixels, then the sum or mean over the whole image."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.rules.pointwise import align
from mpi4dl.parallel.spatial.rules.reductions import mean, reduced_layout, sum_
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, refusal, register, wrap


def _reduce(pixels: Tensor, reduction: str) -> Tensor:
    if reduction == "none" or not isinstance(pixels, SpatialTensor):
        return pixels if reduction == "none" else getattr(pixels, reduction)()
    return mean(pixels) if reduction == "mean" else sum_(pixels)


def _elementwise(function: Any) -> Any:
    def rule(input: Tensor, target: Tensor, *args: Any, reduction: str = "mean", **kwargs: Any) -> Tensor:
        old = kwargs.get("reduce") is not None or kwargs.get("size_average") is not None
        if old or any(isinstance(a, bool | str) for a in args):
            raise refusal(function_name(function), "pass its options by name")
        if kwargs.get("weight") is not None or kwargs.get("pos_weight") is not None:
            raise refusal(function_name(function), "weights are not supported")
        (a, b), layout = align([input, target], function_name(function))
        return _reduce(wrap(function(a, b, *args, reduction="none", **kwargs), layout), reduction)

    return rule


for function in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
):
    register(function)(_elementwise(function))


@register(F.cross_entropy)
def cross_entropy(
    input: SpatialTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Over class indices (N, H, W), plain or spread; the mean is over pixels that are not ignored, by weight."""
    if not isinstance(input, SpatialTensor) or input.layout.axis(1) is not None:
        raise refusal("torch.nn.functional.cross_entropy", "dim 1 is not the classes here")
    if size_average is not None or reduce is not None:
        raise refusal("torch.nn.functional.cross_entropy", "use reduction= instead of size_average= and reduce=")
    if target.is_floating_point() or label_smoothing:
        raise refusal("torch.nn.functional.cross_entropy", "class probabilities and label smoothing are not supported")
    layout = reduced_layout(input.layout, [1], False)
    like = wrap(input.local.detach().select(1, 0), layout)
    (_, classes), common = align([like, target], "torch.nn.functional.cross_entropy")
    if common != layout:
        raise refusal("torch.nn.functional.cross_entropy", "input and target hold different pixels")
    pixels = wrap(F.cross_entropy(input.local, classes, weight, ignore_index=ignore_index, reduction="none"), layout)
    if reduction != "mean":
        return _reduce(pixels, reduction)
    counted = classes != ignore_index
    if weight is None:
        shares = counted.to(pixels.dtype)
    else:
        shares = torch.where(counted, weight[torch.where(counted, classes, 0)], 0)
    return _reduce(pixels, "sum") / _reduce(wrap(shares, layout), "sum")
