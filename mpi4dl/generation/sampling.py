"""Which token comes next: by the logits of one request, its own random numbers, and nothing else. In float64."""

from collections.abc import Collection

import torch
from torch import Tensor

from mpi4dl.generation.requests import Sampling


class Chooser:
    """Chooses the tokens of one request. `occurred` are the tokens of its prompt."""

    def __init__(self, sampling: Sampling, occurred: Collection[int]) -> None:
        self.sampling = sampling
        self._occurred = set(occurred) if sampling.repetition_penalty != 1 else set()
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token after these logits (vocabulary,), float64."""
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            logits = penalized(logits, self._occurred, sampling.repetition_penalty)
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            shares = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p).cumsum(0)
            drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * shares[-1]
            token = int(torch.searchsorted(shares, drawn, right=True).clamp_(max=len(shares) - 1))
        if sampling.repetition_penalty != 1:
            self._occurred.add(token)
        return token


def penalized(logits: Tensor, occurred: Collection[int], penalty: float) -> Tensor:
    """The logits, those of tokens that occurred divided by the penalty where positive, else multiplied by it."""
    which = torch.tensor(sorted(occurred), dtype=torch.int64)
    found = logits[which]
    return logits.index_copy(0, which, torch.where(found > 0, found / penalty, found * penalty))


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Those of the tokens that are possible; 0 of all others. They add up to 1.

    First the `top_k` most probable stay, then of these the fewest that have a probability of `top_p` together. Of
    tokens that are equally probable the first ones count as more probable.
    """
    logits = (logits - logits.max()) / temperature
    if 0 < top_k < len(logits) or top_p < 1:
        logits, order = logits.sort(descending=True, stable=True)
        shares = logits[: top_k or None].softmax(0)
        if top_p < 1:
            before = shares.cumsum(0) - shares
            shares = shares * (before < top_p)
        found = torch.zeros_like(logits).index_copy_(0, order[: len(shares)], shares)
        return found / found.sum()
    return logits.softmax(0)
