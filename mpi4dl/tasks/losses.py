"""Losses by name, and those of the training command: cross entropy of images with one label each, or of tokens."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mpi4dl.comm import Refusal
from mpi4dl.tasks.formulas import (
    BatchLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    Dice,
    Difference,
    Focal,
    OfHeads,
    SumOfLosses,
    TokenCrossEntropy,
    as_targets,
    charbonnier_loss,
    main_output,
    spread,
)

# Survival: how long until an event, of samples some of which left before it; Cox's model, and its concordance.
#
# A sample has a time and whether the event came then (1) or it was last seen then (0, censored). The model's one output
# is its risk: the logarithm of its hazard, up to a constant.

CHUNK = 1024  # events that are compared with all samples at once
TIES = ("efron", "breslow")


def times_and_events(targets: Any) -> tuple[Tensor, Tensor]:
    """Times (N,) and whether there was an event (N,), of a pair of these, a mapping, or one tensor (N, 2)."""
    if isinstance(targets, Mapping) and {"time", "event"} <= targets.keys():
        time, event = targets["time"], targets["event"]
    elif isinstance(targets, Tensor) and targets.dim() == 2 and targets.shape[1] == 2:
        time, event = targets[:, 0], targets[:, 1]
    elif isinstance(targets, Sequence) and len(targets) == 2:
        time, event = targets
    else:
        shape = f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else f"type {type(targets).__name__}"
        raise Refusal(f"the targets of survival are (time, event) of each sample, (N,) each or (N, 2), not of {shape}")
    if time.shape != event.shape or time.dim() != 1:
        raise Refusal(f"times have shape {tuple(time.shape)} and events {tuple(event.shape)}: both must be (N,)")
    if bool(time.isnan().any()):
        raise Refusal("a time is not a number: leave out samples of which no time is known")
    if bool(((event != 0) & (event != 1)).any()):
        raise Refusal("an event is neither 0 (censored) nor 1: `targets` are (time, event) in this order")
    return time, event.bool()


class Cox(BatchLoss):
    """The negative logarithm of Cox's partial likelihood, divided by the number of events.

    Outputs are risks (N,) or (N, 1), targets as `times_and_events` reads them. An event at time t is compared with all
    samples of the batch that were there at t. `ties` of the times of events: "efron" or "breslow". A batch without an
    event has loss 0. Cox 1972; Efron 1977, "The efficiency of Cox's likelihood function for censored data".
    """

    whole_batch = True

    def __init__(self, ties: str = "efron") -> None:
        if ties not in TIES:
            raise ValueError(f"`ties` is {ties!r}, but must be one of {', '.join(TIES)}")
        self.ties = ties

    def sums(self, outputs: Tensor, targets: Any) -> Sequence[Tensor]:
        time, event = times_and_events(targets)
        risk = outputs.reshape(-1)
        risk = risk if risk.dtype == torch.float64 else risk.float()
        order = torch.argsort(time, descending=True, stable=True)
        risk, event = risk[order], event[order]
        if not bool(event.any()):
            return (0 * risk.sum(),)
        _, number, sizes = torch.unique_consecutive(time[order], return_inverse=True, return_counts=True)
        last = sizes.cumsum(0) - 1  # of each time: all up to it are at risk
        at_risk = torch.logcumsumexp(risk, 0)[last][number[event]]
        if self.ties == "efron":
            at_risk = at_risk + self._without_part(risk[event], number[event], at_risk, len(sizes))
        return ((at_risk - risk[event]).sum(),)

    @staticmethod
    def _without_part(risk: Tensor, number: Tensor, at_risk: Tensor, num_times: int) -> Tensor:
        """The change of log(at risk) if the i-th of d events at one time is compared without i / d of all d."""
        count = torch.bincount(number, minlength=num_times)
        first = (count.cumsum(0) - count)[number]
        part = (torch.arange(len(number), device=number.device) - first) / count[number].to(risk.dtype)
        highest = torch.full((num_times,), -torch.inf, dtype=risk.dtype, device=risk.device)
        highest = highest.scatter_reduce(0, number, risk.detach(), "amax")[number]
        dying = torch.zeros(num_times, dtype=risk.dtype, device=risk.device)
        dying = dying.index_add(0, number, (risk - highest).exp())[number].log() + highest
        return torch.log1p(-part * (dying - at_risk).exp())

    def weights(self, targets: Any) -> Sequence[float]:
        return (float(times_and_events(targets)[1].sum()),)


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Harrell's index: the share, of pairs that can be compared, in which who had the event first has the higher risk.

    A pair can be compared if one had its event before the other's time, or at that time if the other was censored then.
    Equal risks count one half. NaN if there is no such pair. Harrell et al. 1982, "Evaluating the yield of medical
    tests".
    """
    risk, event, comparable, twice = risk.reshape(-1).double(), event.bool(), 0, 0
    for some in torch.nonzero(event).flatten().split(CHUNK):
        later = (time > time[some, None]) | ((time == time[some, None]) & ~event)
        comparable += int(later.sum())
        twice += 2 * int((later & (risk[some, None] > risk)).sum()) + int((later & (risk[some, None] == risk)).sum())
    return twice / (2 * comparable) if comparable else float("nan")


# Structural similarity of images, as a loss.

POWERS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of scales, from the finest: Wang et al. 2003, section 3.2
LEAST_SIMILAR = 1e-6  # whose power has a gradient


