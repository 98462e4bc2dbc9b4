"""mpi4dl trains unmodified PyTorch models on images too large for one device, exactly, over MPI.

Most scripts need only these names. Each is imported on first use, and `world()` starts MPI:

    world           all ranks of the MPI job, or this one process
    parallelize     a model on tiles, in your own training loop
    tiles           the same in three calls
    Trainer         the command `mpi4dl train` as a class; Callback: its events
    TrainedModel    the result of a training: predict(), evaluate()
    Plan            which rank holds which stage, tile, and replica
    split           a model cut into the stages of a plan
    Engine          trains a model by a plan: step(), evaluate()
    Checkpoints     written while training continues, read under any plan
    Refusal         the one error that all ranks raise together
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from mpi4dl.checkpoints import Checkpoints
    from mpi4dl.comm import Refusal, world
    from mpi4dl.engine import Engine
    from mpi4dl.inference.trained_model import TrainedModel
    from mpi4dl.parallel.cut import split
    from mpi4dl.parallel.own_loop import parallelize, tiles
    from mpi4dl.parallel.plan import Plan
    from mpi4dl.training.trainer import Callback, Trainer

_HOMES = {
    "Callback": "mpi4dl.training.trainer",
    "Checkpoints": "mpi4dl.checkpoints",
    "Engine": "mpi4dl.engine",
    "Plan": "mpi4dl.parallel.plan",
    "Refusal": "mpi4dl.comm",
    "TrainedModel": "mpi4dl.inference.trained_model",
    "Trainer": "mpi4dl.training.trainer",
    "parallelize": "mpi4dl.parallel.own_loop",
    "split": "mpi4dl.parallel.cut",
    "tiles": "mpi4dl.parallel.own_loop",
    "world": "mpi4dl.comm",
}

__all__ = [
    "Callback",
    "Checkpoints",
    "Engine",
    "Plan",
    "Refusal",
    "TrainedModel",
    "Trainer",
    "parallelize",
    "split",
    "tiles",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
