"""`Trainer`: what the training command is, for scripts: every option is a keyword argument, and parts may be objects.

`setup.set_up` builds what the options name, each rank its part; `run.fit` goes through the epochs.
"""

from typing import Any

from mpi4dl.comm import Communicator, world
from mpi4dl.engine import Engine, Evaluation, StepResult
from mpi4dl.options.config import Config
from mpi4dl.options.declare import from_keywords
from mpi4dl.parallel.plan import Plan
from mpi4dl.training.run import TrainingRun, fit
from mpi4dl.training.setup import set_up


class Trainer:
    """Trains a model on images or text, over the ranks of an MPI job or in one process, as `mpi4dl train` does.

    Every option of the command (`mpi4dl train --help`) is a keyword argument of the same name, with
    underscores for dashes, as text (`tiles="2x2,1x1"`) or as a Python value (`tiles=((2, 2), (1, 1))`). Options that
    name a part also take an object:

    - `model`: an nn.Module; or a function that makes one, called with `num_classes` and `in_channels`, if it has such
      parameters, and `model_options`.
    - `dataset`: a `mpi4dl.datasets.Dataset`, or a pair of them, for training and validation.
    - `loss(outputs, targets)`: a function that returns the mean over its samples; or a name, such as
      "dice+cross_entropy".
    - `metrics`: objects with `update(predictions, targets)` and `compute()`, such as those of torchmetrics, classes of
      them, or functions of predictions and targets; or names, such as "auc".
    - `optimizer`: an optimizer class, or a function of parameters that makes an optimizer.
    - `callbacks`: objects with some of the methods of `mpi4dl.Callback`.

    All ranks create it together, with the same options. Errors raise `mpi4dl.Refusal` (a ValueError) on all ranks.

        trainer = mpi4dl.Trainer(model=build, dataset=(training, validation), loss=loss, image_size=(512, 512),
                                 stages=2, tiles="2x2,1x1", epochs=3, lr=0.01)
        print(trainer.fit())
    """

    def __init__(self, *, comm: Communicator | None = None, **options: Any) -> None:
        comm = world() if comm is None else comm
        with comm.together((ValueError,)):
            config = from_keywords(Config, options)
        self._setup = set_up(config, comm)
        self.comm, self.config = comm, self._setup.config

    @property
    def engine(self) -> Engine:
        return self._setup.engine

    @property
    def plan(self) -> Plan:
        return self._setup.assembly.plan

    def fit(self) -> Evaluation | None:
        """Train: all epochs, with validations, checkpoints and reports. Returns the last validation. Collective."""
        return fit(self._setup)


# The events that callbacks of the user receive, on every rank.


class Callback:
    """Methods that a run calls on every rank. A callback defines those that it needs, and need not inherit from this
    class.

    `run.engine` is the engine, `run.epoch` the number of complete epochs, `run.say(line)` prints and logs a line once,
    and `run.stop()` ends the run after this step, with a checkpoint. All ranks must do the same.
    """

    def on_fit_start(self, run: TrainingRun) -> None:
        """Everything is built, and a resumed run has loaded its checkpoint."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """A step was made, or, under fp16, skipped."""

    def on_validation_end(self, run: TrainingRun, evaluation: Evaluation) -> None:
        """The model was validated."""

    def on_epoch_end(self, run: TrainingRun, epoch: int) -> None:
        """Epoch number `epoch`, counted from 1, is complete, with validation and saving."""

    def on_fit_end(self, run: TrainingRun) -> None:
        """The last step was made and the weights are saved."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, tensors and nests of them for a checkpoint, which has those of rank 0."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run resumes from a checkpoint that has a state for the callback at this place."""
