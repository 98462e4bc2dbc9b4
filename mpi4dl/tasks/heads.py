"""What models return beside what they predict: auxiliary heads, and penalties of routing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mpi4dl.models.experts import Penalized
from mpi4dl.tasks.formulas import BatchLoss

MAIN = ("out", "logits")  # as torchvision's models of dense predictions name it, and transformers
OF_TUPLES, OF_NAMED = 0.3, 0.5  # what auxiliary heads count: Szegedy et al. 2014; torchvision's training reference


class Heads(NamedTuple):
    """A model's outputs: the main one, auxiliary ones with the factors that they count by, and a penalty (N,)."""

    main: Any
    auxiliary: tuple[tuple[float, Any], ...] = ()
    penalty: Tensor | None = None


def heads_of(outputs: Any, factor: float | None = None) -> Heads:
    """The heads of a model: a tensor, a tuple whose first is the main one, or a mapping that names it.

    Of a mapping "out" or "logits" is the main one, or else the first, and those count whose names begin with "aux".
    `factor` is what auxiliary heads count by; None: as is customary. A head that is None, as of GoogLeNet in
    evaluation, is none.
    """
    if isinstance(outputs, Penalized):
        return heads_of(outputs.outputs, factor)._replace(penalty=outputs.penalty)
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
    """What a model predicts, of all that it returns."""
    return heads_of(outputs).main


class OfHeads(BatchLoss):
    """A loss of a model's main output, with that of auxiliary heads by `factor`, and penalties of routing on top.

    `require(outputs, targets)` raises Refusal where the main output does not fit.
    """

    def __init__(
        self, loss: BatchLoss, require: Callable[[Any, Any], None] | None = None, factor: float | None = None
    ) -> None:
        self.loss, self.require, self.factor = loss, require, factor

    @property
    def whole_batch(self) -> bool:
        return self.loss.whole_batch

    def sums(self, outputs: Any, targets: Any) -> Sequence[Tensor]:
        heads = heads_of(outputs, self.factor)
        for head in (heads.main, *(other for _, other in heads.auxiliary)):
            if self.require is not None:
                self.require(head, targets)
        found = list(self.loss.sums(heads.main, targets))
        for factor, other in heads.auxiliary:
            found = [a + factor * b for a, b in zip(found, self.loss.sums(other, targets), strict=True)]
        penalty = found[0].new_zeros(()) if heads.penalty is None else heads.penalty.sum()
        return [*found, penalty]

    def weights(self, targets: Any) -> Sequence[float]:
        return [*self.loss.weights(targets), float(num_samples(targets))]


def num_samples(targets: Any) -> int:
    """How many samples targets are of: a tensor (N, ...), or what holds such."""
    while not isinstance(targets, Tensor):
        targets = next(iter(targets.values())) if isinstance(targets, Mapping) else targets[0]
    return len(targets)
