"""Options of the task: its loss, its metrics, and the monitor of the best weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4dl.checkpoints.weights import features_in
from mpi4dl.comm import Communicator
from mpi4dl.options.config import Config, ConfigError
from mpi4dl.options.declare import nearest, value_of, with_values
from mpi4dl.options.kinds import AUTO, part_name
from mpi4dl.options.optimizers import usual_rate
from mpi4dl.options.parts import call, is_own, load
from mpi4dl.options.sources import source_of
from mpi4dl.tasks.directions import higher_is_better
from mpi4dl.tasks.metrics import make_metric
from mpi4dl.tasks.task import TASKS, Task

BALANCED = "balanced"  # of `class_weights`
LARGEST_UNIT_VALUE = 2.0  # of means and deviations of pixels from 0 to 1, with room for unusual ones


def with_task(config: Config, dataset: Any) -> Config:
    """The configuration with the task that auto is, of text or of what a dataset has labels for.

    Options that are AUTO get the defaults of the task. Raises ConfigError for a task that is none of these,
    and for a mean or a deviation of another scale than pixels have.
    """
    asked, source = config.data.task, source_of(config)
    if getattr(dataset, "values", None) != "float32":
        _require_unit_scale(config)
    if asked == "auto":
        return with_defaults(with_values(config, {"task": source.task_of(dataset)}))
    if TASKS[asked].of_text != source.of_text:
        of_text = " or ".join(name for name, task in TASKS.items() if task.of_text)
        what, wanted = ("text", of_text) if source.of_text else ("images", "one of images")
        raise ConfigError(f"`task` {asked} is not for {what}: choose {wanted}, or auto")
    return with_defaults(config)


def _require_unit_scale(config: Config) -> None:
    """Raise ConfigError for a mean or a deviation of pixels from 0 to 255, in a new run on pictures.

    Datasets of the user's own and volumes may have values of any range.
    """
    data = config.data
    if not source_of(config).is_pictures or config.run.resume != "none":
        return
    for name, values in (("mean", data.mean), ("std", data.std)):
        if isinstance(values, tuple) and max(map(abs, values)) > LARGEST_UNIT_VALUE:
            given, scaled = (",".join(f"{value / scale:.3g}" for value in values) for scale in (1, 255))
            raise ConfigError(
                f"`{name}` {given} is for pixels from 0 to 255, but pixels range from 0 to 1 here: choose {scaled}"
            )


def with_defaults(config: Config) -> Config:
    """The configuration with the defaults of its task (`Task.defaults`) for the options that are AUTO.

    The rate and the options of the optimizer are those of the task for its own optimizer alone; there is no second
    schedule beside a `scheduler`, no warm-up of a constant rate, and only pictures are mirrored. Raises ConfigError.
    """
    chosen, usual = config.optimizer, dict(TASKS[config.data.task].defaults)
    if chosen.optimizer not in (AUTO, usual["optimizer"]):
        usual |= {"lr": usual_rate(chosen.optimizer), "optimizer_options": {}}
    if chosen.scheduler:
        usual["lr_schedule"] = "constant"
    if (usual["lr_schedule"] if chosen.lr_schedule == AUTO else chosen.lr_schedule) == "constant":
        usual["warmup"] = 0
    if len(config.data.image_size) != 2:
        usual["flip"] = "none"
    return with_values(config, {name: value for name, value in usual.items() if value_of(config, name) == AUTO})


def build_task(config: Config, dataset: Any, num_classes: int) -> Task:
    """The task with its loss, by name or the user's own. Raises ConfigError."""
    config = with_class_weights(config, dataset, num_classes)
    part, options = config.training.loss, dict(config.training.loss_options)
    weights, own = config.learning.class_weights, part is not None and is_own(part)
    asked = {"class_weights": weights is not None, "label_smoothing": bool(config.learning.label_smoothing)}
    if own:
        _require_taken("loss", part, [name for name, given in asked.items() if given])
    if weights is not None:
        options["class_weights"] = weights
    if config.learning.label_smoothing:
        options["label_smoothing"] = config.learning.label_smoothing
    if config.slides.weight_column is not None:
        _require_weights(config, dataset)
    if own:
        return TASKS[config.data.task](num_classes, _own_loss(part, options))
    if isinstance(vgg := options.get("vgg"), str):
        options["vgg"] = features_in(vgg, "`loss_options` vgg")
    auxiliary = options.pop("auxiliary", None)
    task = TASKS[config.data.task](num_classes, part, options, auxiliary)
    task.own_loss()
    if weights is not None and len(options["class_weights"]) != task.num_outputs:
        raise ConfigError(
            f"`class_weights` has {len(options['class_weights'])} numbers, but there are {task.num_outputs} classes: "
            "give one for each"
        )
    return task


