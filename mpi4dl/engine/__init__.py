"""The engine: a model and a plan become `step()` and `evaluate()`, exact for any plan."""

from mpi4dl.engine.engine import Engine, Evaluation, NotFinite, StepResult

__all__ = ["Engine", "Evaluation", "NotFinite", "StepResult"]
