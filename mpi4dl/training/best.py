"""Which validation was the best, and whether it is worth going on: what --monitor and --patience ask for."""

import math
from dataclasses import dataclass
from typing import Any

from mpi4dl._wording import counted
from mpi4dl.engine import Evaluation
from mpi4dl.tasks.directions import HIGHER_IS_BETTER

BEST = "best.safetensors"


@dataclass
class Best:
    """The best value so far of what is monitored, at which step, and how many validations were no better since.

    `higher_is_better` says it of what is monitored. `patience` is how many of those end the run; None: none do.
    """

    monitor: str
    higher_is_better: bool
    patience: int | None
    value: float = math.nan
    step: int = 0
    since: int = 0

    def see(self, evaluation: Evaluation, step: int) -> bool:
        """Whether this validation is the best so far; what is not a finite number is no better than anything.

        Raises ValueError if what is monitored was not measured, or is not one number.
        """
        value = self.of(evaluation)
        ahead = value > self.value if self.higher_is_better else value < self.value
        if math.isfinite(value) and (ahead or math.isnan(self.value)):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def of(self, evaluation: Evaluation) -> float:
        measured: dict[str, Any] = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, **evaluation.metrics}
        value = measured.get(self.monitor)
        if not isinstance(value, float):
            scalars = [f"val_{name}" for name, each in measured.items() if isinstance(each, float)]
            raise ValueError(f"`monitor` val_{self.monitor} is no number here: choose of {', '.join(scalars)}")
        return value

    @property
    def enough(self) -> bool:
        return self.patience is not None and self.since >= self.patience

    def undefined(self, evaluation: Evaluation) -> str | None:
        """The message about a validation that cannot be the best: the monitored value is not finite."""
        value = self.of(evaluation)
        if math.isfinite(value):
            return None
        return f"val_{self.monitor} is {value}: these weights are not kept as the best"

    def words(self) -> str:
        """Why the run ends."""
        after = counted(self.since, "validation")
        return f"val_{self.monitor} was best, {self.value:.6g}, at step {self.step}; {after} since then no better"

    def state(self) -> dict[str, Any]:
        value = None if math.isnan(self.value) else self.value
        mode = "max" if self.higher_is_better else "min"
        return {"monitor": self.monitor, "mode": mode, "value": value, "step": self.step, "since": self.since}

    def go_on(self, state: dict[str, Any] | None) -> None:
        """Take up from a checkpoint, if that monitored the same, in the same direction.

        Checkpoints without a mode took all metrics for better when higher, but those known to be better when lower.
        """
        if state is None or state["monitor"] != self.monitor:
            return
        mode = state.get("mode") or ("min" if HIGHER_IS_BETTER.get(self.monitor) is False else "max")
        if mode == ("max" if self.higher_is_better else "min"):
            self.value = math.nan if state["value"] is None else state["value"]
            self.step, self.since = state["step"], state["since"]
