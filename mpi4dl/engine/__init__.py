"""The engine: a model and a plan become `step()`, `evaluate()` and `predict()`, exact for any plan."""

from mpi4dl.engine.engine import Engine, EngineOptions, NotFinite, StepResult
from mpi4dl.engine.runner import BatchOutputs, Evaluation, OutputPiece, Runner

__all__ = ["BatchOutputs", "Engine", "EngineOptions", "Evaluation", "NotFinite", "OutputPiece", "Runner", "StepResult"]