def with_class_weights(
    config: Config, dataset: Any, num_classes: int, comm: Communicator | None = None, known: str | None = None
) -> Config:
    """The configuration with the numbers of `class_weights` that are balanced, or `known` from the start of the run.

    Collective over `comm`, whose ranks share the work of counting the pixels of masks. Raises ConfigError.
    """
    if config.learning.class_weights != BALANCED:
        return config
    if known is not None:
        return with_values(config, {"class_weights": tuple(map(float, known.split(",")))})
    part, options = config.training.loss, dict(config.training.loss_options)
    loss = None if part is not None and is_own(part) else part
    found = TASKS[config.data.task](num_classes, loss, options).balanced_weights(dataset, comm)
    if found is None:
        raise ConfigError(
            f"`class_weights` balanced counts labels, which `task` {config.data.task} has none of, or of which a "
            "pixel may have several: give a number for each class, such as 1,2.5"
        )
    return with_values(config, {"class_weights": tuple(found)})


def compares_samples(config: Config) -> bool:
    """Whether the loss, which has a name, compares all samples of a batch: then nothing may cut it."""
    loss = config.training.loss
    return "cox" in str(TASKS[config.data.task].default_loss if loss is None else loss).split("+")


def _require_weights(config: Config, dataset: Any) -> None:
    """Raise ConfigError where the loss of a sample cannot be multiplied by a weight of its own."""
    loss, mixup = config.training.loss, config.data.mixup
    problems = {
        "samples have no table with such a column": getattr(dataset, "weights", None) is None,
        f"`mixup` {mixup} mixes samples of several weights: leave one of them out": bool(mixup),
        "your own loss gets no weights: choose a `loss` by name": loss is not None and is_own(loss),
        "`loss` cox compares samples with each other: choose another `loss`": compares_samples(config),
    }
    problem = next((each for each, found in problems.items() if found), None)
    if problem is not None:
        raise ConfigError(f"`weight_column` {config.slides.weight_column}: {problem}")


def _require_taken(option: str, part: Any, names: Sequence[str]) -> None:
    """Raise ConfigError unless an own part has parameters for these options."""
    try:
        parameters = inspect.signature(load(option, part)).parameters
    except (TypeError, ValueError):  # written in C: calling it tells
        return
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name in names:
        if not anything and name not in parameters:
            raise ConfigError(
                f"`{name}` is not taken by the own `{option}` {part_name(part)}: name a class, or a function that "
                f"makes a loss, with a parameter {name}, or leave `{name}` out"
            )


