"""Survival: how long until an event, of samples some of which left before it; Cox's model, and its concordance.

A sample has a time and whether the event came then (1) or it was last seen then (0, censored). The model's one output
is its risk: the logarithm of its hazard, up to a constant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl.comm import Refusal
from mpi4dl.tasks.formulas import BatchLoss

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

    def __init__(self, ties: str = "efron") -> None:
        if ties not in TIES:
            raise ValueError(f"`ties` is {ties!r}, but must be one of {', '.join(TIES)}")
        self.ties = ties

    @property
    def whole_batch(self) -> bool:
        return True

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
        """What log(at risk) changes by if of d events at one time the i-th is compared without i / d of all d."""
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
