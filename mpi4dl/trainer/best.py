"""Which validation was the best, and whether it is worth going on: what --monitor and --patience ask for."""

import math
from dataclasses import dataclass
from typing import Any

from mpi4dl._wording import counted
from mpi4dl.engine import Evaluation
from mpi4dl.tasks.task import lower_is_better

BEST = "best.safetensors"


@dataclass
class Best:
    """The best value so far of what is monitored, at which step, and how many validations were no better since.

    `patience` is how many of those end the run; None: none do.
    """

    monitor: str
    patience: int | None
    value: float = math.nan
    step: int = 0
    since: int = 0

    def see(self, evaluation: Evaluation, step: int) -> bool:
        """Whether this validation is the best so far; what is not a number is no better than anything.

        Raises ValueError if what is monitored was not measured, or is not one number.
        """
        value = self.of(evaluation)
        ahead = value < self.value if lower_is_better(self.monitor) else value > self.value
        if ahead or (math.isnan(self.value) and not math.isnan(value)):
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

    def words(self) -> str:
        """Why the run ends."""
        after = counted(self.since, "validation")
        return f"val_{self.monitor} was best, {self.value:.6g}, at step {self.step}; {after} since then no better"

    def state(self) -> dict[str, Any]:
        value = None if math.isnan(self.value) else self.value
        return {"monitor": self.monitor, "value": value, "step": self.step, "since": self.since}

    def go_on(self, state: dict[str, Any] | None) -> None:
        """Take up from a checkpoint, if that monitored the same."""
        if state is not None and state["monitor"] == self.monitor:
            self.value = math.nan if state["value"] is None else state["value"]
            self.step, self.since = state["step"], state["since"]
