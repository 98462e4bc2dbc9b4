"""Losses of dense predictions: a function of each pixel, then the sum or mean over the whole image.

The pixels are PyTorch's own function with reduction="none" on each rank's part; inputs, targets and weights broadcast
as they do on the whole. A loss over classes divides by the weights of the pixels that count. Logits of tokens stay
where they are, also as rows (N * T, classes) of all of them: ranks send each other sums.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from math import log, pi
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.parallel.spatial.alignment import align, contract
from mpi4dl.parallel.spatial.rules.reductions import mean, sum_, whole_along
from mpi4dl.parallel.spatial.tensor import SpatialTensor, function_name, refusal, register, wrap


def reduce_pixels(pixels: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return pixels
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not isinstance(pixels, SpatialTensor):
        return getattr(pixels, reduction)()
    return mean(pixels) if reduction == "mean" else sum_(pixels)


def of_losses(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `pixels(function, options, reduction)` the rule of these losses.

    `options` are all arguments of a call by their names, with "none" as the reduction that PyTorch is to use.
    `reduction` is the one that the call asks for, perhaps by two older options.
    """

    def add(pixels: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            register(function, flat=True)(_bound(function, pixels))
        return pixels

    return add


def _bound(function: Any, pixels: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def rule(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction = options["reduction"]
        if options.get("reduce") is False:
            reduction = "none"
        elif options.get("reduce") or options.get("size_average") is not None:
            reduction = "sum" if options["size_average"] is False else "mean"
        options |= {old: None for old in ("size_average", "reduce") if old in options} | {"reduction": "none"}
        return pixels(function, options, reduction)

    return rule


def check_shapes(function: Any, options: Mapping[str, Any]) -> None:
    """Let PyTorch refuse shapes, and warn of them, by the whole: parts might differ from rank to rank."""
    shapes = {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for key, value in options.items()
        if isinstance(value, Tensor)
    }
    with torch._C.DisableTorchFunctionSubclass():
        function(**{**options, **shapes})


@of_losses(
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
)
def _by_pixel(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """A loss whose tensors, whatever their names, broadcast against each other."""
    check_shapes(function, options)
    names = [key for key, value in options.items() if isinstance(value, Tensor)]
    parts, layout = align([options[key] for key in names], function_name(function))
    pixels = wrap(function(**options | dict(zip(names, parts, strict=True))), layout)
    if reduction == "mean" and function is F.mse_loss and options["weight"] is not None:
        return reduce_pixels(pixels, "sum") / reduce_pixels(options["weight"], "sum")
    if reduction == "batchmean":
        return reduce_pixels(pixels, "sum") / options["input"].shape[0]
    return reduce_pixels(pixels, reduction)


@of_losses(F.cross_entropy, F.nll_loss, F.multi_margin_loss, F.multilabel_margin_loss)
def _over_classes(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """Cross entropy and its like: (N, classes, ...) against class indices, or something for each class.

    Rows may be those of all tokens, (N * T, classes), of which each rank has its own.
    """
    name, classes = function_name(function), 0 if options["input"].dim() == 1 else 1
    input, target = whole_along(options["input"], [classes]), options["target"]
    listed = function is F.multilabel_margin_loss
    probable = listed or (target.is_floating_point() and input.shape == target.shape)
    expected = input.shape if probable else (*input.shape[:classes], *input.shape[classes + 1 :])
    if target.shape != expected:
        raise ValueError(f"expected a target of shape {tuple(expected)}, but got {tuple(target.shape)}")
    if function is F.cross_entropy and isinstance(input, SpatialTensor) and input.layout.cut(classes):
        if probable:
            raise refusal(name, "its targets are probabilities, of classes that ranks share")
        return _of_cut_classes(input, target, classes, reduction, options)
    if probable:
        target = whole_along(target, [classes])
    having = (input, target) if probable else (input,)
    if any(isinstance(x, SpatialTensor) and x.layout.axis(classes) is not None for x in having):
        raise refusal(name, f"dim {classes} is not the classes here")
    dims = range(input.dim())
    others = tuple(dim for dim in dims if dim != classes)

    def of_each(own: Tensor, wanted: Tensor) -> Tensor:
        return function(**options | {"input": own, "target": wanted})

    pixels = contract(name, of_each, (input, target), (dims, dims if probable else others), others)
    if reduction != "mean" or probable or "ignore_index" not in options:
        return reduce_pixels(pixels, reduction)
    return reduce_pixels(pixels, "sum") / reduce_pixels(_shares(target, options, pixels.dtype), "sum")


def _shares(target: Tensor, options: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """How much each label counts in a mean over classes."""
    ignored, weight = target == options["ignore_index"], options["weight"]
    of_classes = 1.0 if weight is None else weight[torch.where(ignored, 0, target)]
    return torch.where(ignored, 0.0, of_classes).to(dtype)


def _of_cut_classes(
    input: SpatialTensor, target: Tensor, classes: int, reduction: str, options: Mapping[str, Any]
) -> Tensor:
    """Cross entropy where each rank has some of the classes: what ranks tell each other is as large as the target.

    -log softmax(x)[t] = log(sum(exp(x))) - x[t], of which x[t] is the sum over ranks of what each has of it, or 0.
    """
    weight, smoothing = options["weight"], options["label_smoothing"]
    few = torch.ones(1, 2, dtype=input.dtype, device=input.device)
    kind = F.cross_entropy(few, torch.zeros(1, dtype=torch.int64, device=input.device)).dtype  # as autocast has it
    # A type that counts any number of pixels.
    input = cast(SpatialTensor, input.to(torch.promote_types(kind, torch.float32)))
    ignored, shares = target == options["ignore_index"], _shares(target, options, input.dtype)
    log_sum = torch.logsumexp(input, classes)
    of_each = (log_sum - _chosen(input, torch.where(ignored, 0, target), classes)) * shares
    if smoothing:
        alike = torch.ones(input.shape[classes], dtype=input.dtype, device=input.device) if weight is None else weight
        shape = [-1 if dim == classes else 1 for dim in range(input.dim())]
        smooth = log_sum * alike.sum() - (input * alike.view(shape)).sum(classes)
        smooth = torch.where(ignored, 0, smooth) / input.shape[classes]
        of_each = of_each * (1 - smoothing) + smooth * smoothing
    found = of_each.sum() / shares.sum() if reduction == "mean" else reduce_pixels(of_each, reduction)
    return found.to(kind)


def _chosen(x: SpatialTensor, index: Tensor, dim: int) -> Tensor:
    """Of each place along `dim`, which ranks share, the value that `index` names."""
    labels = range(x.dim())
    others = tuple(label for label in labels if label != dim)
    axis = x.layout.axis(dim)
    assert axis is not None
    own = x.layout.owned[axis]

    def of_own(values: Tensor, wanted: Tensor) -> Tensor:
        inside = (wanted >= own.start) & (wanted < own.stop)
        if not own.length:
            return values.sum(dim)
        found = values.gather(dim, torch.where(inside, wanted - own.start, 0).unsqueeze(dim)).squeeze(dim)
        return torch.where(inside, found, 0)

    return contract("torch.nn.functional.cross_entropy", of_own, (x, index), (labels, others), others)


# Losses that are made of operators which have rules: of vectors, how near two of them are, what each label says.


@of_losses(F.gaussian_nll_loss)
def _gaussian(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """(log(v) + (x - t)^2 / v) / 2 with a variance v for each pixel, or one for several; v counts as eps at least."""
    input, target, var = (options[name] for name in ("input", "target", "var"))
    if isinstance(var, Tensor):
        var = var.unsqueeze(-1) if var.shape == input.shape[:-1] and var.shape != input.shape else var
        others = [n for n, size in zip(var.shape, input.shape, strict=False) if n != size]
        if var.shape != input.shape and (var.dim() != input.dim() or sum(others) != 1):
            raise ValueError("var is of incorrect size")
    else:
        var = torch.full_like(input, var)
    if bool((var < 0).any()):
        raise ValueError("var has negative entry/entries")
    # The derivative does not see the limit.
    at_least = var + (var.detach().clamp(min=options["eps"]) - var.detach())
    pixels = 0.5 * (at_least.log() + (input - target).square() / at_least)
    return reduce_pixels(pixels + 0.5 * log(2 * pi) if options["full"] else pixels, reduction)


@of_losses(F.multilabel_soft_margin_loss)
def _multilabel(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """The mean over the last dim, of classes, then over all else."""
    input, target, weight = (options[name] for name in ("input", "target", "weight"))
    of_each = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    return reduce_pixels((of_each if weight is None else of_each * weight).mean(-1), reduction)


@of_losses(F.triplet_margin_loss, F.triplet_margin_with_distance_loss)
def _triplet(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """How much nearer than the negative the positive is not, by the margin."""
    anchor, positive, negative, margin = (options[name] for name in ("anchor", "positive", "negative", "margin"))
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.dim() == positive.dim() == negative.dim():
        raise RuntimeError("the anchor, the positive and the negative tensor must have the same number of dimensions")
    if function is F.triplet_margin_loss:
        distance: Any = partial(F.pairwise_distance, p=options["p"], eps=options["eps"])
    else:
        distance = options["distance_function"] or F.pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if options["swap"]:
        far = torch.minimum(far, distance(positive, negative))
    return reduce_pixels((margin + near - far).clamp_min(0), reduction)


@of_losses(F.cosine_embedding_loss)
def _cosine(function: Any, options: dict[str, Any], reduction: str) -> Tensor:
    """1 less the cosine where the target is 1, what the cosine has over the margin where it is -1."""
    check_shapes(function, options)
    a, b, target, margin = (options[name] for name in ("input1", "input2", "target", "margin"))
    dim, tiny = target.dim(), 1e-12
    lengths = ((a * a).sum(dim) + tiny) * ((b * b).sum(dim) + tiny)
    cosine = (a * b).sum(dim) / lengths.sqrt()
    of_each = torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return reduce_pixels(of_each, reduction)
