"""The parts of a training before its folder is chosen: images or texts, task, model, optimizer, engine.

Before the first step rank 0 counts what each rank needs, on shapes. Each node adds up its own ranks, and compares the
sum with what it has.

    need > REFUSED x memory    the run is refused, with what fits
    need > memory              the run warns, with what fits

A run that is small by a generous guess is not counted, and imports nothing that counts.
"""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4dl._memory import MemoryMeter, load_libraries, place_of
from mpi4dl._progress import ProgressLine, StartClock
from mpi4dl._wording import Tell, quietly, some
from mpi4dl.checkpoints.manifest import STATE
from mpi4dl.checkpoints.weights import load_weights, open_weights
from mpi4dl.comm import Communicator, Refusal
from mpi4dl.datasets.base import printable
from mpi4dl.datasets.loader import Loader
from mpi4dl.datasets.split import in_whole
from mpi4dl.engine import Engine
from mpi4dl.geometry import Box
from mpi4dl.models.registry import described
from mpi4dl.options import build
from mpi4dl.options.build import TrainingSpec
from mpi4dl.options.config import OF_THE_TASK, Config, ConfigError, facts, shared_options, to_toml
from mpi4dl.options.declare import flags_for, require_effect, saying, value_of, with_options, with_values, without_flags
from mpi4dl.options.declare import without_effect as options_without_effect
from mpi4dl.options.kinds import AUTO
from mpi4dl.options.optimizers import Schedule, build_optimizer, build_schedule, groups_of
from mpi4dl.options.parts import call, load
from mpi4dl.options.sections.data import MEASURED
from mpi4dl.options.sources import TextSource, in_folder_of_fold, source_of, with_frame
from mpi4dl.options.tasks import BALANCED, Monitor, build_metrics, build_task, monitored, with_class_weights, with_task
from mpi4dl.parallel.inputs import Shape, of_tokens, own_or
from mpi4dl.parallel.plan import Plan
from mpi4dl.runs.assembly import ModelAssembly, assemble
from mpi4dl.runs.description import Description, described_weights
from mpi4dl.runs.stopping import HangTimeout
from mpi4dl.tasks.task import Task
from mpi4dl.training.data import Images, before, measured, open_alone, open_images
from mpi4dl.training.report import goal, title, without_effect
from mpi4dl.training.resuming import BALANCE, CLASS_WEIGHTS, FROM_CHECKPOINT, TIMED, files_of, options_before

if TYPE_CHECKING:
    from mpi4dl.estimate.workload import Workload
    from mpi4dl.training.texts import Texts


