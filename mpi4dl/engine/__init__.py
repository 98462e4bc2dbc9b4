"""The engine: a model and a plan become `step()` and `evaluate()`, exact for any plan."""

from mpi4dl.engine.engine import Engine, NotFinite, StepResult
from mpi4dl.engine.evaluating import BatchOutputs, Evaluation, OutputPiece

__all__ = ["BatchOutputs", "Engine", "Evaluation", "NotFinite", "OutputPiece", "StepResult"]