def _own_loss(part: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """loss(outputs, targets), or of a class, or with options, what it makes."""
    made = load("loss", part)
    if options and not inspect.isclass(made) and _takes_outputs(made):
        _require_taken("loss", part, [*options])
        return partial(made, **options)
    if inspect.isclass(made) or options:
        made = call("loss", part, **options)
    if not callable(made):
        raise ConfigError(f"`loss` {part_name(part)} is a {type(made).__name__}, which cannot be called")
    return made


def _takes_outputs(made: Any) -> bool:
    """Whether this is a loss itself, a function of outputs and targets, and not what makes one."""
    try:
        parameters = [*inspect.signature(made).parameters.values()]
    except (TypeError, ValueError):
        return False
    return sum(each.default is each.empty and each.kind == each.POSITIONAL_OR_KEYWORD for each in parameters) >= 2


def build_metrics(config: Config, task: Task) -> dict[str, Any]:
    """A factory of each metric, by name: of the task, or the user's own. Raises ConfigError."""
    asked = config.learning.metrics
    if asked in (("none",), ()):
        return {}
    if asked == ("auto",):
        monitor = (config.learning.monitor or "").removeprefix("val_")
        more = (monitor,) if monitor in task.metric_names and monitor != "accuracy" else ()
        own = task.accuracy and not (task.loss is None or isinstance(task.loss, str))
        usual = () if own else task.usual_metrics  # of an own loss nobody knows whether outputs are logits
        return dict(task.metrics(tuple(dict.fromkeys((*usual, *more)))))
    found: dict[str, Any] = {}
    for part in asked:
        if not is_own(part):
            if part not in task.metric_names:
                known = ", ".join(task.metric_names) or "none by name"
                raise ConfigError(
                    f"`metrics` {part}: `task` {task.name} has {known}, or name your own, such as my_code.py:Metric"
                    f"{nearest(part, task.metric_names)}"
                )
            found |= task.metrics([part])
            continue
        made = load("metrics", part)
        name = part.rpartition(":")[2] if isinstance(part, str) else part_name(part).rpartition(":")[2]
        found[name.rpartition(".")[2]] = partial(call, "metrics", made) if inspect.isclass(made) else made
    return found


class Monitor(NamedTuple):
    """The monitor of the best weights: its name, without val_, and whether higher values are better.

    `patience` is how many validations that are no better end the run; None: none do.
    """

    name: str
    higher_is_better: bool
    patience: int | None = None


def monitored(config: Config, task: Task, metrics: Mapping[str, Any]) -> Monitor | None:
    """The monitor of the best weights; None if there is none. Raises ConfigError."""
    chosen = config.learning
    if chosen.monitor is None and chosen.patience is None:
        return None
    if config.training.eval_every is None:
        raise ConfigError("`monitor` and `patience` look at validations, of which `eval_every` none makes none")
    known = ["loss", *(["accuracy"] if task.accuracy else []), *metrics]
    if chosen.monitor is None:
        name = task.monitor if task.monitor in known else "loss"
    else:
        name = chosen.monitor.removeprefix("val_")
    if name.partition("/")[0] not in known:
        raise ConfigError(
            f"`monitor` {chosen.monitor} is not measured: choose of {', '.join(f'val_{each}' for each in known)}, or "
            "add it to `metrics`"
        )
    higher = direction_of(name, metrics)
    if higher is None:
        raise ConfigError(
            f"`monitor` val_{name}: it is unknown whether higher or lower values are better: give the "
            "metric an attribute `higher_is_better`"
        )
    return Monitor(name, higher, chosen.patience)


def directions(task: Task, metrics: Mapping[str, Any], monitor: Monitor | None) -> dict[str, bool | None]:
    """Of all that a validation measures, whether higher values are better; None where nobody says so."""
    found: dict[str, bool | None] = {"loss": False, "bits_per_byte": False}
    found |= {"accuracy": True} if task.accuracy else {}
    for name, made in metrics.items():
        own = _own_metric(made)
        found[name] = higher_is_better(name, own)
        if not isinstance(own, type) and hasattr(own, "add_metrics"):  # a collection of torchmetrics'
            found |= {f"{name}/{key}": higher_is_better(f"{name}/{key}", own) for key in own}
    return found if monitor is None else found | {monitor.name: monitor.higher_is_better}


def _own_metric(made: Any) -> Any:
    """An own metric as the user has it, of what makes it: an object, a class or a function; None of one of ours."""
    if not isinstance(made, partial):
        return made
    return made.args[1] if made.func is call else None if made.func is make_metric else made.func


def direction_of(name: str, metrics: Mapping[str, Any]) -> bool | None:
    """Whether higher values of what a validation measures are better; None if nobody says so. Raises ConfigError."""
    made = metrics.get(name.partition("/")[0])
    own = _own_metric(made)
    if isinstance(own, type) and not isinstance(getattr(own, "higher_is_better", None), bool):
        own = made() if isinstance(made, partial) else call("metrics", own)  # it may say it when it is made
    return higher_is_better(name, own)