@dataclass(frozen=True)
class Setup:
    """Everything that is trained with, the same on all ranks but for their parts of the model and of batches.

    `spell` puts the names of options in messages as the user typed them; `argv` is the command line. `balance` are the
    numbers of `class_weights`.
    """

    config: Config
    assembly: ModelAssembly
    engine: Engine
    schedule: Schedule
    images: "Images | Texts"
    training: Loader
    validation: Loader
    task: Task
    metrics: Mapping[str, Any]
    monitor: Monitor | None
    callbacks: Sequence[Any]
    remarks: Sequence[str]
    patience: HangTimeout
    meter: MemoryMeter
    spell: Callable[[str], str]
    argv: Sequence[str]
    balance: Any
    start_clock: StartClock

    @property
    def num_steps(self) -> int:
        return build.number_of_steps(self.config.training, len(self.training))

    @property
    def spec(self) -> TrainingSpec:
        return TrainingSpec(self.config, self.task.num_outputs, self.images.channels)

    @property
    def options(self) -> dict[str, str]:
        """The options by which a run that goes on is compared, with the code of the user's."""
        balanced = self.config.learning.class_weights == BALANCED
        counted = {CLASS_WEIGHTS: ",".join(map(repr, self.balance))} if balanced else {}
        return {**shared_options(self.config), **files_of(self.assembly.prints), **counted}

    def toml(self, before: Mapping[str, str], checkpoint: Path | None) -> str:
        """All options as a TOML file: those that a checkpoint knows better are as they were `before`."""
        return to_toml(self.config if checkpoint is None else with_its_own(self.config, before, checkpoint))

    def first_lines(self) -> list[str]:
        """The title of the run, what it learns, and remarks on options without effect."""
        config, engine = self.config, self.engine
        learnt = goal(config.optimizer, config.training, engine, self.task, self.num_steps)
        remarks = [*options_without_effect(config, changes_results=False), *without_effect(config.parallel, engine)]
        return [title(self.spec, engine), learnt, *remarks]

    def about(self) -> Description:
        return Description.of(self.config, self.images, self.task.num_outputs)

    def workload(self, tell: Tell = quietly) -> "Workload":
        """What is estimated. Patches of slides are counted."""
        from mpi4dl.estimate.workload import Workload, patches_of_slides

        spec = self.spec
        patches = patches_of_slides(spec.source, self.images.training, tell)
        return Workload(self.config, spec.num_outputs, spec.channels, patches, len(self.training))

    def workload_of_loss(self) -> "Workload":
        """The same, with what the loss can be tried on, for a rank alone."""
        loader = _loader_of_targets(self.config, self.images)
        return replace(self.workload(), task=self.task, targets=_first_targets(loader))


def set_up(config: Config, comm: Communicator, spell: Callable[[str], str] = str, argv: Sequence[str] = ()) -> Setup:
    """Build what a configuration names, each rank its part. Collective; raises Refusal on all ranks."""
    start_clock = StartClock()
    start_clock.end("imports")
    comm.agree(None, **facts(config))
    with comm.together((ConfigError,)):
        require_effect(config)
    config = framed(in_folder_of_fold(config), comm)
    require_weights(config, comm)
    chosen_plan: list[str] = []
    if config.parallel.plan is not None:
        from mpi4dl.training.fastest_plan import fastest_plan

        options, told = fastest_plan(config.parallel, comm, partial(with_samples, config))
        flags = shlex.join(flags_for(with_values(config, {"plan": None}), options))
        chosen_plan = [f"{told}; to keep it, replace --plan auto by {flags or 'nothing'}"]
        config = with_values(config, options)
    assembly = assemble(config, comm, num_samples=config.samples_per_step)
    patience = HangTimeout(config.parallel.hang_timeout)
    load_libraries(assembly.device, shapes=assembly.plan.num_stages > 1 or config.streams_images)
    start_clock.end("plan")
    images = open_samples(config, comm)
    start_clock.end("samples")
    patience.feed()
    known = options_before(comm, config.run)
    config = as_it_began(config, known)
    config, of_measured = with_measured(config, comm, images, patience, known)
    config, of_covariates = with_covariates(config, comm, images, known)
    with comm.together((ValueError, TypeError)):
        config = with_task(config, images.training)
        count = source_of(config).number_of_classes(images.training)
        weighed = with_class_weights(config, images.training, count, comm, known.get(CLASS_WEIGHTS))
        task = build_task(weighed, images.training, count)
        metrics = build_metrics(config, task)
        monitor = monitored(config, task, metrics)
        meter = MemoryMeter(assembly.device)
    cut = as_it_was_cut(comm, config, assembly.plan)
    assembly = replace(assembly, config=config)
    model = replace(assembly, config=cut).hold(task.num_outputs, images.channels)
    start_clock.end("model")
    patience.feed()
    chosen, remarks = config.tuning, described(config.model_name, config.model.model_options)
    if chosen.weights is not None:
        remarks += load_weights(model, chosen.weights, model=config.model_name, strict=chosen.strict)
        remarks += of_another_head(config, comm, tuple(images.classes))
    with comm.together((ValueError, TypeError)):
        optimizer = build_optimizer(config, groups_of(config, model))
        schedule = build_schedule(config, optimizer)
    with comm.together((ConfigError, OSError)):
        options = build.engine_options(config)
    engine = Engine(model, assembly.plan, optimizer, task.objective, comm=comm, **options)
    engine.executor.progress = patience.feed

    def boxes(num_samples: int, sizes: Sequence[Shape] | None = None, training: bool = True) -> list[Box]:
        return [read.box for read in engine.reads(num_samples, own_or(sizes, config.data.image_size), training)]

    with comm.together((ValueError,)):
        made = [load("callbacks", part) for part in config.run.callbacks]
        callbacks = [call("callbacks", part) if inspect.isclass(part) else part for part in made]
        loaders = source_of(config).loaders(images, boxes, partial(boxes, training=False))
        schedule.begin(build.number_of_steps(config.training, len(loaders[0])))
    start_clock.end("engine")
    return Setup(
        config, assembly, engine, schedule, images, *loaders, task, metrics, monitor, callbacks,
        [*chosen_plan, *of_measured, *of_covariates, *remarks], patience,
        meter, spell, argv, weighed.learning.class_weights, start_clock,
    )  # fmt: skip


