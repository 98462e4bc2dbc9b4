"""`Trainer`: what the training command is, for scripts: every option is a keyword argument, and parts may be objects.

It builds what the options name, each rank its part; `run.TrainingRun` goes through the epochs.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mpi4dl._memory import MemoryMeter, keep_freed_memory, load_libraries
from mpi4dl.checkpoints.weights import load_weights
from mpi4dl.comm import Communicator, world
from mpi4dl.engine import Engine, Evaluation, StepResult
from mpi4dl.estimate.dry_run import stream_of, told_before
from mpi4dl.options import build, parts
from mpi4dl.options.config import Config, ConfigError, facts
from mpi4dl.options.declare import from_keywords
from mpi4dl.options.models import blaming_the_model, hold_model, without_rules
from mpi4dl.options.optimizers import build_optimizer, build_schedule, groups_of
from mpi4dl.options.tasks import build_metrics, build_task, monitored, with_task
from mpi4dl.training.data import open_images, open_texts
from mpi4dl.training.resuming import as_it_began, as_it_was_cut
from mpi4dl.training.run import TrainingRun
from mpi4dl.training.stopping import Patience

if TYPE_CHECKING:
    from mpi4dl.training.run import TrainingRun

OWN_PARTS = (
    ("model", "model"),
    ("data", "dataset"),
    ("data", "transforms"),
    ("optimizer", "optimizer"),
    ("training", "loss"),
    ("learning", "metrics"),
    ("run", "callbacks"),
)


def as_it_is(message: str) -> str:
    """The words of the library, in which arguments have their names."""
    return message


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
    - `callbacks`: objects with some of the methods of `mpi4dl.training.run.Callback`.

    All ranks create it together, with the same options. Errors raise `mpi4dl.Refusal` (a ValueError) on all ranks.

        trainer = mpi4dl.Trainer(model=build, dataset=(training, validation), loss=loss, image_size=(512, 512),
                                 stages=2, tiles="2x2,1x1", epochs=3, lr=0.01)
        print(trainer.fit())
    """

    def __init__(self, *, comm: Communicator | None = None, **options: Any) -> None:
        comm = world() if comm is None else comm
        with comm.together((ValueError,)):
            config = from_keywords(Config, options)
        self._build(config, comm, as_it_is, ())

    @classmethod
    def of_command(
        cls, config: Config, comm: Communicator, spell: Callable[[str], str], argv: Sequence[str]
    ) -> "Trainer":
        """The same for the command line `argv`, whose messages `spell` puts in its words."""
        trainer = cls.__new__(cls)
        trainer._build(config, comm, spell, argv)
        return trainer

    def _build(self, config: Config, comm: Communicator, spell: Callable[[str], str], argv: Sequence[str]) -> None:
        self.comm, self.config = comm, config
        comm.agree(None, **facts(config))
        with comm.together((ValueError,)):
            prints = {}
            for section, name in OWN_PARTS:
                part = getattr(getattr(config, section), name)
                for each in part if isinstance(part, tuple) else () if part is None else (part,):
                    if parts.is_own(each):
                        parts.load(name, each)
                        prints[f"the file of `{name}` {parts.part_name(each)}"] = parts.print_of(each)
        comm.agree(None, **prints)
        with comm.together((ValueError,)):
            self.plan = plan = build.build_plan(config)
        comm.agree(plan.problem(comm.size, config.data.image_size, config.samples_per_step))
        comm.node.share_cores(config.parallel.threads)
        keep_freed_memory(config.parallel.keep_freed_memory)
        self._patience = patience = Patience(config.parallel.hang_timeout)
        with comm.together():
            device = comm.node.device(config.parallel.device)
        if device.type == "cuda" or config.parallel.gpu_wire == "nccl":
            comm.choose_gpu_wire(config.parallel.gpu_wire)
        load_libraries(device)
        text = config.data.text is not None
        images = open_texts(comm, config) if text else open_images(comm, config)
        patience.feed()
        config = as_it_began(comm, config)
        with comm.together((ValueError, TypeError)):
            self.config = config = with_task(config, images.training)
            task = build_task(config, images.training, images.number_of_classes(config), comm)
            metrics = build_metrics(config, task)
            monitor = monitored(config, task, metrics)
            meter = MemoryMeter(device)
            self._num_classes = num_classes = task.num_outputs
            cut = as_it_was_cut(comm, config, plan)
            channels = images.channels
            stream = stream_of(config, plan, num_classes, channels, device)
            model = hold_model(cut, plan, num_classes, channels, comm, device, stream)
        patience.feed()
        chosen, remarks = config.tuning, []
        if chosen.weights is not None:
            remarks = load_weights(model, chosen.weights, model=config.model_name, strict=chosen.strict)
        with comm.together((ValueError, TypeError)):
            optimizer = build_optimizer(config, groups_of(config, model))
            schedule = build_schedule(config, optimizer)
        with comm.together((ConfigError, OSError)):
            options = build.engine_options(config)
        self.engine = Engine(model, plan, optimizer, task.objective, comm=comm, **options)
        self.engine.executor.progress = patience.feed
        with comm.together((ValueError,)):
            callbacks = build.build_callbacks(config)
            self._run = TrainingRun(
                config, self.engine, schedule, images, num_classes, patience, meter, spell=spell, argv=argv
            )
            self._run.callbacks, self._run.remarks = tuple(callbacks), tuple(remarks)
            self._run.watch(task, metrics, monitor)

    def fit(self) -> Evaluation | None:
        """Train: all epochs, with validations, checkpoints and reports. Returns the last validation. Collective."""
        with without_rules(self.config), ExitStack() as closing:
            closing.callback(self._patience.stop)
            told = told_before(self.config, self.engine, self._num_classes, self._run.channels)
            self._run.remarks += tuple(told)
            self._patience.feed()
            if self.config.run.dry_run:
                self._run.explain()
                return None
            self._run.open(closing)
            with blaming_the_model(self.config, self.plan, self._num_classes, self._run.channels):
                self._run.all_epochs()
        return self._run.evaluation


# The events that callbacks of the user receive, on every rank.


class Callback:
    """Methods that a run calls on every rank. A callback defines those that it needs, and need not inherit from this
    class.

    `run.engine` is the engine, `run.epoch` the number of complete epochs, `run.say(line)` prints and logs a line once,
    and `run.stop()` ends the run after this step, with a checkpoint. All ranks must do the same.
    """

    def on_fit_start(self, run: "TrainingRun") -> None:
        """Everything is built, and a resumed run has loaded its checkpoint."""

    def on_step_end(self, run: "TrainingRun", result: StepResult) -> None:
        """A step was made, or, under fp16, skipped."""

    def on_validation_end(self, run: "TrainingRun", evaluation: Evaluation) -> None:
        """The model was validated."""

    def on_epoch_end(self, run: "TrainingRun", epoch: int) -> None:
        """Epoch number `epoch`, counted from 1, is complete, with validation and saving."""

    def on_fit_end(self, run: "TrainingRun") -> None:
        """The last step was made and the weights are saved."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
