"""What a user's callbacks are told of a run, on every rank."""

from typing import TYPE_CHECKING

from mpi4dl.engine import Evaluation, StepResult

if TYPE_CHECKING:
    from mpi4dl.trainer.run import TrainingRun


class Callback:
    """Methods that are called on every rank as a run goes on; a callback has those that it needs, of this class or not.

    `run.engine` is the engine, `run.epoch` the number of complete epochs, `run.say(line)` prints and logs a line once,
    and `run.stop()` ends the run after this step, with a checkpoint. All ranks must do the same.
    """

    def on_fit_start(self, run: "TrainingRun") -> None:
        """Everything is built, and a checkpoint was read if the run goes on from one."""

    def on_step_end(self, run: "TrainingRun", result: StepResult) -> None:
        """A step was made, or, under fp16, skipped."""

    def on_validation_end(self, run: "TrainingRun", evaluation: Evaluation) -> None:
        """The model was validated."""

    def on_epoch_end(self, run: "TrainingRun", epoch: int) -> None:
        """Epoch number `epoch`, from 1 on, and what comes behind it, are over."""

    def on_fit_end(self, run: "TrainingRun") -> None:
        """The last step was made and the weights are saved."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
