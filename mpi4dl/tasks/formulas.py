"""Losses that are added up from parts: of microbatches and of tiles, to the loss that PyTorch has of the whole batch.

The mean of cross entropy by class weights, or without the pixels that do not count, is a sum divided by weights that
the targets alone decide. The mean of the means of parts is another number; sums and weights of parts add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Refusal
from mpi4dl.datasets.transformed import WeightedLabels
from mpi4dl.models.layers import Penalized
from mpi4dl.parallel.spatial import SpatialTensor, shard_like

IGNORED = -100  # as in PyTorch
DICE_SMOOTHING = 1e-5  # as in MONAI


@runtime_checkable
class SummedLoss(Protocol):
    """A loss of terms, each of which is a sum over a batch, divided by the sum of weights that its targets decide.

    `whole_batch`: its sums are those of all samples together, so that a batch must not be cut into microbatches.
    """

    @property
    def whole_batch(self) -> bool: ...

    def sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        """The sum of each term, over these samples."""

    def weights(self, targets: Any) -> Sequence[float]:
        """The divisor of each term, summed over a batch."""


class BatchLoss:
    """Such a loss, which can be called as any other; one of nothing that counts is 0, and teaches nothing."""

    whole_batch = False

    def sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        raise NotImplementedError

    def weights(self, targets: Any) -> Sequence[float]:
        """That of one term is the number of samples, unless a loss says otherwise."""
        return (float(len(targets)),)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        terms = zip(self.sums(outputs, targets), self.weights(targets), strict=True)
        return torch.stack([total / weight if weight else 0 * total for total, weight in terms]).sum()


def spread(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets of the whole batch, as outputs are spread: (N, ...) beside outputs (N, C, ...), or of the same shape."""
    if not isinstance(outputs, SpatialTensor) or isinstance(targets, SpatialTensor):
        return targets
    if outputs.dim() > 1 and outputs.layout.axis(1) is not None:
        return targets  # ranks share the classes, of which each finds what it has
    if targets.dim() == outputs.dim():
        return shard_like(targets, outputs)
    return shard_like(targets.unsqueeze(1), outputs).squeeze(1)


def check_classes(targets: Tensor, outputs: Tensor, ignore_index: int) -> None:
    """Raise Refusal unless all targets (N, ...) are classes that the model's outputs (N, C, ...) are for."""
    num_classes = outputs.shape[1]
    if targets.dim() == outputs.dim():
        raise Refusal(
            f"targets {tuple(targets.shape)} have a number for each output, such as shares of classes that `mixup` "
            "makes, but this loss takes one class each: choose another `loss`, or no `mixup`"
        )
    if not targets.numel():
        return
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= num_classes))
    if bool(wrong.any()):
        found = int(targets[wrong].flatten()[0])
        raise Refusal(
            f"a target is class {found}, but the model has outputs for {num_classes} classes, 0 to {num_classes - 1}: "
            f"set `num_classes` to at least {found + 1}, or `ignore_index` to what does not count"
            if found >= 0
            else f"a target is class {found}, but classes are numbers from 0: set `ignore_index` to what does not count"
        )


def along_classes(weights: Tensor, outputs: Tensor) -> Tensor:
    """One number for each class, in the shape in which it meets outputs (N, C, ...)."""
    return weights.to(outputs.device, outputs.dtype).view(-1, *(1,) * (outputs.dim() - 2))