def require_weights(config: Config, comm: Communicator) -> None:
    """Raise Refusal on all ranks if the weights to begin with cannot be read, before a large model is made."""
    if config.tuning.weights is None:
        return
    with comm.together((ValueError, OSError)):
        if comm.rank == 0:
            open_weights(config.tuning.weights, config.model_name)


def of_another_head(config: Config, comm: Communicator, classes: tuple[str, ...]) -> list[str]:
    """Warnings if the weights are of a run with as many classes or columns of covariates, but others, whose last layer
    is taken over. Collective.
    """
    found: list[tuple[str, ...]] = []
    with suppress(ValueError, OSError):  # a file beside the weights that is none of a run
        about = None if comm.rank else described_weights(config.tuning.weights or "", config.model_name)
        if about is not None:
            kept = {name: value for name, value in about.options.items() if name == "covariates"}
            found = [about.classes, columns_of(with_options(Config(), kept))]
    theirs, ours = comm.broadcast_object(found), (classes, columns_of(config))
    return [
        printable(
            f"warning: the weights are of the {what} {some(then, 5)}, and the samples here of {some(now, 5)}: the last "
            "layer is taken over, in this order"
        )
        for what, then, now in zip(("classes", "covariates"), theirs, ours, strict=False)
        if then != now and len(then) == len(now)
    ]


def columns_of(config: Config) -> tuple[str, ...]:
    """What each number stands for that is beside the embedding of a slide."""
    return tuple(
        name
        for each in config.slides.covariates
        for name in ([each.column] if each.of_numbers else [f"{each.column} {name}" for name in each.fit])
    )


def with_measured(
    config: Config, comm: Communicator, images: "Images | Texts", patience: HangTimeout, known: Mapping[str, str]
) -> tuple[Config, list[str]]:
    """The configuration with the numbers of a mean and a deviation that are measured: those of the run that is resumed,
    whose options are `known`, or of its training images; and a remark on the former. Collective; raises Refusal.
    """
    asked = _to_measure(config)
    source = source_of(config)
    numberless = source.of_text or source.of_slides
    comm.agree(f"`{asked[0]}` measured is not for {source.noun}s: give numbers" if asked and numberless else None)
    if known and asked:
        kept = {name: known[name] for name in asked}
        shown = {name: value.strip('"') for name, value in kept.items()}
        return with_options(config, kept), [f"`{name}` is that of the start: {each}" for name, each in shown.items()]
    training: Any = images.training
    found = measured(comm, training, patience) if asked else {}
    return with_values(config, {name: found[name] for name in asked}), []


