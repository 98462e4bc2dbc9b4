"""Losses of vectors: how near two of them are, what each of their labels says; made of operators that have rules."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.rules.losses import asked, check_shapes, reduce_pixels
from mpi4dl.parallel.spatial.tensor import register


@register(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The mean over the last dim, of classes, then over all else."""
    of_each = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    of_each = (of_each if weight is None else of_each * weight).mean(-1)
    return reduce_pixels(of_each, asked(size_average, reduce, reduction))


@register(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=partial(F.pairwise_distance, p=p, eps=eps),
        margin=margin,
        swap=swap,
        reduction=asked(size_average, reduce, reduction),
    )


@register(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """How much nearer than the negative the positive is not, by the margin."""
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.dim() == positive.dim() == negative.dim():
        raise RuntimeError("the anchor, the positive and the negative tensor must have the same number of dimensions")
    distance = distance_function or F.pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return reduce_pixels((margin + near - far).clamp_min(0), reduction)


@register(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """1 less the cosine where the target is 1, what the cosine has over the margin where it is -1."""
    check_shapes(F.cosine_embedding_loss, {"input1": input1, "input2": input2, "target": target, "margin": margin})
    dim, tiny = target.dim(), 1e-12
    lengths = ((input1 * input1).sum(dim) + tiny) * ((input2 * input2).sum(dim) + tiny)
    cosine = (input1 * input2).sum(dim) / lengths.sqrt()
    of_each = torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return reduce_pixels(of_each, asked(size_average, reduce, reduction))
