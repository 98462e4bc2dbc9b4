"""Losses of dense predictions: a function of each pixel, then the sum or mean over the whole image.

The pixels are PyTorch's own function with reduction="none" on each rank's part; inputs, targets and weights broadcast
as they do on the whole. A loss over classes divides by the weights of the pixels that count.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.grid import Layout
from mpi4dl.parallel.spatial.halo import part
from mpi4dl.parallel.spatial.rules.contraction import contract
from mpi4dl.parallel.spatial.rules.pointwise import align, shift
from mpi4dl.parallel.spatial.rules.reductions import mean, reduced_layout, sum_
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, refusal, register, wrap


def reduce_pixels(pixels: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return pixels
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not isinstance(pixels, SpatialTensor):
        return getattr(pixels, reduction)()
    return mean(pixels) if reduction == "mean" else sum_(pixels)


def _reduction(options: dict[str, Any]) -> str:
    """The reduction by the options, the older two among them, which are set to None."""
    found = asked(options.get("size_average"), options.get("reduce"), options["reduction"])
    options |= {old: None for old in ("size_average", "reduce") if old in options}
    return found


def asked(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction that is meant, if the older two options are given too."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _by_pixel(function: Any) -> Callable[..., Tensor]:
    """A loss whose tensors, whatever their names, broadcast against each other."""
    signature, name = inspect.signature(function), function_name(function)

    def rule(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction = _reduction(options)
        options["reduction"] = "none"
        check_shapes(function, options)
        names = [key for key, value in options.items() if isinstance(value, Tensor)]
        parts, layout = align([options[key] for key in names], name)
        pixels = wrap(function(**options | dict(zip(names, parts, strict=True))), layout)
        if reduction == "mean" and function is F.mse_loss and options["weight"] is not None:
            return reduce_pixels(pixels, "sum") / reduce_pixels(options["weight"], "sum")
        if reduction == "batchmean":
            return sum_(pixels) / options["input"].shape[0]  # type: ignore[arg-type]
        return reduce_pixels(pixels, reduction)

    return rule


def check_shapes(function: Any, options: dict[str, Any]) -> None:
    """Let PyTorch refuse shapes, and warn of them, by the whole: parts might differ from rank to rank."""
    shapes = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for key, value in options.items()
        if isinstance(value, Tensor)
    }
    with torch._C.DisableTorchFunctionSubclass():
        function(**options | shapes)


for function in (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.soft_margin_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
):
    register(function)(_by_pixel(function))


@register(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """(log(v) + (x - t)^2 / v) / 2 with a variance v for each pixel, or one for several; v counts as eps at least."""
    if isinstance(var, Tensor):
        var = var.unsqueeze(-1) if var.shape == input.shape[:-1] and var.shape != input.shape else var
        others = [n for n, size in zip(var.shape, input.shape, strict=False) if n != size]
        if var.shape != input.shape and (var.dim() != input.dim() or sum(others) != 1):
            raise ValueError("var is of incorrect size")
    else:
        var = torch.full_like(input, var)
    if bool((var < 0).any()):
        raise ValueError("var has negative entry/entries")
    at_least = var + (var.detach().clamp(min=eps) - var.detach())  # whose derivative does not see the limit
    pixels = 0.5 * (at_least.log() + (input - target).square() / at_least)
    return reduce_pixels(pixels + 0.5 * log(2 * pi) if full else pixels, reduction)


def _over_classes(function: Any) -> Callable[..., Tensor]:
    """Cross entropy and its like: (N, classes, ...) against class indices, or something for each class."""
    signature, name = inspect.signature(function), function_name(function)

    def rule(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction = _reduction(options)
        options["reduction"] = "none"
        input, target = options["input"], options["target"]
        classes = 0 if input.dim() == 1 else 1
        listed = function is F.multilabel_margin_loss
        probable = listed or (target.is_floating_point() and input.shape == target.shape)
        expected = input.shape if probable else (*input.shape[:classes], *input.shape[classes + 1 :])
        if target.shape != expected:
            raise ValueError(f"expected a target of shape {tuple(expected)}, but got {tuple(target.shape)}")
        if function is F.cross_entropy and isinstance(input, SpatialTensor) and input.layout.cut(classes):
            if probable:
                raise refusal(name, "its targets are probabilities, of classes that ranks share")
            return _of_cut_classes(input, target, classes, reduction, options)
        layout = _layout(input, target, classes, probable, name)
        of_target = layout if probable else reduced_layout(layout, [classes], False)
        options["input"], options["target"] = part(input, layout), part(target, of_target)
        pixels = wrap(function(**options), reduced_layout(layout, [classes], False))
        if reduction != "mean" or probable or "ignore_index" not in options:
            return reduce_pixels(pixels, reduction)
        ignored, weight = options["target"] == options["ignore_index"], options["weight"]
        if weight is None:
            shares = (~ignored).to(pixels.dtype)
        else:
            shares = torch.where(ignored, 0, weight[torch.where(ignored, 0, options["target"])])
        return reduce_pixels(pixels, "sum") / reduce_pixels(wrap(shares, of_target), "sum")

    return rule


def _of_cut_classes(
    input: SpatialTensor, target: Tensor, classes: int, reduction: str, options: Mapping[str, Any]
) -> Tensor:
    """Cross entropy where each rank has some of the classes: what ranks tell each other is as large as the target.

    -log softmax(x)[t] = log(sum(exp(x))) - x[t], of which x[t] is the sum over ranks of what each has of it, or 0.
    """
    weight, smoothing = options["weight"], options["label_smoothing"]
    ignored = target == options["ignore_index"]
    asked_for = torch.where(ignored, 0, target)
    shares = torch.where(ignored, 0.0, 1.0 if weight is None else weight[asked_for]).to(input.dtype)
    log_sum = torch.logsumexp(input, classes)
    of_each = (log_sum - _chosen(input, asked_for, classes)) * shares
    if smoothing:
        alike = torch.ones(input.shape[classes], dtype=input.dtype, device=input.device) if weight is None else weight
        shape = [-1 if dim == classes else 1 for dim in range(input.dim())]
        smooth = log_sum * alike.sum() - (input * alike.view(shape)).sum(classes)
        smooth = torch.where(ignored, 0, smooth) / input.shape[classes]
        of_each = of_each * (1 - smoothing) + smooth * smoothing
    return of_each.sum() / shares.sum() if reduction == "mean" else reduce_pixels(of_each, reduction)


def _chosen(x: SpatialTensor, index: Tensor, dim: int) -> Tensor:
    """Of each place along `dim`, which ranks share, the value that `index` names."""
    labels = [f"dim {i}" for i in range(x.dim())]
    others = [label for i, label in enumerate(labels) if i != dim]
    axis = x.layout.axis(dim)
    assert axis is not None
    own = x.layout.owned[axis]

    def of_own(values: Tensor, wanted: Tensor) -> Tensor:
        inside = (wanted >= own.start) & (wanted < own.stop)
        if not own.length:
            return values.sum(dim)
        found = values.gather(dim, torch.where(inside, wanted - own.start, 0).unsqueeze(dim)).squeeze(dim)
        return torch.where(inside, found, 0)

    return contract("torch.nn.functional.cross_entropy", of_own, (x, index), [labels, others], others)


def _layout(input: Tensor, target: Tensor, classes: int, probable: bool, name: str) -> Layout:
    """The layout, with a dim of classes, that both come to: the input's, or the target's if the input is plain."""
    if isinstance(input, SpatialTensor):
        layout = input.layout
    else:
        assert isinstance(target, SpatialTensor)
        layout = target.layout if probable else replace(target.layout, dims=shift(target.layout.dims, classes, 1))
    if layout.axis(classes) is not None:
        raise refusal(name, f"dim {classes} is not the classes here")
    return layout.narrow


for over_classes in (F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.multilabel_margin_loss):
    register(over_classes)(_over_classes(over_classes))

# Losses of vectors: how near two of them are, what each of their labels says; made of operators that have rules.


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