def with_covariates(
    config: Config, comm: Communicator, images: "Images | Texts", known: Mapping[str, str]
) -> tuple[Config, list[str]]:
    """The configuration with its covariates fitted to the patients to train on, or as the run that is resumed has them;
    and remarks on these. Collective; raises Refusal.
    """
    asked = config.slides.covariates
    if not asked:
        return config, []
    from mpi4dl.datasets.covariates import fitted, remarks

    parts: Any = images
    (whole, indices), (_, others) = in_whole(parts.training), in_whole(parts.validation)
    with comm.together((ValueError,)):
        before = {"covariates": known["covariates"]} if "covariates" in known else {}
        found = with_options(with_values(config, {"covariates": ()}), before).slides.covariates
        if [each.text for each in found] != [each.text for each in asked]:
            found = fitted(asked, whole.rows, indices)
        rows = [whole.rows[index] for index in (*indices, *others)]
        told = [f"covariates {', '.join(each.described() for each in found)}", *remarks(found, rows, whole.source)]
    return with_values(config, {"covariates": found}), [printable(line) for line in told]


def _to_measure(config: Config) -> list[str]:
    return [name for name in ("mean", "std") if value_of(config, name) == MEASURED]


def framed(config: Config, comm: Communicator) -> Config:
    """The configuration with the image size of its slides, found by rank 0. Collective; raises Refusal."""
    found = None
    with comm.together((ValueError, OSError)):
        config = source_of(config).prepared()
        if comm.rank == 0:
            found = source_of(config).framed(lambda: None if (kept := before(config.run)) is None else kept.fit)
    names = ("image_size", "fit", "stain_reference")
    return with_values(config, comm.broadcast_object(found and {name: value_of(found, name) for name in names}))


def open_samples(config: Config, comm: Communicator | None = None) -> "Images | Texts":
    """The images or texts that a configuration names, the same on all ranks of `comm`, which raise Refusal together.

    Without `comm` they are for a process that is no rank of a job. Raises ValueError and OSError.
    """
    source = source_of(config)
    if not isinstance(source, TextSource):
        return open_alone(source) if comm is None else open_images(comm, source, config.run)
    from mpi4dl.training.texts import open_text_alone, open_texts

    return open_text_alone(source) if comm is None else open_texts(comm, source, config.run)


def with_samples(config: Config, tell: Tell = quietly) -> "Workload":
    """What an estimate needs to know of a training: the configuration with the task of its samples, and these.

    For a process that is no rank of a job. Raises ValueError and OSError.
    """
    from mpi4dl.estimate.workload import Workload, patches_of_slides

    config = with_frame(config)
    numbers = {"mean": (0.5,), "std": (0.25,)}  # which change no estimate
    config = with_values(config, {name: numbers[name] for name in _to_measure(config)})
    samples = open_samples(config)
    config = with_task(config, samples.training)
    source = source_of(config)
    loader = _loader_of_targets(config, samples)
    task = build_task(config, samples.training, source.number_of_classes(samples.training))
    monitored(config, task, build_metrics(config, task))  # raises what a training would
    patches = patches_of_slides(source, samples.training, tell)
    return Workload(config, task.num_outputs, samples.channels, patches, len(loader), task, _first_targets(loader))


def _loader_of_targets(config: Config, samples: "Images | Texts") -> Loader:
    """The loader of batches to train on as a rank has it that reads no inputs. Raises ConfigError, and ValueError."""
    alone = source_of(with_values(config, {"num_workers": 0}))
    return alone.loaders(samples, lambda *_: [], lambda *_: [])[0]


def _first_targets(loader: Loader) -> Any:
    """The targets of the first batch; None if they cannot be read: a training says what is wrong with a sample."""
    with suppress(ValueError, OSError):
        return next(iter(loader.epoch(0))).targets
    return None


def to_print(config: Config) -> str:
    """All options as a TOML file, with the defaults of the task, if it is known or the images tell it."""
    try:
        told = source_of(config).of_text or config.data.task != AUTO
        training = None if told else source_of(config).open()[0]
    except (ValueError, OSError) as problem:
        reason = printable(str(problem)).partition("\n")[0]
        return f"# auto: what suits the task of the images, which cannot be opened: {reason}\n{to_toml(config)}"
    return to_toml(with_task(config, training))