class Dissimilarity(BatchLoss):
    """1 - SSIM of images (N, channels, height, width) with values from 0 to 1; of several `powers` 1 - MS-SSIM.

    It is the mean over samples and channels, by Gaussian windows of 11 px that lie inside the image, in single
    precision or double. Each scale has half the size of the one before, by means of 2 x 2 pixels. Wang et al. 2004,
    "Image quality assessment"; Wang et al. 2003, "Multiscale structural similarity for image quality assessment".
    """

    def __init__(self, powers: Sequence[float]) -> None:
        self.powers = tuple(powers)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        from mpi4dl.tasks.likeness import SIDE, similarities

        outputs = as_targets(outputs, targets)
        targets = spread(targets, outputs)
        least = SIDE << (len(self.powers) - 1)
        if outputs.dim() != 4 or outputs.shape != targets.shape or min(outputs.shape[2:]) < least:
            name, fewer = ("ms_ssim", "fewer scales by `loss_options`, ") if len(self.powers) > 1 else ("ssim", "")
            raise Refusal(
                f"`loss` {name} compares pictures (N, channels, height, width) of {least} px or more, not outputs of "
                f"shape {tuple(outputs.shape)} with targets of {tuple(targets.shape)}: choose larger ones, "
                f"{fewer}or another `loss`"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
            made, target = outputs.to(wide), targets.to(wide)
            found = None
            for number, power in enumerate(self.powers):
                brightness, alike = similarities(made, target)
                last = number == len(self.powers) - 1
                mean = (brightness * alike if last else alike).mean((2, 3))
                part = mean if len(self.powers) == 1 else mean.clamp(min=LEAST_SIMILAR) ** power
                found = part if found is None else found * part
                if not last:
                    made, target = F.avg_pool2d(made, 2), F.avg_pool2d(target, 2)
            assert found is not None
            return ((1 - found).mean(1).sum(),)


def ms_ssim(scales: int = len(POWERS)) -> BatchLoss:
    if not 1 <= scales <= len(POWERS):
        raise TypeError(f"`scales` {scales} must be from 1 to {len(POWERS)}")
    powers = POWERS[:scales]
    return Dissimilarity(tuple(each / sum(powers) for each in powers))


def perceptual(
    vgg: Mapping[str, Tensor] | None = None, layers: str = "relu1_2+relu2_2+relu3_3+relu4_3", factor: float = 1.0
) -> BatchLoss:
    from mpi4dl.tasks.perceptual import Perceptual

    return Perceptual(vgg, layers, factor)


LOSSES: Mapping[str, Callable[..., BatchLoss]] = {
    "cross_entropy": CrossEntropy,
    "bce": BinaryCrossEntropy,
    "dice": Dice,
    "focal": Focal,
    "mse": lambda: Difference(F.mse_loss),
    "l1": lambda: Difference(F.l1_loss),
    "huber": lambda delta=1.0: Difference(F.huber_loss, delta=delta),
    "charbonnier": lambda eps=1e-3: Difference(charbonnier_loss, eps=eps),
    "ssim": lambda: Dissimilarity((1.0,)),
    "ms_ssim": ms_ssim,
    "perceptual": perceptual,
    "cox": Cox,
}


def build_loss(name: str, **options: Any) -> BatchLoss:
    """The loss of this name, or the sum of several, as in "dice+cross_entropy"; each takes the options that it knows.

    Raises ValueError for a name that is none, and for options that none of them takes, or that are no values for it.
    """
    names = [each.strip() for each in name.split("+")]
    unknown = [each for each in names if each not in LOSSES]
    if unknown:
        close = difflib.get_close_matches(unknown[0].lower(), LOSSES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"`loss` {unknown[0]!r} is unknown: choose of {', '.join(LOSSES)}, several with + between them, or your "
            f"own such as my_code.py:loss{hint}"
        )
    taken = [set(inspect.signature(LOSSES[each]).parameters) for each in names]
    stray = options.keys() - set().union(*taken)
    if stray:
        known = ", ".join(sorted(set().union(*taken))) or "none"
        raise ValueError(f"`loss` {name} does not take {', '.join(sorted(stray))}; its options are: {known}")
    losses = []
    for each, known_options in zip(names, taken, strict=True):
        try:
            losses.append(LOSSES[each](**{key: value for key, value in options.items() if key in known_options}))
        except TypeError as error:
            raise ValueError(f"`loss` {each} cannot take {options}: {error}") from None
    return losses[0] if len(losses) == 1 else SumOfLosses(losses, (1.0,) * len(losses))


def balanced_weights(labels: Sequence[int] | Tensor, num_classes: int) -> tuple[float, ...]:
    """For each class n / (classes * how many of the n labels are it), as scikit-learn balances; 0 without any."""
    return weights_of_counts(torch.bincount(torch.as_tensor(labels).flatten(), minlength=num_classes))


def weights_of_counts(counts: Tensor) -> tuple[float, ...]:
    """The same, of how many labels are of each class."""
    counts = counts.double()
    shares = counts.sum() / (int((counts > 0).sum()) * counts)
    return tuple(torch.where(counts > 0, shares, 0.0).tolist())


def require_logits(outputs: Any, targets: Any = None) -> None:
    """Raise Refusal unless a model's outputs, or the main one of them, are one row of logits per image."""
    logits = main_output(outputs)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise Refusal(
            f"the model's output has {shape_in_words(logits)}, but `task` classify, images with one label each, needs "
            "(batch, classes): choose another `model`, or the `task` that it is for"
        )


def shape_in_words(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"


classification_loss = OfHeads(CrossEntropy(), require_logits)
token_loss = OfHeads(TokenCrossEntropy())
