"""An exponential moving average of what a rank's optimizer works on, for evaluations: the EMA of weights.

after a step   average = decay * average + (1 - decay) * weights       element by element, so on parts too
evaluation     weights <-> average ... average <-> weights             changed places; owners share them as after a step
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mpi4dl.parallel.replicas.offload import Home
from mpi4dl.parallel.replicas.update import Portion

SLOT = "weight_average"  # as which checkpoints have it, beside the state of the optimizer


class Average:
    """The averages of pieces of parameters, which live in `home`.

    As torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay), the first update copies.
    """

    def __init__(self, pieces: Iterable[Sequence[Portion]], decay: float, home: Home) -> None:
        self.decay, self.home = decay, home
        self._pieces = [piece for some in pieces for piece in some]
        self._of: dict[int, Tensor] = {}  # by the id of a piece's value

    @property
    def values(self) -> list[Tensor]:
        """The averages that there are."""
        return [*self._of.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step that was made."""
        known = [piece for piece in self._pieces if id(piece.value) in self._of]
        for piece in self._pieces:
            if id(piece.value) not in self._of:
                self._of[id(piece.value)] = self.home.place(piece.value.detach().clone())
        if known:
            averages = [self._of[id(piece.value)] for piece in known]
            torch._foreach_lerp_(averages, [piece.value.detach() for piece in known], 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """The weights become the average, and the average the weights; nothing happens before the first update."""
        for piece in self._pieces:
            if id(piece.value) in self._of:
                average = self._of[id(piece.value)]
                weights = piece.value.detach().clone()
                piece.value.copy_(average)
                average.copy_(weights)

    def of(self, piece: Portion) -> dict[str, Tensor]:
        """The average of a piece by `SLOT`, if there is one yet."""
        found = self._of.get(id(piece.value))
        return {} if found is None else {SLOT: found}

    @torch.no_grad()
    def load(self, piece: Portion, value: Tensor | None) -> None:
        """Go on from an average, or, without one, begin with the next update."""
        if value is None:
            self._of.pop(id(piece.value), None)
        else:
            like = torch.empty_like(piece.value)
            self._of[id(piece.value)] = self.home.place(like.copy_(value.to(like.device).view(like.shape)))