def as_it_began(config: Config, known: Mapping[str, str]) -> Config:
    """The configuration with the values of the checkpoint that `resume` names, `known`, for the options that are AUTO.

    Raises Refusal, alike on all ranks, for a schedule beside that of the checkpoint.
    """
    names = [name for name in OF_THE_TASK if value_of(config, name) == AUTO]
    if not names or not known:
        return config
    found = with_options(config, {name: known[name] for name in names if name in known})
    was, now = known.get("scheduler"), shared_options(found)["scheduler"]
    if was not in (None, now):  # else the schedule from there meets this one, and nobody asked for both
        before, after = (str(each).strip('"') for each in (was, now))
        raise Refusal(
            f"`resume` {config.run.resume}: the run there was written with `scheduler` {before}, but this is {after}: "
            "keep the value of that run, or choose another `run_folder`"
        )
    return found


def as_it_was_cut(comm: Communicator, config: Config, plan: Plan) -> Config:
    """The configuration with the cut of the checkpoint that `resume` names, if stages are cut by what is timed.

    Times differ from start to start; where a model is cut decides which random numbers its layers draw. Collective.
    """
    if plan.num_stages == 1 or config.parallel.balance not in TIMED:
        return config
    known = options_before(comm, config.run, plan)
    return with_options(config, {name: known[name] for name in (BALANCE,) if name in known})


def with_its_own(config: Config, before: Mapping[str, str], checkpoint: Path) -> Config:
    """The configuration by which a run goes on, with what its checkpoint knows better. Raises ConfigError."""
    with saying(f"{checkpoint}: {STATE}"):
        return with_options(config, {name: before[name] for name in FROM_CHECKPOINT if name in before})


def command_to_go_on(num_ranks: int, argv: Sequence[str], folder: Path) -> str:
    words = without_flags(Config, argv, ("run_folder", "resume"))
    start = ["mpirun", "-n", str(num_ranks), "python", "-m", "mpi4dl.train"]
    return shlex.join([*start, *words, "--run-folder", str(folder), "--resume", "auto"])


SMALL = 0.25  # of the memory: a run that needs no more by a generous guess is not looked at
GUESSED_PER_VALUE, GUESSED_PER_WEIGHT = 2000, 20  # bytes of a value of an image, and of a weight, are four times that


def told_before(setup: Setup) -> list[str]:
    """The lines about a run before it starts. Collective.

    Raises:
        Refusal: the run clearly does not fit into the memory of a node; on all ranks. A dry run only warns.
    """
    spec, engine, comm = setup.spec, setup.engine, setup.engine.comm
    told: tuple[list[str], str | None] = ([], None)
    places = comm.all_gather_object(place_of(engine.device))
    if comm.rank == 0:
        least = min(place.num_bytes for place in places)
        counts = spec.parallel.memory_check != "none" and not is_small(spec, engine, least)
        if counts or spec.streams_images:
            from mpi4dl.estimate.dry_run import looked_at

            with ProgressLine() as tell:
                work = setup.workload(tell)
            told = looked_at(work, engine, places if counts else ())
    remarks, refusal = comm.broadcast_object(told)
    if refusal is not None:
        raise Refusal(refusal)
    return list(remarks)


def is_small(spec: TrainingSpec, engine: Engine, num_bytes: int) -> bool:
    """Whether all ranks together need less than a share of so many bytes, by a guess that is far too high."""
    batch, weights = spec.batch, engine.stages.num_parameters
    each = weights if of_tokens(batch) else GUESSED_PER_VALUE
    return 4 * (prod(batch) * each + engine.comm.size * weights * GUESSED_PER_WEIGHT) < SMALL * num_bytes