class OfClasses(BatchLoss):
    """A loss of classes with `class_weights`, one for each class, and without what `ignore_index` leaves out.

    Targets (N, ...) name classes; those of a `binary` loss, (N, C, ...), are 0 and 1.
    """

    binary = False

    def __init__(self, class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED) -> None:
        if class_weights is not None and (min(class_weights) < 0 or not sum(class_weights) > 0):
            raise ValueError(f"`class_weights` {list(class_weights)} must be at least 0, and not all of them 0")
        self.class_weights = None if class_weights is None else tuple(map(float, class_weights))
        self.ignore_index = ignore_index

    def weight_of(self, outputs: Tensor, dim: int = 1) -> Tensor | None:
        """The weights of classes beside outputs, of which they are the dim `dim`. Raises Refusal for another number."""
        if self.class_weights is None:
            return None
        if len(self.class_weights) != outputs.shape[dim]:
            raise Refusal(
                f"`class_weights` has {len(self.class_weights)} numbers, but the model has {outputs.shape[dim]} "
                "outputs: give one for each class"
            )
        return torch.tensor(self.class_weights, dtype=outputs.dtype, device=outputs.device)

    def weights(self, targets: Tensor) -> Sequence[float]:
        counted = targets != self.ignore_index
        if self.class_weights is None or self.binary:
            return (float(counted.sum()),)
        numbers = torch.bincount(targets[counted].long().flatten(), minlength=len(self.class_weights))
        if len(numbers) > len(self.class_weights):
            raise Refusal(
                f"a target is class {len(numbers) - 1}, but `class_weights` has {len(self.class_weights)} numbers: "
                "give one for each class"
            )
        return (float((numbers.double().cpu() * torch.tensor(self.class_weights, dtype=torch.float64)).sum()),)

    def named(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets that name classes, as outputs are spread. Raises Refusal for what is no class."""
        check_classes(targets, outputs, self.ignore_index)
        return spread(targets, outputs)

    def zeros_and_ones(self, targets: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Binary targets as outputs are spread, 0 where they do not count, and 1 where they do."""
        own = spread(targets, outputs)
        counted = (own != self.ignore_index).to(outputs.dtype)
        return torch.where(counted == 0, 0, own).to(outputs.dtype), counted


class Smoothed(OfClasses):
    """A loss whose targets may be smoothed: so much of each is shared out among the classes."""

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(class_weights, ignore_index)
        self.label_smoothing = label_smoothing


class CrossEntropy(Smoothed):
    """F.cross_entropy of outputs (N, C, ...) with classes (N, ...), or with probabilities (N, C, ...)."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        weight = self.weight_of(outputs)
        if targets.is_floating_point():
            return self._sums(outputs, spread(targets, outputs), weight)
        return self._sums(outputs, self.named(targets, outputs).long(), weight, ignore_index=self.ignore_index)

    def _sums(self, outputs: Tensor, targets: Tensor, weight: Tensor | None, **options: int) -> Sequence[Tensor]:
        how: Any = {"label_smoothing": self.label_smoothing, "reduction": "sum", **options}
        return (F.cross_entropy(outputs, targets, weight, **how),)

    def weights(self, targets: Tensor) -> Sequence[float]:
        return (targets.numel() / targets.shape[1],) if targets.is_floating_point() else super().weights(targets)


class TokenCrossEntropy(CrossEntropy):
    """The same of outputs (N, T, C), as of language, with classes (N, T)."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        flat = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
        return self._sums(*flat, self.weight_of(outputs, -1), ignore_index=self.ignore_index)


class BinaryCrossEntropy(Smoothed):
    """F.binary_cross_entropy_with_logits of outputs (N, C, ...) with 0 or 1 (N, C, ...): the mean over what counts.

    Class weights say how much more a 1 of each class counts than a 0 (its `pos_weight`).
    """

    binary = True

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        if outputs.shape != targets.shape:
            raise Refusal(
                f"`loss` bce wants a 0 or 1 for each output, but outputs have shape {tuple(outputs.shape)}, and "
                f"targets {tuple(targets.shape)}: choose another `loss`, such as cross_entropy for classes"
            )
        weights = self.weight_of(outputs)
        wanted, counted = self.zeros_and_ones(targets, outputs)
        wanted = wanted * (1 - self.label_smoothing) + self.label_smoothing / 2
        positive = None if weights is None else along_classes(weights, outputs)
        each = F.binary_cross_entropy_with_logits(outputs, wanted, pos_weight=positive, reduction="none")
        return ((each * counted).sum(),)


class Dice(OfClasses):
    """1 - (2 |P T| + s) / (|P| + |T| + s), the mean over samples and classes, for probabilities P and targets T.

    Milletari et al. 2016, "V-Net", with s = 1e-5 as in MONAI's DiceLoss: of outputs (N, C, ...) by softmax for targets
    that name classes (N, ...), or (`binary`) by sigmoid for targets (N, C, ...) of 0 and 1. Each sample has its own, so
    that it does not depend on how a batch is divided. Class weights weigh the mean over classes.
    """

    def __init__(
        self, class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED, binary: bool = False
    ) -> None:
        super().__init__(class_weights, ignore_index)
        self.binary = binary

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        weights = self.weight_of(outputs)
        if self.binary:
            wanted, counted = self.zeros_and_ones(targets, outputs)
            shares = outputs.sigmoid() * counted
        else:
            own = self.named(targets, outputs).unsqueeze(1)
            numbers = along_classes(torch.arange(outputs.shape[1]), outputs)
            counted = (own != self.ignore_index).to(outputs.dtype)
            wanted, shares = (own == numbers).to(outputs.dtype) * counted, outputs.softmax(1) * counted
        space = tuple(range(2, outputs.dim()))
        both, each = (shares * wanted).sum(space), (shares + wanted).sum(space)
        loss = 1 - (2 * both + DICE_SMOOTHING) / (each + DICE_SMOOTHING)
        if weights is None:
            weights = torch.ones(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        return ((loss * (weights / weights.sum())).sum(),)

    def weights(self, targets: Tensor) -> Sequence[float]:
        return BatchLoss.weights(self, targets)


class Focal(OfClasses):
    """-(1 - p)^gamma log p, where p is the probability of what is right: the mean over what counts, by class weights.

    Lin et al. 2017, "Focal loss for dense object detection", https://arxiv.org/abs/1708.02002. By softmax for targets
    that name classes; `binary`: by sigmoid for targets (N, C, ...) of 0 and 1, the mean over all that count.
    """

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        ignore_index: int = IGNORED,
        gamma: float = 2.0,
        binary: bool = False,
    ) -> None:
        super().__init__(class_weights, ignore_index)
        if not gamma >= 0:
            raise ValueError(f"`gamma` is {gamma}, but must be at least 0")
        self.gamma, self.binary = gamma, binary

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        weights = self.weight_of(outputs)
        if self.binary:
            wanted, counted = self.zeros_and_ones(targets, outputs)
            each = self._of(F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")) * counted
            return ((each if weights is None else each * along_classes(weights, outputs)).sum(),)
        own = self.named(targets, outputs)
        each = self._of(F.cross_entropy(outputs, own.long(), reduction="none", ignore_index=self.ignore_index))
        if weights is not None:
            each = each * sum((own == c).to(outputs.dtype) * weight for c, weight in enumerate(weights))
        return (each.sum(),)

    def _of(self, surprise: Tensor) -> Tensor:
        return (1 - (-surprise).exp()) ** self.gamma * surprise


class Difference(BatchLoss):
    """A function of outputs and targets of the same shape, element by element: the mean over all elements."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        self.function, self.options = function, options

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        outputs = as_targets(outputs, targets)
        own = spread(targets, outputs).to(outputs.dtype)
        if own.shape != outputs.shape:
            name, mine, theirs = self.function.__name__.removesuffix("_loss"), tuple(outputs.shape), tuple(own.shape)
            raise Refusal(
                f"`loss` {name} takes the difference of numbers, but the outputs have shape {mine}, and the targets "
                f"{theirs}: return as many numbers as there are targets, or choose another `loss`, such as "
                "cross_entropy for classes"
            )
        return (self.function(outputs, own, reduction="sum", **self.options),)

    def weights(self, targets: Tensor) -> Sequence[float]:
        return (float(targets.numel()),)


def charbonnier_loss(outputs: Tensor, targets: Tensor, eps: float, reduction: str) -> Tensor:
    """sqrt(difference^2 + eps^2), added up: Lai et al. 2017, "Deep Laplacian pyramid networks", eq. 3."""
    found = ((outputs - targets).square() + eps**2).sqrt()
    return found.sum() if reduction == "sum" else found.mean()


def as_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs (N, 1, ...) beside targets (N, ...) are (N, ...) too."""
    return outputs.squeeze(1) if targets.dim() == outputs.dim() - 1 and outputs.shape[1] == 1 else outputs


class SumOfLosses(BatchLoss):
    """Several losses, added up by `factors`."""

    def __init__(self, losses: Sequence[BatchLoss], factors: Sequence[float]) -> None:
        self.losses, self.factors = tuple(losses), tuple(factors)
        self.whole_batch = any(loss.whole_batch for loss in losses)

    def sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        pairs = zip(self.losses, self.factors, strict=True)
        return [factor * total for loss, factor in pairs for total in loss.sums(outputs, targets)]

    def weights(self, targets: Any) -> Sequence[float]:
        return [weight for loss in self.losses for weight in loss.weights(targets)]


# Outputs of models besides predictions: auxiliary heads, and penalties of routing.

MAIN = ("out", "logits")  # as torchvision's models of dense predictions name it, and transformers
OF_TUPLES, OF_NAMED = 0.3, 0.5  # what auxiliary heads count: Szegedy et al. 2014; torchvision's training reference


class Heads(NamedTuple):
    """A model's outputs: the main one, auxiliary ones with the factors that they count by, and a penalty (N,)."""

    main: Any
    auxiliary: tuple[tuple[float, Any], ...] = ()
    penalty: Tensor | None = None


def heads_of(outputs: Any, factor: float | None = None) -> Heads:
    """The heads of a model: a tensor, a tuple whose first is the main one, or a mapping or dataclass that names it.

    Of a mapping "out" or "logits" is the main one, or else the first, and those count whose names begin with "aux".
    `factor` is what auxiliary heads count by; None: as is customary. A head that is None, as of GoogLeNet in
    evaluation, is none.
    """
    if isinstance(outputs, Penalized):
        return heads_of(outputs.outputs, factor)._replace(penalty=outputs.penalty)
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):  # as those of Hugging Face are too
        outputs = {each.name: getattr(outputs, each.name) for each in fields(outputs)}
    if isinstance(outputs, Mapping) and outputs:
        name = next((name for name in MAIN if name in outputs), next(iter(outputs)))
        others = [value for key, value in outputs.items() if str(key).startswith("aux") and key != name]
        return _heads(outputs[name], others, OF_NAMED if factor is None else factor)
    if isinstance(outputs, tuple | list) and outputs:
        return _heads(outputs[0], outputs[1:], OF_TUPLES if factor is None else factor)
    return Heads(outputs)


def _heads(main: Any, others: Sequence[Any], factor: float) -> Heads:
    return Heads(main, tuple((factor, other) for other in others if other is not None))


def main_output(outputs: Any) -> Any:
    """The prediction among all values that a model returns."""
    return heads_of(outputs).main


class OfHeads(BatchLoss):
    """A loss of a model's main output, with that of auxiliary heads by `factor`, and penalties of routing on top.

    `require(outputs, targets)` raises Refusal where the main output does not fit. Of `WeightedLabels` each sample's
    part of the loss is multiplied by its weight, and divisors stay: (weights * losses).mean().
    """

    def __init__(
        self, loss: BatchLoss, require: Callable[[Any, Any], None] | None = None, factor: float | None = None
    ) -> None:
        self.loss, self.require, self.factor = loss, require, factor
        self.whole_batch = loss.whole_batch

    def sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        heads = heads_of(outputs, self.factor)
        for head in (heads.main, *(other for _, other in heads.auxiliary)):
            if self.require is not None:
                self.require(head, labels_of(targets))
        found = list(self._sums(heads.main, targets))
        for factor, other in heads.auxiliary:
            found = [a + factor * b for a, b in zip(found, self._sums(other, targets), strict=True)]
        penalty = found[0].new_zeros(()) if heads.penalty is None else heads.penalty.sum()
        return [*found, penalty]

    def _sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        if not isinstance(targets, WeightedLabels):
            return self.loss.sums(outputs, targets)
        terms = []
        for weight in targets.weights.unique().tolist():
            index = (targets.weights == weight).nonzero().flatten()
            part = self.loss.sums(outputs.index_select(0, index), targets.labels[index])
            terms.append([weight * total for total in part])
        return [sum(each[1:], each[0]) for each in zip(*terms, strict=True)]

    def weights(self, targets: Any) -> Sequence[float]:
        return [*self.loss.weights(labels_of(targets)), float(num_samples(targets))]


def labels_of(targets: Any) -> Any:
    """Targets without the weights of samples."""
    return targets.labels if isinstance(targets, WeightedLabels) else targets


def num_samples(targets: Any) -> int:
    """How many samples targets are of: a tensor (N, ...), or what holds such."""
    while not isinstance(targets, Tensor):
        targets = next(iter(targets.values())) if isinstance(targets, Mapping) else targets[0]
    return len(targets)
